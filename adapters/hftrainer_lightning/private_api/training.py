"""Lightning's loops of training: their counting, and what they do at each batch that nobody asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage

if TYPE_CHECKING:
    from hftrainer_lightning.hooks import MicroBatches
    from hftrainer_lightning.module import TrainerModule


class _ScaledLoss(ClosureResult):
    """Takes the loss as it is.

    Lightning divides it by `accumulate_grad_batches`; the Trainer has already divided it by the micro-batches really
    in the window, or by its items. The copy of the loss that Lightning keeps for scaling in place is not needed.
    """

    def _clone_loss(self) -> None:
        if self.closure_loss is not None:
            self.loss = self.closure_loss.detach()

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> _ScaledLoss:
        return cls(training_step_output)


class _WindowedEpochLoop(_TrainingEpochLoop):
    """Steps the optimizer when the feed's window closes.

    Lightning counts batches, and always steps at the last; data without a length leaves its last, incomplete window
    for the next epoch to fill.
    """

    micro_batches: MicroBatches

    def _should_accumulate(self) -> bool:
        window = self.micro_batches.window
        return window is not None and not window.closes

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step for loggers; when to validate is for the Trainer's callbacks to decide."""
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Only schedules by epoch, which callbacks bring: the run's own moves on between the step and its event."""
        if interval == "epoch":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _build_kwargs(self, kwargs: Any, batch: Any, batch_idx: int) -> Any:
        """The arguments of the generated module's `training_step`, which Lightning would inspect at every batch."""
        kwargs["batch"] = batch
        kwargs["batch_idx"] = batch_idx
        return kwargs


class _AnnouncedFitLoop(_FitLoop):
    """Runs each epoch, from its first batch to the end of the epoch, within a call of the host's."""

    def advance(self) -> None:
        """Let the host run the epoch."""
        module: Any = self.trainer.lightning_module
        module.hooks.around_epoch(self._epoch)

    def _epoch(self) -> None:
        super().advance()
        super().on_advance_end()

    def on_advance_end(self) -> None:
        """Nothing: the epoch has ended within `advance`."""


class _BareOptimization(_AutomaticOptimization):
    """Announces the clearing of gradients only to callbacks; the training run does the clearing, after the step."""

    output_result_cls = _ScaledLoss

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Any:
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self.trainer.callbacks else None  # type: ignore[attr-defined]


class _LazyLoggerConnector(_LoggerConnector):
    """Gathers a training batch's metrics only if some were logged; Lightning asks a dozen properties to find none."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        if self.trainer.state.stage is not RunningStage.TRAINING:
            super().on_batch_start(batch, dataloader_idx)
            return
        self._first_loop_iter = self._first_loop_iter is None
        results = self.trainer.fit_loop.epoch_loop._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx

    def on_batch_end(self) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        if results or self.trainer.state.stage is not RunningStage.TRAINING:
            super().on_batch_end()
        else:
            results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        if self.trainer.loggers:
            super().update_train_step_metrics()


def install_window_accumulation(trainer: pl.Trainer, micro_batches: MicroBatches) -> None:
    """Let the feed's windows, not Lightning's counting, decide when the optimizer steps and how the loss is divided."""
    trainer.fit_loop.__class__ = _AnnouncedFitLoop
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.__class__ = _WindowedEpochLoop
    epoch_loop.micro_batches = micro_batches
    epoch_loop.automatic_optimization.__class__ = _BareOptimization
    trainer._logger_connector.__class__ = _LazyLoggerConnector


def switch_optimization(trainer: pl.Trainer, module: TrainerModule) -> None:
    """Change between automatic and manual optimization within a run; each of Lightning's loops counts the steps."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.global_step
    module.automatic_optimization = not module.automatic_optimization
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    manual = loop.manual_optimization.optim_step_progress.total
    for counters in (automatic, manual):
        counters.ready = counters.completed = steps


def restore_progress(trainer: pl.Trainer, *, epoch: int, batch: int, batches_per_epoch: int, global_step: int) -> None:
    """Set the loops' counters as a Lightning checkpoint would, from what `trainer_state.json` tells.

    Args:
        trainer: a trainer that has not run.
        epoch: epochs that are done.
        batch: micro-batches of the next epoch that are done.
        batches_per_epoch: micro-batches in an epoch.
        global_step: optimizer steps that are done.
    """
    state = trainer.fit_loop.state_dict()
    begun = epoch + 1 if batch else epoch
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    state["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    done = dict.fromkeys(("ready", "started", "processed", "completed"), batch)
    total = {name: epoch * batches_per_epoch + count for name, count in done.items()}
    state["epoch_loop.batch_progress"] |= {"total": total, "current": done, "is_last_batch": False}
    steps = {"ready": global_step, "completed": global_step}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"] |= {"total": dict(steps)}
    state["epoch_loop.manual_optimization.optim_step_progress"] |= {"total": dict(steps)}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = global_step
    trainer.fit_loop.load_state_dict(state)


@contextlib.contextmanager
def in_previous_epoch(trainer: pl.Trainer) -> Iterator[None]:
    """Let Lightning's epoch be the one that has just ended."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.processed -= 1
    try:
        yield
    finally:
        progress.processed += 1


#: The attribute of a module in which Lightning notes the hook that runs: set and put back around each.
CURRENT_HOOK = "_current_fx_name"


class KeepsBatches(pl.LightningModule):
    """Leaves batches alone: the loader and the Trainer's `_prepare_inputs`, which users override, have moved them.

    `transfer_batch_to_device` is public, and would leave them alone too; Lightning looks for three hooks to call it.
    """

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch

    def _apply_batch_transfer_handler(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return batch
