"""`RunProgress`: what an exact resume needs besides `trainer_state.json`, such as the position in the data."""

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

from hftrainer.base.content_checks import check_fields, name_file_in_errors
from hftrainer.base.safe_loading import load_torch_file
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.file_checks import check_value_types
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
    "mixture": "the samples so far count with the new weights; use a function of the step to change weights in a run",
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
#: Settings whose product is the number of samples per optimizer step.
STEP_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
#: Settings whose product is the number of samples that all processes read at a time.
_ROUND_SETTINGS = ("per_device_train_batch_size", "world_size")
#: Changes that leave the position in the data valid.
_HARMLESS_CHANGES = frozenset({"max_steps"})
#: Changes that leave the samples and their order unchanged.
_SAME_SAMPLES = _HARMLESS_CHANGES | {"dataloader_num_workers", "dataloader_persistent_workers"}
#: Fields that are counts.
_COUNTS = ("epoch", "position", "last_logged")


@dataclass
class RunProgress:
    """The progress of a run.

    Attributes:
        settings: arguments that the position in the data depends on.
        epoch: the current epoch, counted from 0; None before the first micro-batch.
        position: finished micro-batches of this epoch.
        epoch_ended: whether `on_epoch_end` has been called for this epoch.
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
        tracker_runs: what `ids_of_open_runs` returned; empty except in the main process.
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
    def global_batch_size(self) -> int:
        """Samples of an optimizer step, over all processes."""
        return count_samples(self.settings)

    @property
    def samples(self) -> int:
        """Samples of this epoch that all processes together have trained on."""
        return self.position * count_samples(self.settings, _ROUND_SETTINGS)

    def adapt_to(self, settings: dict[str, Any], *, skips_data: bool) -> None:
        """Log the effect of changed arguments, and forget a position that they invalidate.

        Args:
            settings: the settings of the resumed run.
            skips_data: whether a resumed epoch skips the batches already used, instead of starting again.
        """
        changes = [name for name, value in settings.items() if name in self.settings and self.settings[name] != value]
        if settings.get("mixture") is not None and settings["elastic"] and "per_device_train_batch_size" in changes:
            raise InvalidArgument(
                "elastic=True keeps the samples of a mixture only with the per_device_train_batch_size of the "
                f"checkpoint, {self.settings['per_device_train_batch_size']}, since each micro-batch has one source."
            )
        if count_samples(settings) == self.global_batch_size and (
            split_changes := [name for name in changes if name in STEP_SETTINGS]
        ):
            description = ", ".join(f"{name}={settings[name]}, was {self.settings[name]}" for name in split_changes)
            level = logging.INFO if settings["elastic"] else logging.WARNING
            logger.log(
                level,
                "Resuming with %s: a step has the same %d samples, split differently.",
                description,
                count_samples(settings),
            )
            changes = [name for name in changes if name not in STEP_SETTINGS]
            self._convert_position(settings)
        self._warn_about_changes(changes, settings)
        if not skips_data or set(changes) - _HARMLESS_CHANGES:
            self.data = None

    def _warn_about_changes(self, changes: list[str], settings: dict[str, Any]) -> None:
        for name in changes:
            effect = POSITION_SETTINGS[name]
            logger.warning("Resuming with %s=%s, was %s: %s.", name, settings[name], self.settings[name], effect)
        if data_changes := [name for name in changes if name not in _SAME_SAMPLES]:
            changes_step = not settings["elastic"] and bool(set(data_changes) & {*STEP_SETTINGS})
            hint = " elastic=True, or a per_device_train_batch_size that fits, keeps the size of a step."
            logger.warning(
                "Samples may be repeated or skipped in this epoch, and the run may not complete all epochs: %s.%s",
                ", ".join(data_changes),
                hint if changes_step else "",
            )

    def _convert_position(self, settings: dict[str, Any]) -> None:
        """Convert the position to micro-batches of the resumed run, and forget prefetched data."""
        self.position, remainder = divmod(self.samples, count_samples(settings, _ROUND_SETTINGS))
        if remainder or self.data is None:
            self.data = None
            return
        fields = {name: self.data[name] for name in ("opened", "held", "exhausted")}
        # Without elastic=True each process may have read a different stream.
        stream = self.data.get("stream") if settings["elastic"] and self.settings.get("elastic") else None
        self.data = {**fields, "before": None, "stream": stream, "loader": None}


def count_samples(settings: dict[str, Any], names: Iterable[str] = STEP_SETTINGS) -> int:
    """Multiply the settings that count samples."""
    return math.prod(settings.get(name, 1) for name in names)


def load_progress(folder: str, process_index: int, world_size: int) -> RunProgress | None:
    """The progress of one process in a checkpoint; None in checkpoints of transformers.

    If another number of processes wrote the checkpoint, all get the progress of rank 0, with the mean of the losses.

    Raises:
        UnsafeCheckpoint: if the state of the training data contains objects that need unpickling.
        DamagedCheckpoint: if the file is truncated.
    """
    paths = [path for size in (1, 2) if os.path.isfile(path := os.path.join(folder, layout.progress_name(0, size)))]
    if not paths:
        return None
    first = _read(paths[0])
    size = max(1, len(glob.glob(os.path.join(glob.escape(folder), "progress_*.pt"))))
    if size == world_size:
        return first if process_index == 0 else _read(os.path.join(folder, layout.progress_name(process_index, size)))
    other_paths = [os.path.join(folder, layout.progress_name(rank, size)) for rank in range(1, size)]
    # A .ckpt file holds only the progress of rank 0.
    all_progress = [first, *(_read(path) for path in other_paths if os.path.isfile(path))]
    first.loss = torch.stack([progress.loss for progress in all_progress]).mean()
    for name in first.sources:
        columns = zip(*(progress.sources[name] for progress in all_progress), strict=True)
        loss, samples, tokens = map(sum, columns)
        # Each process gets the mean loss and an equal share of the samples and tokens.
        first.sources[name] = [loss / len(all_progress), samples / world_size, tokens / world_size]
    return first


def read_global_batch_size(folder: str) -> int | None:
    """Samples per optimizer step of the run that wrote a checkpoint; None if unknown."""
    progress = load_progress(folder, 0, 1)
    return None if progress is None else progress.global_batch_size


def _read(path: str) -> RunProgress:
    saved = load_torch_file(path, allowed=numpy_state_types())
    field_names = {field.name for field in dataclasses.fields(RunProgress)}
    with name_file_in_errors(path):
        _check_progress(saved)
        return RunProgress(**{name: value for name, value in saved.items() if name in field_names})


def _check_progress(saved: dict[str, Any]) -> None:
    check_fields(saved, RunProgress)
    # The upper limit keeps a sampler's seed within 64 bits.
    if invalid_counts := [name for name in _COUNTS if not 0 <= (saved[name] or 0) < 2**62]:
        raise ValueError(f"{invalid_counts[0]} is {saved[invalid_counts[0]]}, not between 0 and 2**62")
    if (data := saved["data"]) is not None:
        check_value_types(data, {"opened": {}, "held": {}, "exhausted": False}, "data")
        if not isinstance(data.get("before"), (dict, type(None))):
            raise TypeError("data['before'] is not a dict")
    for name, row in saved.get("sources", {}).items():
        if not (isinstance(name, str) and len(row) == 3 and all(isinstance(number, float) for number in row)):
            raise ValueError(f"sources[{reprlib.repr(name)}] is {reprlib.repr(row)}, not three floats")
    # Reject values that JSON cannot hold, since they cannot be compared.
    json.dumps(saved["settings"])
    if invalid_settings := [name for name in STEP_SETTINGS if not isinstance(saved["settings"].get(name, 1), int)]:
        raise TypeError(f"{invalid_settings[0]} is {reprlib.repr(saved['settings'][invalid_settings[0]])}, not an int")
    _check_sums(saved["loss"], saved["metrics"])


def _check_sums(loss: Any, metrics: dict[str, Any]) -> None:
    sums = {"loss": loss}
    for name, (value, count) in metrics.items():
        if not (isinstance(name, str) and isinstance(count, int)):
            raise TypeError(f"the metric {name!r} has the count {reprlib.repr(count)}, not an int")
        sums[name] = value
    for name, value in sums.items():
        if value.shape or not value.is_floating_point():
            raise ValueError(f"{name} is {value.dtype} of shape {tuple(value.shape)}, not a floating-point scalar")
