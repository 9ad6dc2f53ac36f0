"""`RunEnd`: the last log line of a run, its best model, the summary of what it did, or what an error leaves.

`TrainingLoop` begins and ends the training, in Lightning's hooks. The end of the run comes after Lightning has left
them, and also where a checkpoint is of the last step, or an error came before there was a loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import old_names
from hftrainer.base.messages import tell
from hftrainer.base.part import Part
from hftrainer.base.tracebacks import add_note, hide_interrupt_traceback
from hftrainer.callbacks.progress_bar import close_bars
from hftrainer.checkpointing.run_checkpoints import delete_all_but_best
from hftrainer.reporting import summary
from hftrainer.trainer_utils import TrainOutput, speed_metrics

if TYPE_CHECKING:
    from hftrainer.training.steps.loop import TrainingLoop

logger = logging.getLogger(__name__)


class RunEnd(Part):
    """Ends a run: `finish` after its last step or a stop as asked, `finish_after_error` after an error or a signal.

    Either way, `release_run` is last.
    """

    def finish(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Write the last log line, load the best model, and end the run."""
        trainer = self.trainer
        parts = self.parts
        assert self.run.loop is not None
        if not parts.policy.loads_best_after_logging:
            parts.checkpoint_saver.wait_for_save()
            parts.checkpoint_restorer.load_best_at_end()
        self.run.attempt.loss_up_to_log = loss = self.run.loop.loss_accumulator.sum_of_call()
        metrics = self._final_metrics(loss, num_train_samples, start_time)
        trainer.log(metrics)
        parts.checkpoint_saver.wait_for_save()
        parts.checkpoint_writer.close()
        if parts.policy.loads_best_after_logging:
            parts.checkpoint_restorer.load_best_at_end()
        run_folder = trainer._get_output_dir(trial)
        only_checkpoint = parts.checkpoint_saver.only_checkpoint()
        if trainer.args.should_save and only_checkpoint is not None and parts.storage_sync.mirror is None:
            delete_all_but_best(only_checkpoint, run_folder)
        parts.call_callbacks("on_train_end")
        if trainer.args.push_to_hub:
            trainer.accelerator.processes.run_on_main(trainer._finish_current_push)
        else:
            trainer._finish_current_push()
        parts.storage_sync.finish_uploads(run_folder, only_checkpoint)
        has_trained = trainer.state.global_step != self.run.attempt.initial_step
        if has_trained and trial is None and trainer.is_world_process_zero():
            for text, level in summary.make_summary(self._describe_run(metrics, self.run.loop)):
                tell(text, level)
        if getattr(trainer, "neftune_hook_handle", None) is not None:
            # Copies of transformers' `train` rely on this method to remove the hook and to reset `is_in_train`.
            trainer.neftune_hook_handle.remove()
        trainer.is_in_train = False
        return TrainOutput(trainer.state.global_step, metrics["train_loss"], metrics)

    def finish_after_error(self, error: BaseException) -> None:
        """Complete what the run has begun to write, and say what it has saved."""
        parts = self.parts
        close_bars(self.trainer.callback_handler.callbacks)
        parts.checkpoint_writer.close_ignoring_errors()
        if text := self.describe_saves():
            if isinstance(error, KeyboardInterrupt):
                for line in text.splitlines():
                    add_note(error, f"[hftrainer] {line}")
                hide_interrupt_traceback()
            elif isinstance(error, Exception) and self.run.attempt.checkpoints_written and parts.search_backend is None:
                add_note(error, text)
            elif self.run.signal_listener.signal_number is not None:
                for line in text.splitlines():
                    tell(line)
        # After an Exception, a search continues with the next trial.
        if parts.upload_queue is not None and (parts.search_backend is None or not isinstance(error, Exception)):
            parts.upload_queue.drain(is_urgent=lambda: True)
        parts.storage_sync.finish_after_error()

    def describe_saves(self) -> str:
        """What an interrupted run has saved; empty in all but the main process, and with save_on_interrupt=False."""
        run, attempt = self.run, self.run.attempt
        step = self.trainer.state.global_step
        if not self.trainer.is_world_process_zero():
            return ""
        if not self.parts.checkpoint_saver.should_save_on_interrupt():
            is_empty = step and self.trainer.args.save_strategy == "no" and not attempt.checkpoints_written
            place = f"step {step:,} of {self.trainer.state.max_steps:,}"
            return f"Stopped at {place}; nothing was saved (save_strategy='no')." if is_empty else ""
        since = f" since {run.resume_folder}" if run.resume_folder else ""
        label = "Saved at the error" if attempt.has_saved_after_error else "Last checkpoint"
        nan = summary.find_nan(self.trainer.state, run.loop.loss_accumulator.non_finite_since if run.loop else None)
        earlier = summary.checkpoints_beside(run.resume_folder)
        written = attempt.checkpoints_written
        hint = summary.make_resume_hint(written, is_complete=False, label=label, nan=nan, earlier=earlier)
        if not nan and attempt.has_saved_after_error and run.loop is not None and run.loop.batches.step_phase.has_begun:
            hint = f"{hint.removesuffix('.')}, with other random numbers, since the error was within a step."
        text = ""
        if run.signal_listener.is_forced:
            text = f"A second signal stopped the run at step {step}, before its save was complete. "
        elif run.signal_listener.signal_number is not None and run.loop is not None and step > attempt.initial_step:
            runtime = time.time() - run.loop.start_time
            text = f"{summary.make_stop_message(self.trainer.state, runtime, run.loop.seconds_by_cause())}\n"
        return text + (hint or f"No checkpoint was saved{since}.")

    def describe_failure(self, error: BaseException) -> tuple[str, str]:
        """The name and the message of what ended the run, for its journal. A signal has no message."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "SystemExit"
            return self.run.signal_listener.signal_name or name, ""
        return type(error).__name__, str(error).strip()

    def release_run(self, error_name: str, message: str) -> None:
        """Close the run's loop and release the objects of the run. `error_name` is empty if no error ended it."""
        run, state = self.run, self.trainer.state
        if run.loop is not None:
            is_stopped = not error_name and state.global_step < state.max_steps
            reason = error_name or ("stopped" if is_stopped else "complete")
            run.loop.close(reason, self._find_stopper() if is_stopped else message)
        run.loop = None
        run.mems = None
        run.skipped_samples = None
        run.initial_state = None
        run.attempt.evaluation_metrics = None
        self.trainer.is_in_train = False

    def _describe_run(self, metrics: Mapping[str, float], loop: TrainingLoop) -> summary.FinishedRun:
        """What the summary of a run of at least one step tells."""
        state = self.trainer.state
        steps = state.global_step - self.run.attempt.initial_step
        observer = loop.monitors.observer
        requests = loop.monitors.user_requests
        losses = loop.loss_accumulator
        return summary.FinishedRun(
            state,
            self.trainer.args,
            metrics,
            seconds=loop.seconds_by_cause(),
            steps=steps,
            share=1 if self.parts.policy.averages_train_loss_over_call else steps / state.global_step,
            stopper=self._find_stopper(),
            was_asked_to_stop=requests is not None and requests.has_stopped,
            non_finite_since=losses.non_finite_since if losses.has_warned else None,
            checkpoints=self.run.attempt.checkpoints_written,
            earlier=summary.checkpoints_beside(self.run.resume_folder),
            has_failed_save=self.parts.checkpoint_writer.has_failed,
            has_journal=observer is not None and observer.journal.folder is not None,
            events=None if observer is None else observer.read_events(),
        )

    def _find_stopper(self) -> str:
        """The callback that stopped the run; empty if unknown. Lightning's EarlyStopping notes why it stops."""
        callbacks = self.parts.engine.callbacks
        stoppers = [type(callback).__name__ for callback in callbacks if vars(callback).get("stopping_reason_message")]
        return self.trainer.callback_handler.stopped_by or next(iter(stoppers), "")

    def _final_metrics(self, loss: float, num_train_samples: float, start_time: float) -> dict[str, float]:
        """The last log line. `loss` is the sum of the losses of the steps."""
        state, attempt = self.trainer.state, self.run.attempt
        steps = state.global_step - (attempt.initial_step if self.parts.policy.averages_train_loss_over_call else 0)
        samples = num_train_samples * steps / max(state.max_steps, 1)
        counts_tokens = old_names.old_argument(self.trainer.args, "include_tokens_per_second")
        tokens = attempt.trained_tokens if counts_tokens else None
        metrics = speed_metrics("train", start_time, num_samples=samples, num_steps=steps, num_tokens=tokens)
        logger.info("Training is complete.")
        self.trainer.store_flos()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = loss / max(steps, 0.001)
        self.trainer._memory_tracker.stop_and_update_metrics(metrics)
        return metrics
