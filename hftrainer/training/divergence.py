"""Detects that a run diverges, and keeps the list of the samples that it then skips.

All ranks check each step before the weights change, and agree on the result. The runner goes back to the last
checkpoint, and `MicroBatches` drops the batches of that step when it reads them again.
"""

from __future__ import annotations

import collections
import enum
import json
import logging
import math
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.base.part import Part
from hftrainer.checkpointing.run_progress import STEP_SETTINGS, count_samples
from hftrainer.compat.libraries import has_length
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import seed_of_order
from hftrainer.errors import TrainingDiverged
from hftrainer.monitoring import journal
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.micro_batches import MicroBatches, Window

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

SKIPPED_NAME = "skipped_samples.jsonl"
#: Maximum and minimum number of recent losses with which a step's loss is compared.
_MAX_LOSSES, _MIN_LOSSES = 100, 20


class _Reason(enum.IntEnum):
    """Why a step counts as diverged, in the order of certainty."""

    NONE = 0
    SPIKE = 1
    GRADIENT = 2
    LOSS = 3


_DESCRIPTIONS = {
    _Reason.SPIKE: "the loss is a spike",
    _Reason.GRADIENT: "the gradient norm is not finite",
    _Reason.LOSS: "the loss is not finite",
}


@dataclass
class DivergedStep:
    """A diverged step, as one rank sees it.

    Attributes:
        step: the number of the optimizer step, which was not made.
        reason: why the step counts as diverged on this rank.
        value: the loss, or the gradient norm.
        windows: the micro-batches of the step; two if the step continues in the next epoch.
        samples: indices of the samples, by micro-batch; None for streams.
    """

    step: int
    reason: _Reason
    value: float
    windows: list[Window]
    samples: list[Any] | None


class Diverged(Exception):
    """Raised by all ranks in the same step to end an attempt. The runner decides how to continue."""

    def __init__(self, diverged_step: DivergedStep) -> None:
        super().__init__(f"Step {diverged_step.step} diverged.")
        self.diverged_step = diverged_step


class DivergenceWatch(Part):
    """Checks the steps of a run for divergence.

    Args:
        parts: the parts of the Trainer.
        batches: the micro-batches of the run.

    Attributes:
        is_enabled: whether the run checks its steps; if not, its methods are not called.
    """

    def __init__(self, parts: TrainerParts, batches: MicroBatches) -> None:
        super().__init__(parts)
        self.batches = batches
        self.is_enabled = self.run.skipped_samples is not None
        losses = [] if self.run.resumed_progress is None else self.run.resumed_progress.recent_losses
        self.recent_losses: collections.deque[float] = collections.deque(losses, maxlen=_MAX_LOSSES)
        self._loss: torch.Tensor | None = None
        self._windows: list[Window] = []
        if self.is_enabled and isinstance(batches.reader.loader, PreparedDataLoader):
            batches.reader.loader.keep_indices()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to the loss of the step."""
        self._loss = loss if self._loss is None else self._loss + loss
        epoch = self.batches.epoch
        position = self.batches.position
        if (window := Window(epoch, position.window_start, position.window_size)) not in self._windows:
            self._windows.append(window)

    def check_step(self, model: torch.nn.Module, norm: Any) -> None:
        """Check the step before the optimizer makes it.

        Args:
            model: the model.
            norm: the gradient norm; None if it is not known.

        Raises:
            Diverged: on all ranks, if the step diverges on any of them.
        """
        assert self._loss is not None
        # The scaler skips steps with infinite gradients.
        has_scaler = self.trainer.accelerator.scaler is not None
        if norm is None and not has_scaler:
            norm = self.trainer._get_grad_norm(model)
        norm = torch.as_tensor(0.0 if norm is None else norm).to(self._loss.device)
        loss, norm = torch.stack([self._loss.float(), norm.float()]).tolist()
        reason, value = self._judge_step(loss, 0.0 if has_scaler else norm)
        if self.trainer.accelerator.processes.any_rank(reason != _Reason.NONE):
            step = self.trainer.state.global_step + 1
            raise Diverged(DivergedStep(step, reason, value, self._windows, self._step_samples()))
        self.recent_losses.append(loss)
        self._loss, self._windows = None, []

    def _judge_step(self, loss: float, norm: float) -> tuple[_Reason, float]:
        if not math.isfinite(loss):
            return _Reason.LOSS, loss
        if not math.isfinite(norm):
            return _Reason.GRADIENT, norm
        threshold = self.trainer.args.divergence_threshold
        if threshold is not None and len(self.recent_losses) >= _MIN_LOSSES:
            mean = sum(self.recent_losses) / len(self.recent_losses)
            deviation = math.sqrt(sum([(loss - mean) ** 2 for loss in self.recent_losses]) / len(self.recent_losses))
            # If the losses hardly vary, noise is no spike.
            deviation = max(deviation, 0.01 * abs(mean))
            if loss > mean + threshold * deviation:
                return _Reason.SPIKE, loss
        return _Reason.NONE, loss

    def _step_samples(self) -> list[Any] | None:
        """The indices of the step's samples on this rank, by micro-batch; None if unknown."""
        loader = self.batches.reader.loader
        if not isinstance(loader, PreparedDataLoader) or len(self._windows) != 1:
            return None
        return loader.last_indices(self._windows[0].size)


class SkippedSamples:
    """The windows that a run skips, from `skipped_samples.jsonl`; equal on all ranks.

    Args:
        trainer: the Trainer.
        trial: the hyperparameter trial, if any.
        checkpoint: the checkpoint that the run resumes from; without one, the list is empty.
    """

    def __init__(self, trainer: Trainer, trial: Any, checkpoint: str | None) -> None:
        self.trainer = trainer
        self.path = os.path.join(trainer._hftrainer.run_folder_without_override(trial), SKIPPED_NAME)
        self.entries: list[dict[str, Any]] = trainer.accelerator.processes.broadcast_from_main(
            lambda: self._load_entries(checkpoint)
        )
        self.windows: dict[tuple[int, int], int] = {}
        for entry in self.entries:
            self._skip_windows(entry)

    def _load_entries(self, checkpoint: str | None) -> list[dict[str, Any]]:
        """The entries that a resumed run applies. Entries of another run are moved to an `earlier_` file."""
        source = self.path if checkpoint is None else os.path.join(os.path.dirname(checkpoint), SKIPPED_NAME)
        # A .ckpt is unpacked into a temporary folder, which has no such file beside it.
        if not os.path.isfile(source):
            source = self.path
        entries = _read_entries(source)
        if checkpoint is not None and os.path.abspath(source) == os.path.abspath(self.path):
            return entries
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if _read_entries(self.path):
            os.replace(self.path, os.path.join(os.path.dirname(self.path), f"earlier_{SKIPPED_NAME}"))
        run_entries = entries if checkpoint is not None else []
        # Write even an empty file: it replaces the one at the storage's URL.
        Path(self.path).write_text("".join(f"{json.dumps(entry)}\n" for entry in run_entries), encoding="utf-8")
        return run_entries

    def _window_settings(self) -> dict[str, Any]:
        """The settings that say which samples a window of the list holds; `position_settings` are a checkpoint's."""
        args = self.trainer.args
        dataset = self.trainer.train_dataset
        return {
            "per_device_train_batch_size": self.trainer._hftrainer.run.train_batch_size,
            "world_size": self.trainer.accelerator.processes.data_world_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": seed_of_order(args),
            "train_sampling_strategy": str(args.train_sampling_strategy),
            "tokens_per_batch": args.tokens_per_batch,
            "samples in the data": len(dataset) if has_length(dataset) else None,
        }

    def _skip_windows(self, entry: Mapping[str, Any]) -> None:
        """Skip the windows of an entry, if its positions apply to this run."""
        saved = entry["settings"]
        new = self._window_settings()
        ratio = 1.0
        if saved != new:
            changes = ", ".join(f"{name}={new[name]}, was {saved[name]}" for name in new if new[name] != saved[name])
            is_same_step = count_samples(saved) == count_samples(new)
            is_same_data = all(saved[name] == new[name] for name in new if name not in STEP_SETTINGS)
            if not (self.trainer.args.elastic and is_same_step and is_same_data):
                advice = "" if self.trainer.args.elastic else " elastic=True keeps the samples of a step."
                text = "%s: the samples of step %s are not skipped, since their position differs with %s.%s"
                logger.warning(text, self.path, entry["step"], changes, advice)
                return
            ratio = new["gradient_accumulation_steps"] / saved["gradient_accumulation_steps"]
        for epoch, start, size in entry["windows"]:
            self.windows[epoch, round(start * ratio)] = round(size * ratio)

    def extend_lengths(self, lengths: RunLengths) -> RunLengths:
        """The lengths of the run with more epochs, if max_steps needs them, or else fewer steps."""
        if not self.windows:
            return lengths
        # A stream has one epoch, which continues.
        if lengths.num_train_epochs == sys.maxsize:
            return lengths._replace(micro_batches_in_epoch=lengths.micro_batches_in_epoch + sum(self.windows.values()))

        def count_skipped(epochs: int) -> int:
            return sum(epoch < epochs for epoch, _ in self.windows)

        # Without max_steps, the run ends with its data.
        if self.trainer.args.max_steps <= 0:
            return lengths._replace(max_steps=max(lengths.max_steps - count_skipped(lengths.num_train_epochs), 1))
        epochs = lengths.num_train_epochs
        steps_per_epoch = lengths.num_update_steps_per_epoch
        while epochs * steps_per_epoch - count_skipped(epochs) < lengths.max_steps:
            epochs += 1
        return lengths._replace(num_train_epochs=epochs)

    def add_diverged_step(self, diverged_step: DivergedStep, resume_folder: str | None) -> str:
        """Add a diverged step before the rollback to `resume_folder`, and return a message.

        A collective operation.

        Raises:
            TrainingDiverged: after `max_rollbacks` rollbacks, or with `on_divergence="stop"`.
        """
        processes = self.trainer.accelerator.processes
        args = self.trainer.args
        diverged_steps = processes.gather_objects([diverged_step])
        worst = max(diverged_steps, key=lambda step: step.reason)
        reason = worst.reason
        value = worst.value
        ranks = [rank for rank, step in enumerate(diverged_steps) if step.reason == reason]
        samples = [step.samples for step in diverged_steps]
        place = f" on rank {', '.join(map(str, ranks))}" if len(diverged_steps) > 1 else ""
        message = f"Step {diverged_step.step} diverged: {_DESCRIPTIONS[reason]} ({value:g}{place})"
        if len(self.entries) >= args.max_rollbacks or args.on_divergence == "stop":
            raise TrainingDiverged(self._make_error_message(message, worst, samples))
        entry = {
            "step": diverged_step.step,
            "reason": _DESCRIPTIONS[reason],
            "value": str(value) if not math.isfinite(value) else value,
            "ranks": ranks,
            "windows": [list(window) for window in diverged_step.windows],
            "samples": samples,
            "checkpoint": resume_folder,
            "settings": self._window_settings(),
        }
        self.entries.append(entry)
        self._skip_windows(entry)
        processes.broadcast_from_main(lambda: journal.append_line(self.path, entry, is_durable=True))
        rollback = f"Rollback {len(self.entries)} of {args.max_rollbacks}"
        return f"{message}. {rollback}; {_describe_samples(samples)} are skipped"

    def _make_error_message(self, message: str, diverged_step: DivergedStep, samples: list[Any]) -> str:
        args = self.trainer.args
        reason = "on_divergence='stop'"
        if args.on_divergence != "stop":
            reason = f"the run was rolled back {len(self.entries)} times, max_rollbacks={args.max_rollbacks}"
        skipped_steps = "".join(
            f"\n  step {entry['step']}: {entry['reason']}, {_describe_samples(entry['samples'])}"
            for entry in self.entries
        )
        places = ", ".join(f"epoch {window.epoch} from micro-batch {window.start}" for window in diverged_step.windows)
        return (
            f"{message}, and {reason}. The step read {_describe_samples(samples)}, {places}. Check these "
            "samples first. If they are sound, lower learning_rate, lengthen the warmup, set max_grad_norm, or "
            f"use bf16 instead of fp16.{' Skipped before:' if skipped_steps else ''}{skipped_steps}"
        )


def _describe_samples(samples: list[Any]) -> str:
    """Describe samples in a message by their indices on all ranks."""
    indices = [index for rank_batches in samples if rank_batches for batch in rank_batches for index in batch]
    if not indices:
        return "samples whose indices are not known"
    shortener = reprlib.Repr()
    shortener.maxlist = 64
    return f"the samples {shortener.repr(indices)}"


def _read_entries(path: str) -> list[dict[str, Any]]:
    """The entries of the file. A killed process may have left an incomplete line."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if os.path.isfile(path) else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            logger.warning("%s: an incomplete line is ignored: %s", path, reprlib.repr(line))
    return entries
