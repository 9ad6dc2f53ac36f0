"""`Run`: the state of a run; `Attempt`: that of one attempt of it.

Neither is the plan of the engine (`parallel/plan.py`), which is made from the arguments, for all runs of a Trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.run_progress import RunProgress
from hftrainer.monitoring.health import Heartbeat
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.sums import LoggedMetrics
from hftrainer.training.stopping import SignalListener

if TYPE_CHECKING:
    from hftrainer.training.divergence import SkippedSamples
    from hftrainer.training.restarts import InitialStateSnapshot
    from hftrainer.training.steps.loop import TrainingLoop


@dataclass
class Attempt:
    """One pass through Lightning's loop; a rollback or a smaller batch begins another in the same run.

    It counts from the step to which the run returned.

    Attributes:
        ignore_keys: outputs of the model that evaluation leaves out.
        lengths: the lengths of the run, once they are planned.
        first_epoch: the epoch in which it starts, counted from 0.
        finished_micro_batches: those of the first epoch that an earlier run has finished.
        is_finished: whether the checkpoint already contains the run's last step.
        loss_since_log: the sum of the losses since the last log line, `()`, on the device.
        loss_up_to_log: the sum of the losses up to the last log line.
        last_logged_step: optimizer step of the last log line.
        initial_step: optimizer steps at the start of the attempt.
        initial_tokens_seen: input tokens seen at the start of the attempt.
        trained_tokens: input tokens of the attempt, over all processes.
        has_checked_model: whether the model has been checked for `elastic` and `flatten_batches`.
        flos: floating-point operations since they were last added to the state.
        evaluation_metrics: metrics of the last evaluation, which determined the best model.
        has_unfinished_evaluation: True if an evaluation has begun but is not complete.
        logged_metrics: sums for the next log line, besides the loss.
        seconds_by_activity: activity besides training, such as 'saving' → its duration.
        last_saved_step: optimizer step of the last checkpoint.
        checkpoints_written: the checkpoint folders that the attempt wrote, in order.
        has_saved_after_error: whether an error that ends the run made it write the last of them.
    """

    ignore_keys: list[str] | None = None
    lengths: RunLengths = field(init=False)
    first_epoch: int = 0
    finished_micro_batches: int = 0
    is_finished: bool = False
    loss_since_log: torch.Tensor = field(init=False)
    loss_up_to_log: float = 0.0
    last_logged_step: int = 0
    initial_step: int = 0
    initial_tokens_seen: int = 0
    trained_tokens: int = 0
    has_checked_model: bool = False
    flos: float = 0.0
    evaluation_metrics: dict[str, float] | None = None
    has_unfinished_evaluation: bool = False
    logged_metrics: LoggedMetrics = field(default_factory=LoggedMetrics)
    seconds_by_activity: dict[str, float] = field(default_factory=dict)
    last_saved_step: int = 0
    checkpoints_written: list[str] = field(default_factory=list)
    has_saved_after_error: bool = False

    def begin(self, state: TrainerState, device: torch.device) -> None:
        """Count from the step of the restored state."""
        self.loss_since_log = torch.tensor(0.0, device=device)
        self.last_saved_step = self.initial_step = self.last_logged_step = state.global_step
        self.initial_tokens_seen = state.num_input_tokens_seen


@dataclass
class Run:
    """The state of a run, and the objects that last as long. A Trainer keeps one for all its runs.

    Attributes:
        train_batch_size: samples in a training micro-batch of this process.
        current_gradient_accumulation_steps: micro-batches in the current optimizer step.
        has_created_scheduler: True if the Trainer created the scheduler.
        trial: the hyperparameter trial, if any.
        loop: the loop of the attempt, if one has been made. Code that logs, saves or ends a run reads it here. Methods
            of the Trainer call that code, and have no argument for a loop: scripts override them, and call some
            without a run.
        signal_listener: the signals that ask this run to stop.
        resumed_progress: our progress data in the checkpoint that the run resumes from, or None.
        resume_folder: the checkpoint that the run resumes from, if any.
        attempt: the present or last attempt.
        mems: the model's memory of earlier batches, with `past_index`.
        heartbeat: the signs of progress, which the server of `metrics_port` reports.
        skipped_samples: the samples that the run skips, with `on_divergence`.
        initial_state: a copy of the initial state, while the run may return to it.
        has_rolled_back: whether the run has returned to an earlier state.
    """

    train_batch_size: int = 0
    current_gradient_accumulation_steps: int = 1
    has_created_scheduler: bool = False
    trial: Any = None
    loop: TrainingLoop | None = None
    signal_listener: SignalListener = field(default_factory=lambda: SignalListener(should_save=False))
    resumed_progress: RunProgress | None = None
    resume_folder: str | None = None
    attempt: Attempt = field(default_factory=Attempt)
    mems: Any = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    skipped_samples: SkippedSamples | None = None
    initial_state: InitialStateSnapshot | None = None
    has_rolled_back: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy, without the objects that belong to this process."""
        signal_listener = SignalListener(should_save=False)
        return {**vars(self), "signal_listener": signal_listener, "loop": None, "skipped_samples": None}

    @contextlib.contextmanager
    def measure_time(self, activity: str) -> Iterator[None]:
        """Add the duration of the block to the attempt's `seconds_by_activity`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.attempt.seconds_by_activity
            seconds[activity] = seconds.get(activity, 0.0) + time.perf_counter() - start

    def measure_activity(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time the block, and report it to the observers of the run."""
        # A script may call methods that evaluate or save without a run.
        return self.measure_time(name) if self.loop is None else self.loop.monitors.measure_activity(name)


class RunAttribute:
    """Descriptor for an attribute of the Trainer, named as in transformers, held by its `Run` or that run's attempt."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_in_attempt = name in {field.name for field in dataclasses.fields(Attempt)}
        assert self.is_in_attempt or name in {field.name for field in dataclasses.fields(Run)}

    def _find_holder(self, trainer: Any) -> Run | Attempt:
        run: Run = trainer._hftrainer.run
        return run.attempt if self.is_in_attempt else run

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(self._find_holder(trainer), self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        setattr(self._find_holder(trainer), self.name, value)

    def __delete__(self, trainer: Any) -> None:
        # The default of the class applies then.
        vars(self._find_holder(trainer)).pop(self.name, None)
