"""Lightning's training loops: their counters, and per-batch work that the Trainer skips.

A micro-batch goes one of two ways, which `needs_lightning_hooks` chooses: the methods below, if there are neither
Lightning callbacks nor a profiler, else those of Lightning, which also call the hooks of these. Both do the same to the
model, in the same order. They differ in when `TrainerModule.optimizer_step` begins, which is called for the last
micro-batch of a window: Lightning passes forward and backward to it as a closure.

what happens          without these                         with these

on_train_batch_start  _WindowedEpochLoop.advance            _TrainingEpochLoop.advance
                                                            TrainerModule.optimizer_step begins
training_step         _FastOptimization.run                 a closure, which PlainPrecision.optimizer_step calls
scaling of the loss   PlainPrecision.pre_backward           the same, then on_before_backward
backward              TrainerModule.backward                the same
on_after_backward     PlainPrecision.post_backward          the same
                      TrainerModule.optimizer_step begins
clipping              call_gradient_hooks                   the same, after on_before_optimizer_step
optimizer.step        PlainPrecision.optimizer_step         the same
schedule              TrainerModule.optimizer_step ends     the same
on_train_batch_end    _WindowedEpochLoop.advance            _TrainingEpochLoop.advance

Manual optimization takes the first and last row; `TrainerModule.training_step` does the rest. `_FastEvaluationLoop` in
`evaluation.py` is chosen the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage

from hftrainer_lightning.private_api.trainer import needs_lightning_hooks

if TYPE_CHECKING:
    from hftrainer.training.run_batches import RunBatches
    from hftrainer_lightning.module import TrainerModule


class _UndividedLoss(ClosureResult):
    """Leaves the loss undivided.

    Lightning divides it by `accumulate_grad_batches`, but the Trainer has already divided it by the window's actual
    micro-batches, or by its items. It needs no copy of the loss, which Lightning keeps for scaling in place.
    """

    def _clone_loss(self) -> None:
        if self.closure_loss is not None:
            self.loss = self.closure_loss.detach()

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> _UndividedLoss:
        return cls(training_step_output)


class _WindowedEpochLoop(_TrainingEpochLoop):
    """Steps the optimizer when the accumulation window closes.

    Lightning counts batches, and always steps after the last one. With data without a length, the next epoch completes
    the last window. Values that callbacks log within a step get its number, as in the Trainer's log lines.
    Lightning counts a step when it has ended.
    """

    batches: RunBatches

    def _should_accumulate(self) -> bool:
        return not self.batches.window.is_last

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: we synchronize signals once per step, not for every batch as Lightning does."""

    def advance(self, data_fetcher: Any) -> None:
        """Run a micro-batch. Without listeners, call only the module's own hooks."""
        trainer: Any = self.trainer
        if self.restarting or needs_lightning_hooks(trainer):
            super().advance(data_fetcher)
            return
        batch, _, _ = next(data_fetcher)
        module, progress = trainer.lightning_module, self.batch_progress
        index = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        self._batches_that_stepped = self.global_step + 1
        module.on_train_batch_start(batch, index)
        progress.increment_started()
        step: Any = {"batch": batch, "batch_idx": index}
        if module.automatic_optimization:
            self.automatic_optimization.run(trainer.optimizers[0], index, step)
        else:
            self.manual_optimization.run(step)
        progress.increment_processed()
        module.on_train_batch_end(None, batch, index)
        progress.increment_completed()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Save the loggers. The Trainer's callbacks decide when to validate."""
        self._save_loggers_on_train_batch_end()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step only per-epoch schedulers, which callbacks add. The run steps its own scheduler."""
        if interval == "epoch":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _build_kwargs(self, kwargs: Any, batch: Any, batch_idx: int) -> Any:
        """The arguments of our module's `training_step`. Lightning would inspect it at every batch."""
        kwargs["batch"] = batch
        kwargs["batch_idx"] = batch_idx
        return kwargs


class _TrainerFitLoop(_FitLoop):
    """Runs each epoch within `Trainer._run_epoch`."""

    def advance(self) -> None:
        """Run the epoch and its end hooks."""
        module: Any = self.trainer.lightning_module
        module.events.call_run_epoch(self._advance_and_end)

    def _advance_and_end(self) -> None:
        super().advance()
        super().on_advance_end()

    def on_advance_end(self) -> None:
        """Do nothing: the epoch has ended within `advance`."""


class _FastOptimization(_AutomaticOptimization):
    """Runs backward before the optimizer step, if nobody listens, and keeps no copy of the loss.

    Announces `zero_grad` only to callbacks: the training run clears the gradients after the step.
    """

    output_result_cls = _UndividedLoss

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run the forward and backward passes and, at the end of the window, the optimizer step."""
        trainer: Any = self.trainer
        if needs_lightning_hooks(trainer):
            return super().run(optimizer, batch_idx, kwargs)
        strategy, progress = trainer.strategy, self.optim_progress.optimizer.step
        is_accumulating = trainer.fit_loop._should_accumulate()
        if not is_accumulating:
            progress.increment_ready()
        with (
            _block_parallel_sync_behavior(strategy) if is_accumulating else contextlib.nullcontext(),
            torch.enable_grad(),
        ):
            strategy.backward(strategy.training_step(*kwargs.values()), optimizer)
        if not is_accumulating:
            lightning_optimizer = strategy._lightning_optimizers[0]
            trainer.lightning_module.optimizer_step(trainer.current_epoch, batch_idx, lightning_optimizer)
            progress.increment_completed()
        return {}

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Any:
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self.trainer.callbacks else None  # type: ignore[attr-defined]


class _StepLoggerConnector(_LoggerConnector):
    """Counts a step when it starts; Lightning, when it ends."""

    @property
    def should_update_logs(self) -> bool:
        """Whether callbacks log in this step. The counter already includes it."""
        trainer: Any = self.trainer
        if trainer.state.stage is not RunningStage.TRAINING:
            return super().should_update_logs
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        return bool(step % trainer.log_every_n_steps == 0 or trainer.should_stop)

    def update_train_epoch_metrics(self) -> None:
        # Lightning has decremented the number of the step, since it counts from zero.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped += 1
        super().update_train_epoch_metrics()
        self.trainer.fit_loop.epoch_loop._batches_that_stepped -= 1

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        if self.trainer.state.stage is RunningStage.TRAINING:
            epoch_loop = self.trainer.fit_loop.epoch_loop
            epoch_loop._batches_that_stepped = epoch_loop.global_step + 1
        super().on_batch_start(batch, dataloader_idx)


def install_window_accumulation(trainer: pl.Trainer, batches: RunBatches) -> None:
    """Make the accumulation windows, not Lightning's batch count, control steps and the divisor of the loss."""
    trainer.fit_loop.__class__ = _TrainerFitLoop
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.__class__ = _WindowedEpochLoop
    epoch_loop.batches = batches
    epoch_loop.automatic_optimization.__class__ = _FastOptimization
    trainer._logger_connector.__class__ = _StepLoggerConnector


def switch_optimization(trainer: pl.Trainer, module: TrainerModule) -> None:
    """Switch between automatic and manual optimization within a run, and set both loops' step counters."""
    epoch_loop = trainer.fit_loop.epoch_loop
    steps = epoch_loop.global_step
    module.automatic_optimization = not module.automatic_optimization
    automatic = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    manual = epoch_loop.manual_optimization.optim_step_progress.total
    for counters in (automatic, manual):
        counters.ready = counters.completed = steps


def restore_progress(trainer: pl.Trainer, run_batches: RunBatches, global_step: int) -> None:
    """Set the loops' counters as a Lightning checkpoint would, from the values in `trainer_state.json`.

    Args:
        trainer: a trainer that has not run.
        run_batches: the micro-batches of the run, with the position from which it resumes.
        global_step: completed optimizer steps.
    """
    state = trainer.fit_loop.state_dict()
    epoch, batch = run_batches.first_epoch, run_batches.first_position
    started_epochs = epoch + 1 if batch else epoch
    epochs = {"ready": started_epochs, "started": started_epochs, "processed": epoch, "completed": epoch}
    state["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    batches = dict.fromkeys(("ready", "started", "processed", "completed"), batch)
    total = {name: epoch * len(run_batches) + count for name, count in batches.items()}
    state["epoch_loop.batch_progress"] |= {"total": total, "current": batches, "is_last_batch": False}
    steps = {"ready": global_step, "completed": global_step}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"] |= {"total": dict(steps)}
    state["epoch_loop.manual_optimization.optim_step_progress"] |= {"total": dict(steps)}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = global_step
    trainer.fit_loop.load_state_dict(state)


@contextlib.contextmanager
def use_previous_epoch(trainer: pl.Trainer) -> Iterator[None]:
    """Set Lightning's epoch number to the epoch that has just ended."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.processed -= 1
    try:
        yield
    finally:
        progress.processed += 1


class WithoutBatchTransfer(pl.LightningModule):
    """Does not move batches. The loader and the Trainer's `_prepare_inputs`, which users override, have moved them.

    Overriding the public `transfer_batch_to_device` would also work, but Lightning looks up three hooks to call it.
    """

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch

    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch
