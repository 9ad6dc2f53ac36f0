"""`Monitors`: the observer and the requests of users to a run, built from its arguments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.choices import read_observe
from hftrainer.base.part import Part
from hftrainer.data.mixture_batches import make_source_log
from hftrainer.monitoring.flops import FlopCounter, peak_flops
from hftrainer.monitoring.journal import COMPLETE, JOURNAL_NAME, Journal, read_events
from hftrainer.monitoring.observer import Observer
from hftrainer.monitoring.run_requests import Requests
from hftrainer.training.steps.counters import count_batch

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.training.steps.micro_batches import MicroBatches


class Monitors(Part):
    """Reports the events of a run to its observers, and polls its requests.

    Args:
        parts: the parts of the Trainer.
        batches: the micro-batches of the run.

    Attributes:
        source_log: sums for each source of a mixture; None for other data.
        observer: a callback of the Trainer until the run ends; None without `observe`.
        user_requests: the requests to the run; None except on the main process.
    """

    def __init__(self, parts: TrainerParts, batches: MicroBatches) -> None:
        super().__init__(parts)
        self.batches = batches
        self.source_log = make_source_log(parts, batches.reader.loader)
        run_folder = parts.run_folder_without_override(self.run.trial)
        self.observer = self._make_observer(run_folder)
        self.user_requests: Requests | None = None
        if self.trainer.is_world_process_zero():
            since_evaluation = 0.0 if self.run.resumed_progress is None else self.run.resumed_progress.since_evaluation
            can_evaluate = self.trainer.eval_dataset is not None
            self.user_requests = Requests(run_folder, self.trainer.args, since_evaluation, can_evaluate=can_evaluate)

    def _make_observer(self, run_folder: str) -> Observer | None:
        """The observer of a run; None without `observe`."""
        args, plan = self.trainer.args, self.parts.engine.plan
        # All later runs in a folder write to its journal, so that it says which is the last.
        has_earlier = os.path.isfile(os.path.join(run_folder, JOURNAL_NAME))
        observations = read_observe(args.observe) | ({"journal"} if has_earlier else set())
        if not observations:
            return None
        peak = peak_flops(args.device, plan.precision) if "mfu" in observations else None
        # The resume of a run that has already ended would spoil its record.
        last_event = (read_events(run_folder) or [{}])[-1] if self.run.attempt.is_finished else {}
        is_recorded = last_event.get("reason") in COMPLETE
        has_journal = "journal" in observations and self.trainer.is_world_process_zero() and not is_recorded
        return Observer(
            observations,
            step=lambda: self.trainer.state.global_step,
            seconds=lambda: self.run.attempt.seconds_by_activity,
            waits=self.batches.reader.wait_seconds_by_cause,
            sum_over_data=lambda count: int(self.parts.counters.sum_over_data(torch.tensor([count]))),
            flops=None if peak is None else FlopCounter(peak),
            journal=Journal(run_folder if has_journal else None),
            facts={"world_size": args.world_size, "device": str(args.device), "resumed_from": self.run.resume_folder},
        )

    def begin(self) -> None:
        """Let the observer see the events of the run, and the time in the collator."""
        if self.observer is not None:
            self.batches.reader.time_collator()
            self.trainer.add_callback(self.observer)

    def add_micro_batch(self, loss: torch.Tensor, inputs: Any) -> None:
        """Count a micro-batch after its backward pass. `loss` is the result of `LossAccumulator.add_loss`."""
        if self.source_log is None and self.observer is None:
            return
        samples, tokens = count_batch(self.trainer, inputs)
        if self.source_log is not None:
            self.source_log.add(self.batches.epoch, self.batches.position.index, loss, samples, tokens)
        if self.observer is not None:
            self.observer.add_micro_batch(samples, tokens)

    def poll_requests(self) -> None:
        """Set the control flags that requests ask for."""
        if self.user_requests is not None:
            self.user_requests.poll(self.trainer.control, self.trainer.state.global_step)

    @contextlib.contextmanager
    def measure_activity(self, name: str) -> Iterator[None]:
        """Time the block, an 'evaluation' or 'saving', and report it."""
        block = contextlib.nullcontext() if self.observer is None else self.observer.activity(name)
        with block, self.run.heartbeat.in_activity(name), self.run.measure_time(name):
            yield
        if self.user_requests is not None:
            self.user_requests.record_end(name)

    def log_values(self, steps: int) -> dict[str, float]:
        """The values for a log line over the last `steps` steps. A collective operation."""
        source_values = {} if self.source_log is None else self.source_log.pop(steps)
        return source_values if self.observer is None else source_values | self.observer.pop_values()

    def close(self, reason: str, message: str = "") -> None:
        """End the traces and the journal of the run."""
        if self.user_requests is not None:
            self.user_requests.close()
        if self.observer is not None:
            self.observer.close(reason, message)
            self.trainer.remove_callback(self.observer)
