"""`Run`: the state of one `train()`, which a Trainer keeps until the next."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hftrainer.checkpointing.progress import RunProgress
from hftrainer.data.schedule import TrainingSchedule
from hftrainer.training.interruption import Interruption
from hftrainer.training.logged_metrics import LoggedMetrics


class RunningLoop(Protocol):
    """The training loop, as those see it who are called while it runs.

    Attributes:
        progress: what one of our checkpoints says about the position, when the run resumes from one.
        reader: reads the training data.
        control_sync: synchronizes the control flags of all ranks.
        start_time: of the run, in seconds since the epoch.
        grad_norm: norm of the gradients of the last step, if it was measured.
        learning_rate: that of the last step, if it is logged.
        evaluated: the last metrics of which the best is remembered.
        owes_evaluation: whether an evaluation has begun that is not complete.
        between_steps: whether nothing has been read or drawn for the next step.
    """

    progress: RunProgress | None
    reader: Any
    control_sync: Any
    start_time: float
    grad_norm: Any
    learning_rate: float | None
    evaluated: dict[str, float] | None
    owes_evaluation: bool
    between_steps: bool

    def current_progress(self) -> RunProgress:
        """What a checkpoint written now must hold, besides the state."""

    def run_epoch(self, given: dict[str, Any]) -> None:
        """Run the epoch, with the arguments that `Trainer._run_epoch` got."""


@dataclass
class Run:
    """Counters, sums and the position of a training run.

    Attributes:
        train_batch_size: samples in a training micro-batch of this process.
        accumulation: micro-batches in the current optimizer step.
        made_scheduler: whether the Trainer made the schedule, whose length is that of the run.
        trial: the hyperparameter trial, if any.
        loop: the training loop while it runs.
        interruption: the signals that ask this run to stop.
        schedule: the lengths of the run.
        progress: what one of our checkpoints says about the position, when the run resumes from one.
        resumed_from: the checkpoint that the run resumes from, if any.
        loss: the sum of the losses since the last log line, of shape (), on the device; set when training begins.
        total_loss: the sum of the losses up to the last log line.
        last_logged: optimizer step of the last log line.
        initial_step: optimizer steps at the start of the run.
        initial_tokens: input tokens seen at the start of the run.
        tokens: input tokens of this run, over all processes.
        flos: floating-point operations since they were last added to the state.
        logged_metrics: sums for the next log line, besides the loss.
        past: the model's memory of earlier batches, with `past_index`.
        last_saved_step: optimizer step of the last checkpoint.
        checkpoints_written: the folders that this run wrote, in order.
    """

    train_batch_size: int = 0
    accumulation: int = 1
    made_scheduler: bool = False
    trial: Any = None
    loop: RunningLoop | None = None
    interruption: Interruption = field(default_factory=lambda: Interruption(saves=False))
    schedule: TrainingSchedule | None = None
    progress: RunProgress | None = None
    resumed_from: str | None = None
    loss: torch.Tensor = field(init=False)
    total_loss: float = 0.0
    last_logged: int = 0
    initial_step: int = 0
    initial_tokens: int = 0
    tokens: int = 0
    flos: float = 0.0
    logged_metrics: LoggedMetrics = field(default_factory=LoggedMetrics)
    past: Any = None
    last_saved_step: int = 0
    checkpoints_written: list[str] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: another process has signals and a loop of its own."""
        return {**vars(self), "interruption": Interruption(saves=False), "loop": None}

    def begin(self) -> None:
        """Reset what belongs to one attempt at training."""
        self.logged_metrics = LoggedMetrics()
        self.checkpoints_written = []
        self.flos = 0.0

    def start_at(self, step: int, tokens: int) -> None:
        """Count from the state that the run starts with.

        Args:
            step: optimizer steps that are done.
            tokens: input tokens that were seen.
        """
        self.total_loss = 0.0
        self.last_saved_step = self.initial_step = self.last_logged = step
        self.tokens, self.initial_tokens = 0, tokens


class OfRun:
    """An attribute of the Trainer, by its name in transformers, that is kept in its `Run`."""

    def __init__(self, name: str) -> None:
        self.name = name
        assert name in {each.name for each in dataclasses.fields(Run)}

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer._hftrainer.run, self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        setattr(trainer._hftrainer.run, self.name, value)

    def __delete__(self, trainer: Any) -> None:
        vars(trainer._hftrainer.run).pop(self.name, None)  # the default of the class stands in
