"""The parts of a run's progress that are not in `trainer_state.json`, for an exact resume."""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import math
import os
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hftrainer.checkpointing import names
from hftrainer.checkpointing.checks import check_values
from hftrainer.compat.reading import check_fields, fitting, load_torch_file
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import InvalidArgument

logger = logging.getLogger(__name__)

#: Setting → effect of a changed value on a resumed run.
_POSITION = "the epoch resumes after the same number of optimizer steps, which cover other samples than before"
_ORDER = "the order of the samples changes"
POSITION_SETTINGS = {
    "per_device_train_batch_size": _POSITION,
    "gradient_accumulation_steps": _POSITION,
    "world_size": _POSITION,
    "dataloader_drop_last": "the length of an epoch may change, and with it the epoch and the position in it",
    "samples in the data": f"{_ORDER}, and so do the epoch and the position in it",
    "mixture": "the samples so far are counted by the new weights; a function of the step can change weights in a run",
    "seed": f"{_ORDER}, unless data_seed is set",
    "data_seed": _ORDER,
    "train_sampling_strategy": _ORDER,
    "accelerator_config": f"{_ORDER}, and so may the position in it",
    "tokens_per_batch": f"{_ORDER}, and so does the position in it",
    "flatten_batches": f"{_ORDER} with tokens_per_batch",
    "elastic": "the last step of an epoch has other samples",
    "dataloader_num_workers": "random numbers in the data change",
    "dataloader_persistent_workers": "random numbers in the data change",
    "max_steps": "the learning-rate schedule continues with its new length",
}
#: Settings whose product is the number of samples per step, which may stay the same if they change together.
_OF_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
#: Settings whose product is the number of samples that all processes read at a time.
_OF_ROUND = ("per_device_train_batch_size", "world_size")
#: Changes that leave the position in the data valid.
_HARMLESS = frozenset({"max_steps"})
#: Changes that leave the samples and their order unchanged.
_SAME_SAMPLES = _HARMLESS | {"dataloader_num_workers", "dataloader_persistent_workers"}
#: Fields that count something.
_COUNTS = ("epoch", "position", "last_logged")


@dataclass
class RunProgress:
    """The progress of a run.

    Attributes:
        settings: arguments that the position in the data depends on.
        epoch: the current epoch, counted from 0; None before the first micro-batch.
        position: micro-batches of this epoch that are done.
        epoch_ended: whether `on_epoch_end` has been called for it.
        epoch_left: whether a callback ended the epoch before the end of its data.
        owes_evaluation: whether the evaluation of this step was interrupted or failed, and must be repeated.
        loss: sum of the losses since the last log line, shape `()`.
        last_logged: optimizer step of the last log line.
        metrics: sums of other numbers for the next log line.
        sources: source of a mixture → its loss, samples and tokens since the last log line.
        grad_norm: gradient norm of the last step.
        learning_rate: learning rate of the last step.
        evaluation_workers: evaluation sets whose workers have drawn their seed.
        data: what `EpochReader.state_dict` returned; None before the first micro-batch.
        since_evaluation: seconds since the last evaluation, for `eval_minutes`.
        recent_losses: losses of the last steps, with `on_divergence`.
        tracker_runs: what `ids_of_open_runs` returned; empty in other processes than the main one.
    """

    settings: dict[str, Any]
    epoch: int | None
    position: int
    epoch_ended: bool
    epoch_left: bool
    owes_evaluation: bool
    loss: torch.Tensor
    last_logged: int
    metrics: dict[str, Any]
    grad_norm: Any
    learning_rate: float | None
    evaluation_workers: list[str | None]
    data: dict[str, Any] | None
    since_evaluation: float = 0.0
    sources: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    tracker_runs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def resume_position(self, micro_batches: int) -> tuple[int, int] | None:
        """Finished epochs, and finished micro-batches of the next epoch; None if unknown.

        Args:
            micro_batches: maximum number in an epoch; a stream may end earlier.
        """
        if self.epoch is None or self.data is None:
            return None
        if self.epoch_left or self.data["exhausted"] or self.position >= micro_batches:
            return self.epoch + 1, 0
        return self.epoch, self.position

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all processes."""
        return samples_of(self.settings)

    @property
    def samples(self) -> int:
        """Samples of this epoch that all processes together have trained on."""
        return self.position * samples_of(self.settings, _OF_ROUND)

    def adapt(self, now: dict[str, Any], *, skips_data: bool) -> None:
        """Log the effect of changed arguments, and forget the position in the data if they make it invalid.

        Args:
            now: the settings of the resumed run.
            skips_data: whether a resumed epoch skips the batches already used, rather than starting again.
        """
        changed = [name for name, value in now.items() if name in self.settings and self.settings[name] != value]
        if now.get("mixture") is not None and now["elastic"] and "per_device_train_batch_size" in changed:
            raise InvalidArgument(
                "elastic=True keeps the samples of a mixture only with the per_device_train_batch_size of the "
                f"checkpoint, {self.settings['per_device_train_batch_size']}, since a micro-batch is of one source."
            )
        if samples_of(now) == self.global_batch and (shared := [name for name in changed if name in _OF_STEP]):
            listed = ", ".join(f"{name}={now[name]}, was {self.settings[name]}" for name in shared)
            level = logging.INFO if now["elastic"] else logging.WARNING
            logger.log(
                level, "Resuming with %s: a step has the same %d samples, split differently.", listed, samples_of(now)
            )
            changed = [name for name in changed if name not in _OF_STEP]
            self._convert_position(now)
        for name in changed:
            effect = POSITION_SETTINGS[name]
            logger.warning("Resuming with %s=%s, was %s: %s.", name, now[name], self.settings[name], effect)
        if moved := [name for name in changed if name not in _SAME_SAMPLES]:
            logger.warning(
                "Samples may be repeated or skipped in this epoch, and the steps left may not read all epochs: %s.%s",
                ", ".join(moved),
                " elastic=True keeps the samples of a step." if not now["elastic"] and set(moved) & {*_OF_STEP} else "",
            )
        if not skips_data or set(changed) - _HARMLESS:
            self.data = None

    def _convert_position(self, now: dict[str, Any]) -> None:
        """Convert the position to micro-batches of the resumed run, and drop the state of the batch read ahead."""
        self.position, left = divmod(self.samples, samples_of(now, _OF_ROUND))
        if left or self.data is None:
            self.data = None
            return
        kept = {name: self.data[name] for name in ("opened", "held", "exhausted")}
        # Without elastic=True each process may have read a stream of its own.
        stream = self.data.get("stream") if now["elastic"] and self.settings.get("elastic") else None
        self.data = {**kept, "before": None, "stream": stream, "loader": None}


def samples_of(settings: dict[str, Any], names: Iterable[str] = _OF_STEP) -> int:
    """The product of settings that count samples."""
    return math.prod(settings.get(name, 1) for name in names)


def load_progress(folder: str, process_index: int, world_size: int) -> RunProgress | None:
    """The progress of one process in a checkpoint; None in checkpoints of transformers.

    If the checkpoint was written by a different number of processes, all get the progress of rank 0, with the mean of
    the losses.

    Raises:
        UnsafeCheckpoint: when the state of the training data contains objects that need unpickling.
        DamagedCheckpoint: when the file is truncated.
    """
    of_first = [path for size in (1, 2) if os.path.isfile(path := os.path.join(folder, names.progress_name(0, size)))]
    if not of_first:
        return None
    first = _read(of_first[0])
    written = max(1, len(glob.glob(os.path.join(glob.escape(folder), "progress_*.pt"))))
    if written == world_size:
        return first if process_index == 0 else _read(os.path.join(folder, names.progress_name(process_index, written)))
    others = [os.path.join(folder, names.progress_name(rank, written)) for rank in range(1, written)]
    found = [first, *(_read(path) for path in others if os.path.isfile(path))]  # a .ckpt holds only that of rank 0
    first.loss = torch.stack([each.loss for each in found]).mean()
    for name in first.sources:
        columns = zip(*(each.sources[name] for each in found), strict=True)
        loss, samples, tokens = map(sum, columns)  # losses are averaged, samples and tokens add up over the processes
        first.sources[name] = [loss / len(found), samples / world_size, tokens / world_size]
    return first


def global_batch_of(folder: str) -> int | None:
    """Samples of an optimizer step of the run that wrote a checkpoint; None if the checkpoint does not say."""
    progress = load_progress(folder, 0, 1)
    return None if progress is None else progress.global_batch


def _read(path: str) -> RunProgress:
    with torch.serialization.safe_globals(numpy_state_types()):
        saved = load_torch_file(path)
    known = {field.name for field in dataclasses.fields(RunProgress)}
    with fitting(path):
        _check(saved)
        return RunProgress(**{name: value for name, value in saved.items() if name in known})


def _check(saved: dict[str, Any]) -> None:
    check_fields(saved, RunProgress)
    # The upper limit keeps a sampler's seed within 64 bits.
    if wrong := [name for name in _COUNTS if not 0 <= (saved[name] or 0) < 2**62]:
        raise ValueError(f"{wrong[0]} is {saved[wrong[0]]}, not between 0 and 2**62")
    if (data := saved["data"]) is not None:
        check_values(data, {"opened": {}, "held": {}, "exhausted": False}, "data")
        if not isinstance(data.get("before"), (dict, type(None))):
            raise TypeError("data['before'] is not a dict")
    for name, row in saved.get("sources", {}).items():
        if not (isinstance(name, str) and len(row) == 3 and all(isinstance(each, float) for each in row)):
            raise ValueError(f"sources[{reprlib.repr(name)}] is {reprlib.repr(row)}, not three floats")
    # Reject values that JSON cannot hold, since they cannot be compared.
    json.dumps(saved["settings"])
    if found := [name for name in _OF_STEP if not isinstance(saved["settings"].get(name, 1), int)]:
        raise TypeError(f"{found[0]} is {reprlib.repr(saved['settings'][found[0]])}, not an int")
    sums = {"loss": saved["loss"]}
    for name, (value, count) in saved["metrics"].items():
        if not (isinstance(name, str) and isinstance(count, int)):
            raise TypeError(f"the metric {name!r} has the count {reprlib.repr(count)}, not an int")
        sums[name] = value
    for name, value in sums.items():
        if value.shape or not value.is_floating_point():
            raise ValueError(f"{name} is {value.dtype} of shape {tuple(value.shape)}, not a floating-point scalar")
