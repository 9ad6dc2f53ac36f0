"""Lightning's training loops: their counters, and per-batch work that the Trainer skips.

The table in `docs/packages/training.md` has what they call in a micro-batch, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from hftrainer.errors import UnsupportedArgument
from hftrainer.training.steps.loop import TrainingLoop
from hftrainer_lightning.private_api.callback_hooks import NULL_CONTEXT, call_hooks, needs_lightning_hooks
from hftrainer_lightning.private_api.evaluation import make_evaluation_loop

if TYPE_CHECKING:
    from hftrainer.training.run import Attempt


class _WindowedEpochLoop(_TrainingEpochLoop):
    """Runs micro-batches, and steps the optimizer after the last of an accumulation window.

    Lightning counts batches, and always steps after the last one. With data without a length, the next epoch completes
    the last window. Lightning also passes forward and backward to the optimizer's step as a closure: the optimizer's
    step hooks would then see no gradients, and optimizers that ignore closures would not train.
    """

    trainer: Any
    training_loop: TrainingLoop
    #: Whether callbacks of Lightning or a profiler follow the run.
    has_listeners: bool

    @property
    def done(self) -> bool:
        """Whether the epoch ends. At each step, Lightning would first look at `max_steps`, which is never set here."""
        return (self._num_ready_batches_reached() or self.trainer.should_stop) and super().done

    def _on_before_fetch(self) -> None:
        if self.has_listeners:
            super()._on_before_fetch()

    def _on_after_fetch(self) -> None:
        if self.has_listeners:
            super()._on_after_fetch()

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Fetch a micro-batch, and count it. `TrainingLoop.run_micro_batch` calls the `LightningSteps` in its order."""
        pl_trainer = self.trainer
        progress = self.batch_progress
        inputs, _, _ = next(data_fetcher)
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        # Callbacks log within a step under its number, as in the Trainer's log lines. Lightning counts ended steps.
        self._batches_that_stepped = self.automatic_optimization.optim_progress.optimizer_steps + 1
        if self.has_listeners:
            pl_trainer._logger_connector.on_batch_start(inputs)
            call._call_callback_hooks(pl_trainer, "on_train_batch_start", inputs, self.batch_idx)
        progress.increment_started()
        self.training_loop.run_micro_batch(pl_trainer.strategy.lightning_module.model, inputs, self)
        if self.training_loop.flag_sync.ends_training:
            pl_trainer.should_stop = True
        progress.increment_completed()
        if self.has_listeners:
            pl_trainer._logger_connector.on_batch_end()
            pl_trainer._logger_connector.update_train_step_metrics()

    def forward_and_backward(self, inputs: Any, *, is_first: bool) -> torch.Tensor:
        """Run the module's training step, forward and backward; returns the loss."""
        if not self.has_listeners:
            return self.trainer.strategy.training_step(inputs, self.batch_idx)
        if is_first:
            # Only announced: the run clears the gradients after the step.
            self.automatic_optimization._on_before_zero_grad(self.trainer.optimizers[0])
        with self.trainer.profiler.profile("run_training_batch"):
            return call._call_strategy_hook(self.trainer, "training_step", inputs, self.batch_idx)

    def complete_gradients(self) -> None:
        """Let the precision plugin unscale or average the gradients, and call the callbacks."""
        strategy = self.trainer.strategy
        optimizer = strategy.optimizers[0]
        self.automatic_optimization.optim_progress.optimizer.step.increment_ready()
        strategy.precision_plugin.unscale_gradients(optimizer)
        call_hooks(self.trainer, "on_before_optimizer_step", optimizer)

    def step_optimizer(self) -> bool:
        """Step the optimizer. Returns whether the loss scaler skipped the step."""
        strategy = self.trainer.strategy
        with self.profile("optimizer_step"):
            strategy.optimizer_step(strategy.optimizers[0], closure=None)
        return bool(strategy.precision_plugin.has_skipped_step)

    def is_schedule_replaced(self) -> bool:
        """Whether a callback has replaced the run's schedule, so that it sets the learning rate."""
        if not self.has_listeners:
            return False
        scheduler = self.trainer.lightning_module.scheduler_for_lightning
        configs = self.trainer.lr_scheduler_configs
        return scheduler is not None and not (configs and configs[0].scheduler is scheduler)

    def announce_batch_end(self, inputs: Any, loss: torch.Tensor, *, is_last: bool) -> None:
        """Count the micro-batch, with the last of a window the step, and call the callbacks."""
        if is_last:
            self.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        self.batch_progress.increment_processed()
        if self.has_listeners:
            if self._num_ready_batches_reached():
                # Schedulers that callbacks add. The run steps its own.
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            call._call_callback_hooks(self.trainer, "on_train_batch_end", {"loss": loss}, inputs, self.batch_idx)

    def profile(self, hook: str) -> AbstractContextManager[Any]:
        """A context that a profiler records as a hook of the module."""
        if not self.has_listeners:
            return NULL_CONTEXT
        return self.trainer.profiler.profile(f"[LightningModule]TrainerModule.{hook}")

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Save the loggers. The Trainer's callbacks decide when to validate."""
        self._save_loggers_on_train_batch_end()

    def _should_accumulate(self) -> bool:
        return not self.training_loop.batches.position.is_last


class _OverriddenEpochFitLoop(_FitLoop):
    """Runs each epoch within an override of `Trainer._run_epoch`, whose `super()._run_epoch` calls `run_epoch`."""

    training_loop: TrainingLoop

    def advance(self) -> None:
        """Call the override."""
        self._has_run_epoch = False
        self.training_loop.trainer._run_epoch(**self.training_loop.epoch_arguments())
        if not self._has_run_epoch:
            raise UnsupportedArgument(
                "_run_epoch: Lightning's loop runs the epochs, so an override must call super()._run_epoch(...) "
                "with the arguments that it receives. Override training_step, get_batch_samples or compute_loss "
                "instead, or use a callback."
            )

    def run_epoch(self, arguments: dict[str, Any]) -> None:
        """Run the epoch and its end hooks, once. `arguments` are those that `Trainer._run_epoch` received."""
        expected = self.training_loop.epoch_arguments()
        if changed := [
            name for name, value in arguments.items() if not (value is expected[name] or value == expected[name])
        ]:
            raise UnsupportedArgument(
                f"_run_epoch: {', '.join(changed)} cannot be changed for an epoch, since the run is already planned: "
                "override get_train_dataloader, set_initial_training_values or train instead."
            )
        if not self._has_run_epoch:
            self._has_run_epoch = True
            super().advance()
            super().on_advance_end()

    def on_advance_end(self) -> None:
        """Do nothing: the epoch has ended within `advance`."""


class SingleLoader(CombinedLoader):
    """Yields the batches of one loader. Lightning's class would build a tree of one leaf for each batch."""

    def __next__(self) -> tuple[Any, int, int]:
        iterator: Any = self._iterator
        batch = next(iterator.iterators[0])
        iterator._idx += 1
        return batch, iterator._idx - 1, 0


class _StepLoggerConnector(_LoggerConnector):
    """Counts a step when it starts; Lightning, when it ends."""

    @property
    def should_update_logs(self) -> bool:
        """Whether callbacks log in this step. The counter already includes it."""
        pl_trainer: Any = self.trainer
        if pl_trainer.state.stage is not RunningStage.TRAINING:
            return super().should_update_logs
        step = pl_trainer.fit_loop.epoch_loop._batches_that_stepped
        return bool(step % pl_trainer.log_every_n_steps == 0 or pl_trainer.should_stop)

    def update_train_epoch_metrics(self) -> None:
        # Lightning has decremented the number of the step, since it counts from zero.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped += 1
        super().update_train_epoch_metrics()
        self.trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def install_training_loops(pl_trainer: Any, loop: TrainingLoop, *, is_epoch_overridden: bool) -> None:
    """Put our loops in place of those that `lightning.Trainer` makes.

    Args:
        pl_trainer: a trainer that has not run.
        loop: the loop of the run, whose methods they call.
        is_epoch_overridden: whether an override of `Trainer._run_epoch` runs the epochs.
    """
    fit_loop = pl_trainer.fit_loop
    if is_epoch_overridden:
        pl_trainer.fit_loop = _OverriddenEpochFitLoop(pl_trainer, fit_loop.min_epochs, fit_loop.max_epochs)
        pl_trainer.fit_loop.training_loop = loop
    epoch_loop = _WindowedEpochLoop(pl_trainer, fit_loop.min_steps, fit_loop.max_steps)
    epoch_loop.training_loop, epoch_loop.has_listeners = loop, needs_lightning_hooks(pl_trainer)
    epoch_loop.val_loop = make_evaluation_loop(pl_trainer, TrainerFn.FITTING, RunningStage.VALIDATING)
    pl_trainer.fit_loop.epoch_loop = epoch_loop
    pl_trainer._logger_connector = _StepLoggerConnector(pl_trainer)


def restore_progress(pl_trainer: pl.Trainer, attempt: Attempt, global_step: int) -> None:
    """Set the loops' counters as a Lightning checkpoint would, from the values in `trainer_state.json`.

    Args:
        pl_trainer: a trainer that has not run.
        attempt: where the run resumes, and how long its epochs are.
        global_step: completed optimizer steps.
    """
    state = pl_trainer.fit_loop.state_dict()
    epoch = attempt.first_epoch
    batch = attempt.finished_micro_batches
    started_epochs = epoch + 1 if batch else epoch
    epochs = {"ready": started_epochs, "started": started_epochs, "processed": epoch, "completed": epoch}
    state["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    batches = dict.fromkeys(("ready", "started", "processed", "completed"), batch)
    total = {name: epoch * attempt.lengths.micro_batches_in_epoch + count for name, count in batches.items()}
    state["epoch_loop.batch_progress"] |= {"total": total, "current": batches, "is_last_batch": False}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"]["total"] = {"ready": global_step, "completed": global_step}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = global_step
    pl_trainer.fit_loop.load_state_dict(state)


@contextlib.contextmanager
def use_previous_epoch(pl_trainer: pl.Trainer) -> Iterator[None]:
    """Set Lightning's epoch number to the epoch that has just ended."""
    progress: Any = pl_trainer.fit_loop.epoch_progress.current
    progress.completed -= 1
    try:
        yield
    finally:
        progress.completed += 1


class WithoutBatchTransfer(pl.LightningModule):
    """Does not move batches. The loader and the Trainer's `_prepare_inputs`, which users override, have moved them.

    Overriding the public `transfer_batch_to_device` would also work, but Lightning looks up three hooks to call it.
    """

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch

    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch
