"""What the rooms of a Trainer share, behind `Trainer._hftrainer`."""

from __future__ import annotations

from typing import Any

import torch

from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.callbacks.state import is_exportable
from hftrainer.checkpointing.writer import CheckpointWriter
from hftrainer.compat.overrides import is_overridden
from hftrainer.releases.policy import ReleasePolicy
from hftrainer.strategies.strategy import Strategy
from hftrainer.training.run import Run, RunningLoop
from hftrainer.training.trainer_api import TrainerApi


class TrainerContext:
    """The parts of a Trainer that its rooms work with. A trial of a search replaces those that depend on arguments.

    Args:
        trainer: the Trainer.
        optimizers: the optimizer and the scheduler that the script has passed, either None.

    Attributes:
        policy: what the followed release of transformers does.
        resolved: the parsed arguments, for this Trainer or for the current trial.
        engine: the Lightning engine, built from the arguments.
        strategy: how the processes share the model.
        checkpoint_writer: writes checkpoint folders, at once or in the background.
        run: the state of the current or last `train()`.
        preparation: lets the strategy prepare model and optimizer.
        uploads: to the repository on the Hub, once there is one; in the main process.
        search: the backend of the current hyperparameter search, if any.
        hp_study: the study of the last search, if its backend has such.
        searched_arguments: the arguments as they were before that search.
        args_have_changed: whether the engine has to be built again before the next run.
        lightning_callbacks: Lightning's callbacks, in the order given.
        averages_tokens: whether the items of an optimizer step are counted over all processes.
        past_index: the model's output that the next batch gets as `mems`; -1 for none.
    """

    policy: ReleasePolicy
    resolved: ResolvedArguments
    engine: Any
    strategy: Strategy
    checkpoint_writer: CheckpointWriter
    preparation: Any
    averages_tokens: bool
    past_index: int

    def __init__(self, trainer: TrainerApi, optimizers: tuple[Any, Any]) -> None:
        self.trainer = trainer
        self.optimizers_given = optimizers
        self.run = Run()
        self.uploads: Any = None
        self.search: Any = None
        self.hp_study: Any = None
        self.searched_arguments: dict[str, Any] | None = None
        self.args_have_changed = False
        self.lightning_callbacks: list[Any] = []

    @property
    def bare_model(self) -> Any:
        """The user's own model, without the modules that shard it, and not compiled."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    @property
    def current_loop(self) -> RunningLoop:
        """The training loop that runs."""
        assert self.run.loop is not None
        return self.run.loop

    def announce(self, event: str, *payload: Any, **kwargs: Any) -> None:
        """Call an event of all callbacks through the handler, and keep the control that they return."""
        trainer = self.trainer
        handle = getattr(trainer.callback_handler, event)
        trainer.control = handle(trainer.args, trainer.state, trainer.control, *payload, **kwargs)

    def is_overridden(self, *names: str) -> bool:
        """Whether a subclass or the script has replaced one of these methods of the Trainer."""
        return is_overridden(self.trainer, *names)

    def made_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; ValueError when there is none yet."""
        if self.trainer.optimizer is None:
            raise ValueError("There is no optimizer yet: call create_optimizer() or train() first.")
        return self.trainer.optimizer

    def stateful_callbacks(self) -> list[Any]:
        """The callbacks, and the control, whose states checkpoints hold."""
        trainer = self.trainer
        return [each for each in [*trainer.callback_handler.callbacks, trainer.control] if is_exportable(each)]


class Room:
    """A part of a Trainer's work, on one subject.

    Args:
        context: the shared parts of the Trainer.
    """

    def __init__(self, context: TrainerContext) -> None:
        self.trainer = context.trainer
        self.context = context

    @property
    def run(self) -> Run:
        """The state of the current `train()`."""
        return self.context.run
