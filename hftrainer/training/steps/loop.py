"""`TrainingLoop`: what happens in an epoch, a micro-batch and an optimizer step of a training run.

`private_api/epoch_loop.py` of the adapter for Lightning calls `run_micro_batch`, which has the order of a step; the
hooks of its `TrainerModule` call the methods for the beginning and end of training and of an epoch.

The order of events, log lines and random draws is that of `transformers.Trainer` v5.24.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hftrainer.base.part import Part
from hftrainer.checkpointing.optimizer_state import explain_incompatible_state, warn_about_kept_settings
from hftrainer.compat import overrides
from hftrainer.errors import DamagedCheckpoint, InvalidArgument, InvalidSetup
from hftrainer.model.inspection import clear_gradients
from hftrainer.optimizers.schedules import add_missing_groups, keep_argument_settings, needs_metric
from hftrainer.training.divergence import DivergenceWatch
from hftrainer.training.monitors import Monitors
from hftrainer.training.steps.micro_batches import MicroBatches, StepPhase
from hftrainer.training.steps.sums import LossAccumulator, StepEndValues
from hftrainer.training.stopping import FlagSync

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)


class LightningSteps(Protocol):
    """What `TrainingLoop.run_micro_batch` leaves to Lightning, whose callbacks and profilers follow it there.

    The adapter's epoch loop has these methods. It does not inherit them: one that it lacked would then return None.
    """

    def forward_and_backward(self, inputs: Any, *, is_first: bool) -> torch.Tensor:
        """Run `TrainerModule.training_step` as Lightning's strategy does; returns the loss.

        Args:
            inputs: the micro-batch.
            is_first: whether it is the first of its window.
        """

    def complete_gradients(self) -> None:
        """Unscale the gradients of float16, or average those of TPU cores, and call Lightning's callbacks."""

    def step_optimizer(self) -> bool:
        """Step the optimizer. Returns whether the loss scaler skipped the step, because of infinite gradients."""

    def is_schedule_replaced(self) -> bool:
        """Whether a Lightning callback sets the learning rate instead of the schedule."""

    def announce_batch_end(self, inputs: Any, loss: torch.Tensor, *, is_last: bool) -> None:
        """Count the micro-batch, with the last of a window the step, and call Lightning's callbacks."""

    def profile(self, hook: str) -> contextlib.AbstractContextManager[Any]:
        """A context that profilers record under Lightning's name of a hook."""


class TrainingLoop(Part):
    """The loop of one attempt at training: `run_micro_batch` has the order of a step, other methods what is around it.

    Args:
        parts: the parts of the Trainer.
        loader: the loader of the training data.

    Attributes:
        batches: the micro-batches, with the current epoch and position.
        epoch_ended: whether `on_epoch_end` has been called for the current epoch.
        syncs_each_batch: whether ranks average gradients after each micro-batch, rather than once a step.
    """

    def __init__(self, parts: TrainerParts, loader: Any) -> None:
        super().__init__(parts)
        self.attempt = self.run.attempt
        self.flag_sync = FlagSync(parts, parts.checkpoint_saver.ensure_saved)
        self.batches = MicroBatches(parts, self.flag_sync, loader)
        self.start_time = time.time()
        self.syncs_each_batch = parts.resolved.accelerator_config.sync_each_batch

        self.loss_accumulator = LossAccumulator(self.trainer, self.run)
        self.divergence = DivergenceWatch(parts, self.batches)
        self.step_end_values = StepEndValues(self.trainer.callback_handler.callbacks)
        self.monitors = Monitors(parts, self.batches)

        self.grad_norm: torch.Tensor | float | None = None
        self.learning_rate: float | None = None
        self.epoch_ended = False

    # ---- Training and epochs -----------------------------------------------------------------------------------

    def load_optimizer(self) -> None:
        """Load optimizer and scheduler state, after callbacks have added their parameter groups."""
        optimizer = self.parts.require_optimizer()
        scheduler = self.trainer.lr_scheduler
        initial_groups = [dict(group) for group in optimizer.param_groups]
        add_missing_groups(scheduler, optimizer)
        folder = self.run.resume_folder
        is_trial = self.run.trial is not None
        with keep_argument_settings(optimizer, scheduler) if is_trial else contextlib.nullcontext():
            try:
                self.trainer._load_optimizer_and_scheduler(folder)
            except (DamagedCheckpoint, InvalidSetup) as error:
                explain_incompatible_state(str(folder), self.trainer.args, error)
                raise
        if not self.attempt.is_finished:
            warn_about_kept_settings(initial_groups, optimizer)

    def begin_training(self) -> None:
        """Call `on_train_begin`, evaluate with `eval_on_start`, and complete what was interrupted."""
        clear_gradients(self.trainer.model_wrapped)
        self.parts.strategy.run_recorded_xla_operations()
        self.parts.call_callbacks("on_train_begin")
        # `train_runtime` includes it, but journals begin with this event.
        self.run.attempt.seconds_by_activity["preparation"] = time.time() - self.start_time
        if self.trainer.args.eval_on_start:
            with self.flag_sync.abort_evaluation_on_signal(), self.monitors.measure_activity("evaluation"):
                self.trainer._evaluate(self.run.trial, self.attempt.ignore_keys, skip_scheduler=True)
            self.flag_sync.sync_now()
            self.flag_sync.stop_if_signalled()
        if self.run.resumed_progress is not None and self.run.resumed_progress.owes_evaluation:
            self.trainer.control.should_evaluate = True
            self._sync_and_act()
        self._complete_interrupted_epoch()

    def _complete_interrupted_epoch(self) -> None:
        """End the checkpoint's epoch, if it was saved after the epoch's last step but before `on_epoch_end`."""
        progress = self.run.resumed_progress
        attempt = self.attempt
        if progress is None or progress.epoch_ended or progress.epoch is None:
            return
        if progress.epoch >= attempt.first_epoch and self.trainer.state.global_step < attempt.lengths.max_steps:
            return
        self.batches.begin_epoch(progress.epoch)
        self.grad_norm = progress.grad_norm
        self.learning_rate = progress.learning_rate
        self.batches.restore_rng_before_reading()
        self._call_epoch_end()

    def epoch_arguments(self) -> dict[str, Any]:
        """The arguments of `Trainer._run_epoch`."""
        attempt = self.attempt
        return {
            "model": self.trainer.model_wrapped,
            "epoch": self.batches.epoch,
            "train_dataloader": self.batches.reader.loader,
            "steps_in_epoch": attempt.lengths.micro_batches_in_epoch,
            "num_update_steps_per_epoch": attempt.lengths.num_update_steps_per_epoch,
            "trial": self.run.trial,
            "ignore_keys_for_eval": attempt.ignore_keys,
            "start_time": self.start_time,
            "resume_from_checkpoint": self.run.resume_folder,
            "epochs_trained": attempt.first_epoch,
            "steps_trained_in_current_epoch": attempt.finished_micro_batches,
        }

    def begin_epoch(self, epoch: int) -> None:
        """Call `on_epoch_begin`, before the data iterator is created."""
        self.batches.begin_epoch(epoch)
        self.epoch_ended = False
        self.flag_sync.begin_epoch()
        self.grad_norm = self.learning_rate = None
        add_missing_groups(self.trainer.lr_scheduler, self.parts.require_optimizer())
        self.run.mems = None
        self.parts.call_callbacks("on_epoch_begin")

    def end_epoch(self) -> None:
        """Call `on_epoch_end`, then log, evaluate and save as requested. An epoch without a batch ends the training."""
        has_finished_before = self.batches.resumes_epoch and self.attempt.finished_micro_batches
        if self.batches.position.is_before_first and not has_finished_before:
            self._stop_without_data()
        self._call_epoch_end()

    def _stop_without_data(self) -> None:
        """Stop the training, or raise InvalidArgument for an empty stream where accelerate's loader fails too."""
        is_stream = isinstance(self.trainer.train_dataset, torch.utils.data.IterableDataset)
        fails = is_stream and self.trainer.accelerator.dispatch_batches is not False
        if fails and not self.batches.epoch and self.run.resume_folder is None:
            problem = "check its filters, its split, or whether its iterator was used up"
            raise InvalidArgument(f"The training dataset yielded no batch: {problem}.")
        text = "The training data yielded no batch in epoch %d: stopping training at step %d!"
        logger.warning(text, self.batches.epoch, self.trainer.state.global_step)
        self.trainer.control.should_training_stop = True

    def _call_epoch_end(self) -> None:
        self.epoch_ended = True
        self.parts.call_callbacks("on_epoch_end")
        self.parts.print_xla_metrics()
        self._sync_and_act()

    def _sync_and_act(self) -> None:
        """Log, evaluate, save or stop as any rank requests."""
        self.flag_sync.sync_now()
        self._log_save_evaluate()
        self.flag_sync.stop_if_signalled()

    # ---- Micro-batches -----------------------------------------------------------------------------------------

    def run_micro_batch(self, model: torch.nn.Module, inputs: Any, lightning: LightningSteps) -> None:
        """Run a micro-batch, and after the last of a window the optimizer step: all in the order of `Trainer`."""
        # `MicroBatches.__iter__`, from which Lightning has just taken these inputs, has set it.
        position = self.batches.position
        self.trainer.accelerator.gradient_state.sync_gradients = position.is_last
        if position.is_first:
            self.parts.call_callbacks("on_step_begin")
        loss = lightning.forward_and_backward(inputs, is_first=position.is_first)
        self._record_micro_batch(loss, inputs)
        if position.is_last:
            lightning.complete_gradients()
            self.batches.step_phase = StepPhase.STEPPING
            # The blocks hold what docs/guides/profiling.md lists for these names of Lightning's hooks.
            with lightning.profile("configure_gradient_clipping"):
                self._clip_gradients(model)
                if self.divergence.is_enabled:
                    self.divergence.check_step(model, self.grad_norm)
                self.parts.call_callbacks("on_pre_optimizer_step")
            is_skipped = lightning.step_optimizer()
            self.trainer.accelerator.optimizer_step_was_skipped = is_skipped
            self.batches.step_phase = StepPhase.UNCOUNTED
            self.parts.call_callbacks("on_optimizer_step")
            self._step_schedule(is_skipped, lightning.is_schedule_replaced())
        lightning.announce_batch_end(inputs, loss, is_last=position.is_last)
        with lightning.profile("on_train_batch_end"):
            if position.is_last:
                self._end_step(model)
            else:
                self.parts.strategy.run_recorded_xla_operations()
                self.parts.call_callbacks("on_substep_end")

    def _record_micro_batch(self, loss: torch.Tensor, inputs: Any) -> None:
        if self.divergence.is_enabled:
            self.divergence.add_loss(loss)
        self.monitors.add_micro_batch(self.loss_accumulator.add_loss(loss, inputs), inputs)
        self.step_end_values.add_micro_batch(loss, inputs)
        self.run.attempt.flos += float(self.trainer.floating_point_ops(inputs))
        # Reads the arguments at each step, since a callback may have changed them.
        self.trainer._track_num_input_tokens(inputs)

    def _clip_gradients(self, model: torch.nn.Module) -> None:
        # Until v4.57, max_grad_norm may be None.
        should_clip = self.trainer.args.max_grad_norm is not None and self.trainer.args.max_grad_norm > 0
        norm = self.trainer._clip_grad_norm(model) if should_clip else None
        needs_norm = norm is not None or self.parts.policy.logs_grad_norm_without_clipping
        self.grad_norm = self.trainer._get_grad_norm(model, grad_norm=norm) if needs_norm else None

    def _step_schedule(self, is_skipped: bool, is_replaced: bool) -> None:
        if is_replaced:
            self.learning_rate = float(self.trainer.get_learning_rates()[0])
            return
        # In other releases, the log line reads the learning rate after the scheduler's step.
        if self.parts.policy.logs_rate_of_step:
            self.learning_rate = self.trainer._get_learning_rate()
        # Metric-driven schedules step after evaluations.
        if not is_skipped and not needs_metric(self.trainer.lr_scheduler):
            self.trainer.lr_scheduler.step()

    def _end_step(self, model: torch.nn.Module) -> None:
        """Clear the gradients, count the step, call `on_step_end`, then log, evaluate, save or stop as requested."""
        state = self.trainer.state
        clear_gradients(model)
        self.parts.strategy.run_recorded_xla_operations()
        state.global_step += 1
        state.epoch = self.epoch_after_step()
        self.batches.step_phase = StepPhase.NOT_BEGUN
        self.parts.call_callbacks("on_step_end", **self.step_end_values.pop())
        self.monitors.poll_requests()
        self.flag_sync.sync_after_step()
        self._log_save_evaluate()
        self.parts.checkpoint_writer.poll()
        self.flag_sync.stop_if_signalled()

    def epoch_after_step(self) -> float:
        """The fraction of epochs that is done once the current step is counted."""
        return self.batches.epoch + (self.batches.position.index + 1) / self.attempt.lengths.micro_batches_in_epoch

    def _log_save_evaluate(self) -> None:
        """Log, evaluate and save as requested. Overrides are called after every step."""
        control = self.trainer.control
        is_due = control.should_log or control.should_evaluate or control.should_save
        if is_due or overrides.is_overridden(self.trainer, "_maybe_log_save_evaluate"):
            self.loss_accumulator.check_before_log()
            with self.flag_sync.abort_evaluation_on_signal():
                overrides.call_log_save_evaluate(
                    self.trainer,
                    tr_loss=self.run.attempt.loss_since_log,
                    grad_norm=self.grad_norm,
                    model=self.trainer.model_wrapped,
                    trial=self.run.trial,
                    epoch=self.batches.epoch,
                    ignore_keys_for_eval=self.attempt.ignore_keys,
                    start_time=self.start_time,
                    learning_rate=self.learning_rate,
                )
        if self.parts.search_backend is not None and self.run.trial is not None:
            self.parts.search_backend.send_pending_report(self.trainer)

    # ---- The end -----------------------------------------------------------------------------------------------

    def close(self, reason: str, message: str = "") -> None:
        """Close the run's data, journal and traces. The journal records `reason`, and an error's `message`."""
        self.batches.reader.close()
        self.monitors.close(reason, message)

    def seconds_by_cause(self) -> dict[str, float]:
        """The seconds that went into other activities than training."""
        seconds = self.run.attempt.seconds_by_activity
        return {
            "preparation": seconds.get("preparation", 0.0),
            "data": sum(self.batches.reader.wait_seconds_by_cause().values()),
            "evaluation": seconds.get("evaluation", 0.0),
            "saving": seconds.get("saving", 0.0),
        }
