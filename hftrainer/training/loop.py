"""`TrainingLoop`: the events of a training run, in order. Lightning's hooks call its methods.

The order of events, log lines and random draws is that of `transformers.Trainer` v5.24.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.callbacks.state import export_states
from hftrainer.compat import overrides
from hftrainer.compat.reading import as_bytes
from hftrainer.data.accumulation import MicroBatchIterator, TrainingSchedule
from hftrainer.data.randomness import rng_state
from hftrainer.data.reading import EpochReader, ResumePoint
from hftrainer.errors import CheckpointNotWritten, RanksLost, UnsupportedArgument
from hftrainer.model.inspection import clear_gradients
from hftrainer.optimization import add_missing_groups, keep_argument_settings, needs_metric
from hftrainer.parallel.devices import is_out_of_memory
from hftrainer.parallel.process_group import is_communication_error, lost_ranks_message
from hftrainer.training.divergence import DivergenceWatch
from hftrainer.training.observation import RunWatch
from hftrainer.training.stopping import ControlSync
from hftrainer.training.sums import LossSum, StepDetails

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class TrainingLoop:
    """One call of `train()`, from its first event to its last.

    Args:
        components: the parts of the Trainer.
        schedule: the lengths of the run.
        train_dataloader: the batches.
        trial: the hyperparameter trial, if any.
        ignore_keys: outputs of the model that evaluation leaves out.
        resume_folder: the checkpoint that the run resumes from, if any.
        first_epoch: epochs done.
        position: micro-batches of the next epoch that are done.
    """

    components: Components
    schedule: TrainingSchedule
    train_dataloader: dataclasses.InitVar[Any]
    trial: Any
    ignore_keys: list[str] | None
    resume_folder: str | None
    first_epoch: int
    position: int

    def __post_init__(self, train_dataloader: Any) -> None:
        self.trainer = trainer = self.components.trainer
        self.run = self.components.run
        self.compute_loss = self.components.steps.loss
        self.saver = self.components.saver
        self.reader = EpochReader(train_dataloader)
        self.epoch = self.first_epoch
        #: The checkpoint's further progress data; None for checkpoints of transformers.
        self.progress = self.run.progress
        self.epoch_ended = self._random_restored = False
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.start_time = time.time()
        self.loss_sum, self.divergence = LossSum(trainer, self.run), DivergenceWatch(self.components, self)
        self.control_sync = ControlSync(self.components, functools.partial(self.saver.save_if_needed, self.trial))
        self.step_details = StepDetails(trainer.callback_handler.callbacks)
        self.watch = RunWatch(self.components, self, train_dataloader)
        self._is_stepping = False  # inside an optimizer step, which may have changed the weights
        self._has_uncounted_step = False  # the optimizer stepped, but `global_step` does not count it yet
        self._pending: tuple[torch.Tensor, Any] | None = None  # loss and batch of the micro-batch, until it ends
        self._parts_of_epoch: tuple[Callable[[], None], ...] = ()  # those that have not run yet
        self.evaluated: dict[str, float] | None = None  # the last evaluation's metrics, compared for the best model
        self.owes_evaluation = False  # an evaluation has begun, and is not complete
        self.between_steps = True  # no data read and no random number drawn for the next step
        self.micro_batches = MicroBatchIterator(
            self.schedule,
            planned_accumulation=lambda: self.components.engine.accumulation_at(self.epoch),
            accumulation=self._accumulation,
            open_epoch=self._open_epoch,
            get_window=self._get_window,
            on_first_window=self._restore_rng_in_epoch,
            is_interrupted=self._interrupted,
            position=self.position,
            skips=self.divergence.skips,
        )
        self.backward_divisor = trainer.accelerator.gradient_accumulation_steps
        # Inspect the signature of an override once, not at each step.
        self._get_batch_samples = overrides.drop_unaccepted_keywords(trainer.get_batch_samples, "device")

    # ---- Training and epochs -----------------------------------------------------------------------------------

    def load_optimizer(self) -> None:
        """Load optimizer and scheduler state, after callbacks have added their parameter groups."""
        optimizer, scheduler = self.components.require_optimizer(), self.trainer.lr_scheduler
        add_missing_groups(scheduler, optimizer)
        with contextlib.nullcontext() if self.trial is None else keep_argument_settings(optimizer, scheduler):
            self.trainer._load_optimizer_and_scheduler(self.resume_folder)

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is that of the last step."""
        is_complete = self.resume_folder is not None and self.trainer.state.global_step >= self.schedule.max_steps
        return is_complete or self.first_epoch >= self.schedule.num_train_epochs

    def begin(self) -> None:
        """Call `on_train_begin`, evaluate with `eval_on_start`, and finish what an interrupted run left undone."""
        self.trainer.model_wrapped.zero_grad()
        self.components.strategy.run_recorded_operations()
        self.components.announce("on_train_begin")
        if self.trainer.args.eval_on_start:
            with self.control_sync.abort_evaluation_on_signal(), self.watch.phase("evaluation"):
                self.trainer._evaluate(self.trial, self.ignore_keys, skip_scheduler=True)
            self.control_sync.sync_control_flags()
            self.control_sync.stop_if_signalled()
        if self.progress is not None and self.progress.owes_evaluation:
            self.trainer.control.should_evaluate = True
            self.control_sync.sync_control_flags()
            self._log_save_evaluate()
            self.control_sync.stop_if_signalled()
        self._end_epoch_of_checkpoint()

    def _end_epoch_of_checkpoint(self) -> None:
        """End the checkpoint's epoch, if the checkpoint was saved after its last step but before `on_epoch_end`."""
        progress = self.progress
        if progress is None or progress.epoch_ended or progress.epoch is None:
            return
        if progress.epoch >= self.first_epoch and self.trainer.state.global_step < self.schedule.max_steps:
            return
        self.epoch = progress.epoch
        self.grad_norm = progress.grad_norm
        self.learning_rate = progress.learning_rate
        self._restore_rng_states()
        self._random_restored = True
        self._close_epoch()

    @contextlib.contextmanager
    def call_run_epoch(self, *parts: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Yields a function that calls `Trainer._run_epoch` for an epoch.

        Args:
            *parts: functions that run the epoch and its end in Lightning's loop.

        Raises:
            UnsupportedArgument: when an override does not run these functions.
        """
        self._parts_of_epoch = parts
        try:
            yield functools.partial(self.trainer._run_epoch, **self._epoch_arguments())
            is_skipped = bool(self._parts_of_epoch)
        finally:
            self._parts_of_epoch = ()  # they reference Lightning's trainer, and so the optimizer
        if is_skipped:
            raise UnsupportedArgument(
                "_run_epoch: Lightning's loop runs the epochs, so an override must call super()._run_epoch(...) "
                "with the arguments that it gets. Override training_step, get_batch_samples or compute_loss instead, "
                "or use a callback."
            )

    def run_epoch(self, given: dict[str, Any]) -> None:
        """Run the epoch, with the arguments that `Trainer._run_epoch` got."""
        expected = self._epoch_arguments()
        changed = [name for name, value in given.items() if not (value is expected[name] or value == expected[name])]
        if changed:
            raise UnsupportedArgument(
                f"_run_epoch: {', '.join(changed)} cannot be changed for an epoch, since the run is already planned: "
                "override get_train_dataloader, set_initial_training_values or train instead."
            )
        parts, self._parts_of_epoch = self._parts_of_epoch, ()
        for run in parts:
            run()

    def _epoch_arguments(self) -> dict[str, Any]:
        return {
            "model": self.trainer.model_wrapped,
            "epoch": self.epoch,
            "train_dataloader": self.reader.loader,
            "steps_in_epoch": self.schedule.steps_in_epoch,
            "num_update_steps_per_epoch": self.schedule.num_update_steps_per_epoch,
            "trial": self.trial,
            "ignore_keys_for_eval": self.ignore_keys,
            "start_time": self.start_time,
            "resume_from_checkpoint": self.resume_folder,
            "epochs_trained": self.first_epoch,
            "steps_trained_in_current_epoch": self.position,
        }

    def begin_epoch(self, epoch: int) -> None:
        """Call `on_epoch_begin`, before the data iterator is made."""
        self.epoch = epoch
        self.epoch_ended = False
        self.run.health.note_sign(is_slow=True)  # processes of the loader may start
        self.control_sync.begin_epoch()
        self.grad_norm = self.learning_rate = None
        self.micro_batches.window = None
        add_missing_groups(self.trainer.lr_scheduler, self.components.require_optimizer())
        self.run.past = None
        self.components.announce("on_epoch_begin")

    def _open_epoch(self) -> Iterator[Any]:
        if not self._is_resume_epoch():
            return self.reader.open(self.epoch)
        saved = None if self.progress is None else self.progress.data
        return self.reader.open(self.epoch, ResumePoint(self.position, self._restore_random_once, saved))

    def _restore_rng_in_epoch(self) -> None:
        known = self.progress is not None and self.progress.data is not None
        if self._is_resume_epoch() and self.position and not known:
            self._restore_rng_states()

    def _restore_random_once(self) -> None:
        """Restore the random states, unless that was done at the end of the previous epoch."""
        if not self._random_restored:
            self._restore_rng_states()

    def _restore_rng_states(self) -> None:
        self.trainer._load_rng_state(self.resume_folder)
        if self.progress is not None and self.progress.data is not None:
            self.reader.restore_held(self.progress.data)

    def _is_resume_epoch(self) -> bool:
        return self.resume_folder is not None and self.epoch == self.first_epoch

    def end_epoch(self) -> None:
        """Call `on_epoch_end`, then log, evaluate and save as requested."""
        if self.micro_batches.window is None and not (self._is_resume_epoch() and self.position):
            logger.warning(
                "The training data yielded no batch in epoch %d: stopping training at step %d!",
                self.epoch,
                self.trainer.state.global_step,
            )
            self.trainer.control.should_training_stop = True
        self._close_epoch()

    def _close_epoch(self) -> None:
        self.epoch_ended = True
        self.components.announce("on_epoch_end")
        self.components.print_xla_metrics()
        self.control_sync.sync_control_flags()
        self._log_save_evaluate()
        self.control_sync.stop_if_signalled()

    # ---- Micro-batches -----------------------------------------------------------------------------------------

    def _accumulation(self) -> int:
        """Micro-batches per optimizer step: a callback's value, or else the argument's current one."""
        now = self.trainer.args.gradient_accumulation_steps
        self.components.model_setup.check_accumulation(now)
        steps: int = self.components.engine.accumulation_at(self.epoch, now)
        return steps

    def _get_window(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], Any]:
        self.between_steps = False
        samples, num_items = self._get_batch_samples(iterator, count, device=self.run.loss_since_log.device)
        self.run.accumulation = len(samples)
        return samples, num_items

    def begin_micro_batch(self) -> None:
        """Call `on_step_begin` at the first micro-batch of an optimizer step."""
        window = self.micro_batches.window
        assert window is not None
        self.trainer.accelerator.sync_gradients = window.is_last
        self.watch.begin_micro_batch()
        if window.is_first:
            self.components.announce("on_step_begin")

    def training_step(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """Call `Trainer.training_step`, which runs backward; the window's last micro-batch all-reduces gradients."""
        window = self.micro_batches.window
        assert window is not None
        local = not window.is_last and not self.components.resolved.accelerator_config.sync_each_batch
        step, items = self.trainer.training_step, window.num_items
        with self.trainer.accelerator.no_sync(model=model) if local else contextlib.nullcontext():
            loss: torch.Tensor = overrides.call_with_accepted(step, model, inputs, num_items_in_batch=items)
        self._pending = loss, inputs
        return loss

    @property
    def needs_manual_optimization(self) -> bool:
        """Whether the next optimizer step calls `training_step`, rather than `compute_loss`."""
        return overrides.needs_manual_optimization(self.trainer)

    def begin_backward(self, loss: torch.Tensor, inputs: Any) -> None:
        """Keep what `compute_loss` returned, and its batch, until the micro-batch ends."""
        self._pending = loss, inputs
        self.watch.begin_backward()

    def end_micro_batch(self) -> None:
        """Count the micro-batch after its backward pass, and add its loss."""
        assert self._pending is not None
        (loss, inputs), self._pending = self._pending, None
        loss = loss.detach()
        self.divergence.add(loss)
        self.watch.end_micro_batch(self.loss_sum.add(loss), inputs)
        self.step_details.add(loss, inputs)
        self.run.flos += float(self.trainer.floating_point_ops(inputs))
        self.trainer._track_num_input_tokens(inputs)  # reads the arguments, which a callback may have changed

    def end_substep(self) -> None:
        """Call `on_substep_end`, after a micro-batch without an optimizer step."""
        self.components.strategy.run_recorded_operations()
        self.components.announce("on_substep_end")

    # ---- Optimizer steps ---------------------------------------------------------------------------------------

    def before_optimizer_step(self, model: torch.nn.Module) -> None:
        """Clip the gradients, and call `on_pre_optimizer_step`."""
        self._is_stepping = True
        clips = self.trainer.args.max_grad_norm is not None and self.trainer.args.max_grad_norm > 0  # None until v4.57
        clipped = self.trainer._clip_grad_norm(model) if clips else None
        measures = clipped is not None or self.components.policy.logs_grad_norm_without_clipping
        self.grad_norm = self.trainer._get_grad_norm(model, grad_norm=clipped) if measures else None
        self.divergence.check(model)
        self.components.announce("on_pre_optimizer_step")

    def after_optimizer_step(self, skipped: bool, *, schedule_replaced: bool) -> None:
        """Call `on_optimizer_step`, and step the learning-rate schedule.

        Args:
            skipped: the loss scaler skipped the step because of infinite gradients; the schedule does not step.
            schedule_replaced: whether a Lightning callback sets the learning rate now.
        """
        trainer = self.trainer
        trainer.accelerator.optimizer_step_was_skipped = skipped
        self._has_uncounted_step = True
        self.components.announce("on_optimizer_step")
        if schedule_replaced:
            self.learning_rate = float(trainer.get_learning_rates()[0])
            return
        # Otherwise the log line reads the learning rate, after the scheduler's step.
        if self.components.policy.logs_rate_of_step:
            self.learning_rate = trainer._get_learning_rate()
        if not skipped and not needs_metric(trainer.lr_scheduler):  # metric-driven schedules step after evaluations
            trainer.lr_scheduler.step()

    def end_step(self, model: torch.nn.Module) -> None:
        """Count the step, call `on_step_end`, then log, evaluate, save or stop as requested."""
        state = self.trainer.state
        clear_gradients(model)
        self.components.strategy.run_recorded_operations()
        state.global_step += 1
        self.run.health.end_step()
        state.epoch = self._epoch_after_step()
        self._is_stepping = self._has_uncounted_step = False
        self.between_steps = True
        self.components.announce("on_step_end", **self.step_details.pop())
        self.watch.grant_requests()
        self.control_sync.end_step()
        self._log_save_evaluate()
        self.components.checkpoint_writer.poll()
        self.control_sync.stop_if_signalled()

    def _epoch_after_step(self) -> float:
        return self.epoch + self.micro_batches.state_dict()["position"] / self.schedule.steps_in_epoch

    def resume_state(self) -> torch.Tensor:
        """The Trainer's entry in a Lightning checkpoint: packed, so that Lightning can load the rest without it."""
        self.trainer.store_flos()
        self.trainer.state.stateful_callbacks = export_states(self.components.stateful_callbacks())
        state, scaler = dataclasses.asdict(self.trainer.state), self.trainer.accelerator.scaler
        if self._has_uncounted_step:  # Lightning's callbacks end the batch before the step is counted here
            state |= {"global_step": state["global_step"] + 1, "epoch": self._epoch_after_step()}
        return as_bytes(
            {
                "trainer_state": state,
                "scheduler": self.trainer.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "rng": rng_state(),
                "progress": vars(self.saver.progress_of(self)),
            }
        )

    def failed(self, error: Exception) -> None:
        """Save a checkpoint before an error ends the run, if the weights are those after a complete step.

        Distributed runs save none: other ranks may be at a different step, and exit with this one.
        """
        if self.control_sync.several and is_communication_error(error) and not isinstance(error, RanksLost):
            logger.error(lost_ranks_message("gradients or weights of all ranks"))
        restarts = self.trainer.args.auto_find_batch_size and is_out_of_memory(error)
        if isinstance(error, CheckpointNotWritten) or restarts or self.control_sync.several or self._is_stepping:
            return
        has_new_step = self.trainer.state.global_step > self.run.initial_step
        if not has_new_step or self.trial is not None or not self.saver.should_save_on_interrupt():
            return
        try:
            self.saver.save_if_needed(self.trial)
            if not self.between_steps:
                logger.warning("The error occurred within a step: a run resumed from here draws other random numbers.")
        except Exception:
            logger.exception("Could not save a checkpoint after the error that ends the run.")

    def _log_save_evaluate(self) -> None:
        """Log, evaluate and save as requested; an override is called at every step."""
        control = self.trainer.control
        is_due = control.should_log or control.should_evaluate or control.should_save
        if is_due or overrides.is_overridden(self.trainer, "_maybe_log_save_evaluate"):
            self.loss_sum.check_before_log()
            values = {
                "tr_loss": self.run.loss_since_log,
                "grad_norm": self.grad_norm,
                "model": self.trainer.model_wrapped,
                "trial": self.trial,
                "epoch": self.epoch,
                "ignore_keys_for_eval": self.ignore_keys,
                "start_time": self.start_time,
                "learning_rate": self.learning_rate,
            }
            method = self.trainer._maybe_log_save_evaluate
            positional, keywords = overrides.log_save_evaluate_arguments(method, values)
            with self.control_sync.abort_evaluation_on_signal():
                method(*positional, **keywords)
        if self.components.search is not None and self.trial is not None:
            self.components.search.send_pending_report(self.trainer)

    # ---- The end -----------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the run's data, its journal and its traces. `reason` is why it ends, for the journal."""
        self._pending = None  # of a micro-batch that failed
        self.reader.close()
        self.watch.close(reason)

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return self.control_sync.can_stop and self.trainer.control.should_training_stop

    def _interrupted(self) -> bool:
        control = self.trainer.control
        return self.control_sync.can_stop and (control.should_epoch_stop or control.should_training_stop)
