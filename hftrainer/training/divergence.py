"""Notices that a run diverges, and keeps the list of the samples that it then skips.

All ranks check each step before the weights change, and agree on what they found. The runner goes back to the last
checkpoint, and `MicroBatchIterator` drops the batches of that step when it reads them again.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import logging
import math
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.compat.overrides import has_length
from hftrainer.data.accumulation import Span, TrainingSchedule
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import seed_of_order
from hftrainer.errors import TrainingDiverged
from hftrainer.training.storage import run_folder

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.components import Components
    from hftrainer.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

SKIPPED_NAME = "skipped_samples.jsonl"
#: Losses with which a step's loss is compared, and how many are needed for that.
_RECENT, _ENOUGH = 100, 20


class _Reason(enum.IntEnum):
    """Why a step is a divergence, from the least to the most certain."""

    NONE = 0
    SPIKE = 1
    GRADIENT = 2
    LOSS = 3


_WORDS = {
    _Reason.SPIKE: "the loss is a spike",
    _Reason.GRADIENT: "the gradient norm is not finite",
    _Reason.LOSS: "the loss is not finite",
}


@dataclass
class Finding:
    """A step that diverges, as one rank sees it.

    Attributes:
        step: the optimizer step, which has not been made.
        reason: what is wrong on this rank.
        value: the loss, or the gradient norm.
        spans: the micro-batches of the step.
        samples: indices of the samples, by micro-batch; None for streams.
    """

    step: int
    reason: _Reason
    value: float
    spans: list[Span]
    samples: list[Any] | None


class Diverged(Exception):
    """Ends an attempt at training; the runner decides how to go on. All ranks raise it in the same step."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"Step {finding.step} diverged.")
        self.finding = finding


class DivergenceWatch:
    """Checks the steps of a `TrainingLoop`, with `on_divergence`, and knows which windows it skips.

    Args:
        components: the parts of the Trainer.
        loop: the loop.
    """

    def __init__(self, components: Components, loop: TrainingLoop) -> None:
        self.trainer = components.trainer
        self.loop, self.run = loop, components.run
        self.enabled = self.run.skipped is not None
        earlier = [] if loop.progress is None else loop.progress.recent_losses
        self.recent: collections.deque[float] = collections.deque(earlier, maxlen=_RECENT)
        self._loss: torch.Tensor | None = None
        self._spans: list[Span] = []
        if self.enabled and isinstance(loop.reader.loader, PreparedDataLoader):
            loop.reader.loader.keep_indices()

    def skips(self, start: int) -> bool:
        """Whether the window that begins at this micro-batch of the epoch is skipped; it has just been read."""
        if self.run.skipped is None or (self.loop.epoch, start) not in self.run.skipped.windows:
            return False
        self.loop.between_steps = True  # dropped, it is a part of no step
        return True

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to that of the step."""
        if not self.enabled:
            return
        self._loss = loss if self._loss is None else self._loss + loss
        batches = self.loop.micro_batches
        assert batches.window is not None
        if (span := Span(self.loop.epoch, batches.window_start, batches.window.size)) not in self._spans:
            self._spans.append(span)

    def check(self, model: torch.nn.Module) -> None:
        """Check the step before the optimizer makes it.

        Raises:
            Diverged: on all ranks, if the step diverges on any of them.
        """
        if not self.enabled:
            return
        assert self._loss is not None
        scaled = self.trainer.accelerator.scaler is not None  # the scaler skips steps with infinite gradients
        norm = self.loop.grad_norm
        if norm is None and not scaled:
            norm = self.trainer._get_grad_norm(model)
        norm = torch.as_tensor(0.0 if norm is None else norm).to(self._loss.device)
        loss, norm = torch.stack([self._loss.float(), norm.float()]).tolist()
        reason, value = self._judge(loss, 0.0 if scaled else norm)
        processes = self.trainer.accelerator.processes
        if processes.start_max_over_ranks([int(reason)])()[0] if processes.several else reason:
            step = self.trainer.state.global_step + 1
            raise Diverged(Finding(step, reason, value, self._spans, self._samples()))
        self.recent.append(loss)
        self._loss, self._spans = None, []

    def _judge(self, loss: float, norm: float) -> tuple[_Reason, float]:
        if not math.isfinite(loss):
            return _Reason.LOSS, loss
        if not math.isfinite(norm):
            return _Reason.GRADIENT, norm
        threshold = self.trainer.args.divergence_threshold
        if threshold is not None and len(self.recent) >= _ENOUGH:
            mean = sum(self.recent) / len(self.recent)
            deviation = math.sqrt(sum([(each - mean) ** 2 for each in self.recent]) / len(self.recent))
            deviation = max(deviation, 0.01 * abs(mean))  # losses that hardly vary would make a spike of any noise
            if loss > mean + threshold * deviation:
                return _Reason.SPIKE, loss
        return _Reason.NONE, loss

    def _samples(self) -> list[Any] | None:
        """The indices of the step's samples on this rank, by micro-batch; None if they are not known."""
        loader = self.loop.reader.loader
        count = sum(span.micro_batches for span in self._spans)
        if not isinstance(loader, PreparedDataLoader) or len(self._spans) != 1:
            return None
        return loader.last_indices(count)


class SkippedSamples:
    """The windows that a run skips, as they are in `skipped_samples.jsonl`; the same on all ranks.

    Args:
        trainer: the Trainer.
        trial: the hyperparameter trial, if any.
        checkpoint: the checkpoint that the run resumes from; without one, the list is empty.
    """

    def __init__(self, trainer: Trainer, trial: Any, checkpoint: str | None) -> None:
        self.trainer = trainer
        self.path = os.path.join(run_folder(trainer, trial), SKIPPED_NAME)
        self.entries: list[dict[str, Any]] = trainer.accelerator.processes.from_main(lambda: self._begin(checkpoint))
        self.windows: dict[tuple[int, int], int] = {}
        for entry in self.entries:
            self._apply(entry)

    def _begin(self, checkpoint: str | None) -> list[dict[str, Any]]:
        """The lines that a resumed run obeys; those of another run are put aside."""
        beside = self.path if checkpoint is None else os.path.join(os.path.dirname(checkpoint), SKIPPED_NAME)
        if not os.path.isfile(beside):  # such as beside the folder that a .ckpt is unpacked into
            beside = self.path
        entries = _read(beside)
        if checkpoint is not None and os.path.abspath(beside) == os.path.abspath(self.path):
            return entries
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if _read(self.path):
            os.replace(self.path, os.path.join(os.path.dirname(self.path), f"earlier_{SKIPPED_NAME}"))
        kept = entries if checkpoint is not None else []
        with open(self.path, "w", encoding="utf-8") as file:  # empty, so that one at the storage's URL is replaced
            file.writelines(json.dumps(entry) + "\n" for entry in kept)
        return kept

    def _settings(self) -> dict[str, Any]:
        """What a position in the data depends on; the first three are the samples of a step."""
        args, data = self.trainer.args, self.trainer.train_dataset
        return {
            "per_device_train_batch_size": self.trainer._hftrainer.run.train_batch_size,
            "world_size": self.trainer.accelerator.processes.data_world_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": seed_of_order(args),
            "train_sampling_strategy": str(args.train_sampling_strategy),
            "tokens_per_batch": args.tokens_per_batch,
            "samples in the data": len(data) if has_length(data) else None,
        }

    def _apply(self, entry: Mapping[str, Any]) -> None:
        """Skip the windows of an entry, if its positions are those of this run."""
        then, now, ratio = entry["settings"], self._settings(), 1.0
        if then != now:
            changed = ", ".join(f"{name}={now[name]}, was {then[name]}" for name in now if now[name] != then[name])
            of_step = list(now)[:3]
            same_step = math.prod(then[name] for name in of_step) == math.prod(now[name] for name in of_step)
            same_step = same_step and all(then[name] == now[name] for name in list(now)[3:])
            if not (self.trainer.args.elastic and same_step):
                logger.warning(
                    "%s: the samples of step %s are not skipped, since their position is another with %s.%s",
                    *(self.path, entry["step"], changed),
                    "" if self.trainer.args.elastic else " elastic=True keeps the samples of a step.",
                )
                return
            ratio = now["gradient_accumulation_steps"] / then["gradient_accumulation_steps"]
        for epoch, start, count in entry["windows"]:
            self.windows[epoch, round(start * ratio)] = round(count * ratio)

    def extend(self, schedule: TrainingSchedule) -> TrainingSchedule:
        """The lengths of the run: more epochs if they are needed for max_steps, or else fewer steps."""
        if not self.windows:
            return schedule
        if schedule.num_train_epochs == sys.maxsize:  # a stream: its epoch goes on
            return schedule._replace(steps_in_epoch=schedule.steps_in_epoch + sum(self.windows.values()))

        def skipped(epochs: int) -> int:
            return sum(epoch < epochs for epoch, _ in self.windows)

        if self.trainer.args.max_steps <= 0:  # the run ends with its data
            return schedule._replace(max_steps=max(schedule.max_steps - skipped(schedule.num_train_epochs), 1))
        epochs, of_epoch = schedule.num_train_epochs, schedule.num_update_steps_per_epoch
        while epochs * of_epoch - skipped(epochs) < schedule.max_steps:
            epochs += 1
        return schedule._replace(num_train_epochs=epochs)

    def add(self, found: Finding, folder: str | None) -> str:
        """Add the step of a finding, on all ranks, before the run goes back to `folder`; returns a message.

        Raises:
            TrainingDiverged: if the run does not go back, because it has done so `max_rollbacks` times or should not.
        """
        processes, args = self.trainer.accelerator.processes, self.trainer.args
        of_all = processes.gather_objects([found])
        worst = max(of_all, key=lambda each: each.reason)
        ranks = [rank for rank, each in enumerate(of_all) if each.reason == worst.reason]
        samples = [each.samples for each in of_all]
        where = f" on rank {', '.join(map(str, ranks))}" if len(of_all) > 1 else ""
        what = f"Step {found.step} diverged: {_WORDS[worst.reason]} ({worst.value:g}{where})"
        if len(self.entries) >= args.max_rollbacks or args.on_divergence == "stop":
            raise TrainingDiverged(self._explain(what, worst, samples))
        entry = {
            "step": found.step,
            "reason": _WORDS[worst.reason],
            "value": str(worst.value) if not math.isfinite(worst.value) else worst.value,
            "ranks": ranks,
            "windows": [list(dataclasses.astuple(span)) for span in found.spans],
            "samples": samples,
            "checkpoint": folder,
            "settings": self._settings(),
        }
        self.entries.append(entry)
        self._apply(entry)
        processes.from_main(lambda: _append(self.path, entry))
        return f"{what}. Rollback {len(self.entries)} of {args.max_rollbacks}; {_name(samples)} are skipped"

    def _explain(self, what: str, worst: Finding, samples: list[Any]) -> str:
        if self.trainer.args.on_divergence == "stop":
            ending = "on_divergence='stop'"
        else:
            ending = f"the run went back {len(self.entries)} times, max_rollbacks={self.trainer.args.max_rollbacks}"
        earlier = "".join(
            f"\n  step {each['step']}: {each['reason']}, {_name(each['samples'])}" for each in self.entries
        )
        return (
            f"{what}, and {ending}. It read {_name(samples)}, "
            f"{', '.join(f'epoch {each.epoch} from micro-batch {each.start}' for each in worst.spans)}. Look at them "
            "first; if they are sound, lower learning_rate, lengthen the warmup, set max_grad_norm, or use bf16 "
            f"instead of fp16.{' Skipped before:' if earlier else ''}{earlier}"
        )


def _name(samples: list[Any]) -> str:
    """Samples for a message: indices of all ranks."""
    known = [index for of_rank in samples if of_rank for batch in of_rank for index in batch]
    if not known:
        return "samples whose indices are not known"
    shown = reprlib.Repr()
    shown.maxlist = 64
    return f"the samples {shown.repr(known)}"


def _read(path: str) -> list[dict[str, Any]]:
    """The lines of the file; a killed process may have left a part of one."""
    entries = []
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    entries.append(json.loads(line))
                except ValueError:
                    logger.warning("%s: an incomplete line is ignored: %s", path, reprlib.repr(line))
    return entries


def _append(path: str, entry: Mapping[str, Any]) -> None:
    """Append a line, and wait until it is on the disk."""
    with open(path, "a+b") as file:
        file.seek(0)
        torn = not (file.read() or b"\n").endswith(b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(entry, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
