"""Runs one `Trainer.train()`, from finding the checkpoint to the last log line."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.base.part import Part
from hftrainer.base.tracebacks import add_note
from hftrainer.checkpointing import resume
from hftrainer.compat.overrides import is_overridden
from hftrainer.debug_utils import DebugUnderflowOverflow
from hftrainer.errors import InvalidSetup, UnsupportedArgument
from hftrainer.model.apply_arguments import apply_model_arguments
from hftrainer.monitoring import health
from hftrainer.parallel import devices
from hftrainer.trackers.base_callbacks import begin_runs
from hftrainer.trainer_utils import TrainOutput
from hftrainer.training.divergence import Diverged
from hftrainer.training.lightning_finders import LightningFinders
from hftrainer.training.planner import RunPlanner
from hftrainer.training.restarts import Restarts
from hftrainer.training.run import Attempt
from hftrainer.training.run_end import RunEnd
from hftrainer.training.steps.loop import TrainingLoop
from hftrainer.training.stopping import SignalListener
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY_REMEDY = (
    "A smaller per_device_train_batch_size with more gradient_accumulation_steps needs less memory, and so does "
    "gradient_checkpointing=True; auto_find_batch_size=True finds a size that fits."
)


class TrainingRunner(Part):
    """Runs training, in several attempts if `Restarts` says how to go on, and releases its objects."""

    def __init__(self, parts: TrainerParts) -> None:
        super().__init__(parts)
        self.planner = RunPlanner(parts)
        self.finders = LightningFinders(parts)
        self.run_end = RunEnd(parts)
        self.restarts = Restarts(parts)

    # ---- Before the first attempt ------------------------------------------------------------------------------

    def check_call(self, resume_from_checkpoint: str | bool | None) -> None:
        """Require a constructed Trainer, and in several processes no argument that works only in one."""
        if getattr(self.trainer, "args", None) is None:
            raise InvalidSetup(f"{type(self.trainer).__name__}.__init__ must call super().__init__(...) of Trainer.")
        if self.trainer.args.world_size == 1:
            return
        errors = []
        if str(resume_from_checkpoint).endswith(".ckpt"):
            errors.append(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} holds the random states of one process: use a "
                "checkpoint folder, or train in one process."
            )
        if self.trainer.args.auto_find_batch_size:
            errors.append(
                "auto_find_batch_size=True would restart only the process whose memory ran out: set "
                "per_device_train_batch_size, or train in one process."
            )
        if errors:
            raise UnsupportedArgument("\n".join(errors))

    def prepare_train(self, resume_from_checkpoint: str | bool | None, trial: Any) -> None:
        """Make the model, apply the arguments of this call of `train`, and find the checkpoint to resume from."""
        model_setup = self.parts.model_setup
        resume.warn_about_unused_argument(self.trainer.args.resume_from_checkpoint, resume_from_checkpoint)
        self.parts.checkpoint_writer.close_ignoring_errors()
        resume_folder = self.parts.checkpoint_restorer.find_resume_folder(resume_from_checkpoint)
        if self.parts.policy.makes_model_before_trial:
            model_setup.remake_model(trial)
            model_setup.align_special_tokens()
            self.trainer._hp_search_setup(trial)
        else:
            self.trainer._hp_search_setup(trial)
            if self.trainer.model_init is None:
                model_setup.align_special_tokens()
            model_setup.remake_model(trial)
        self.parts.trainer_setup.apply_changed_arguments()
        self.parts.control_actions.check_best_metric()
        if errors := self.parts.engine.check_callbacks(self.trainer):
            raise UnsupportedArgument("\n".join(errors))
        self.run.resume_folder = resume_folder
        if resume_folder is not None:
            self.parts.checkpoint_restorer.load_weights_and_batch_size(resume_folder)
            if self.trainer.args.elastic:
                self.parts.checkpoint_restorer.keep_global_batch(resume_folder)

    # ---- Attempts ----------------------------------------------------------------------------------------------

    def run_attempts(self, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """Train until the end or a signal, from `run.resume_folder` if that is set.

        With `auto_find_batch_size`, restart with half the batch size if memory runs out; with
        `on_divergence="rollback"`, from an earlier step if one diverges.

        Args:
            trial: the hyperparameter trial, if any.
            ignore_keys: outputs of the model that evaluation leaves out.
        """
        with self._watch_overflow(), self._training_context():
            self.restarts.read_skips_and_copy_state(trial)
            optimizers = self.trainer.optimizer, self.trainer.lr_scheduler
            while True:
                try:
                    return self.trainer._inner_training_loop(
                        batch_size=self.run.train_batch_size,
                        args=self.trainer.args,
                        resume_from_checkpoint=self.run.resume_folder,
                        trial=trial,
                        ignore_keys_for_eval=ignore_keys,
                    )
                except Diverged as error:
                    restart = functools.partial(self.restarts.roll_back, error.diverged_step, optimizers)
                except Exception as error:
                    if not devices.is_out_of_memory(error):
                        raise
                    if not self.trainer.args.auto_find_batch_size:
                        if not self.run.attempt.has_unfinished_evaluation:
                            add_note(error, _OUT_OF_MEMORY_REMEDY)
                        raise
                    if self.run.train_batch_size == 1:
                        text = "auto_find_batch_size: a batch of one sample does not fit into memory."
                        raise RuntimeError(text) from error
                    restart = functools.partial(self.restarts.halve_batches, optimizers)
                # Outside the `except` block, since the error references the tensors of the failed attempt.
                restart()

    def _watch_overflow(self) -> contextlib.ExitStack:
        """A context that checks the values of all modules, with `debug="underflow_overflow"`."""
        stack = contextlib.ExitStack()
        if "underflow_overflow" in (self.trainer.args.debug or ()):
            stack.callback(DebugUnderflowOverflow(self.trainer.model).remove)
        return stack

    @contextlib.contextmanager
    def _training_context(self) -> Iterator[None]:
        """Apply model arguments and handle signals in the block, then release the run's objects."""
        trainer = self.trainer
        args = trainer.args
        parts = self.parts
        trainer.is_in_train = True
        saves = parts.checkpoint_saver.should_save_on_interrupt()
        listener = SignalListener(saves, self.run_end.describe_saves, has_launcher=args.world_size > 1)
        self.run.signal_listener = listener
        failure = ("", "")
        try:
            with (
                health.serve_health(
                    args, trainer.accelerator.processes, lambda: trainer.state, parts.checkpoint_saver.last_checkpoint
                ) as self.run.heartbeat,
                apply_model_arguments(parts.unwrapped_model, args, parts.engine.plan.read_once, trainer=trainer),
                listener.handle_signals(),
                parts.loader_factory.explain_removed_columns(trainer.train_dataset),
            ):
                yield
                # The signal arrived after the last step: everything is already saved.
                if listener.signal_number is not None:
                    listener.end_script()
        except BaseException as error:
            failure = self.run_end.describe_failure(error)
            self.run_end.finish_after_error(error)
            raise
        finally:
            self.run_end.release_run(*failure)

    def run_attempt(
        self, batch_size: int | None, args: TrainingArguments | None, resume_folder: Any, trial: Any, ignore_keys: Any
    ) -> TrainOutput:
        """Plan, prepare, run Lightning's loop, and finish."""
        trainer = self.trainer
        args = trainer.args if args is None else args
        # An override may pass other arguments.
        self.parts.trainer_setup.apply_arguments_to_engine(args)
        trainer.accelerator.free_memory()
        if args.auto_find_batch_size and batch_size is not None:
            trainer._update_auto_batch_size(batch_size)
        self.run.trial, self.run.resume_folder = trial, resume_folder
        self.run.attempt = attempt = Attempt(ignore_keys)
        trainer.callback_handler.stopped_by = ""
        if resume_folder is None:
            self.finders.apply_batch_size_finder()
        loop, model = self._prepare_attempt(args)
        self._announce_run()
        attempt.begin(trainer.state, args.device)
        if self.run.resumed_progress is not None:
            loop.loss_accumulator.restore(self.run.resumed_progress)
        if attempt.is_finished:
            self._resume_finished_run(loop)
        else:
            with _add_step_note(loop), loop.step_end_values.record_outputs(trainer.model), devices.error_hints():
                steps_between_logs = self.planner.steps_between_logs(attempt.lengths)
                # After an error, it saves a checkpoint, which includes what Lightning's callbacks add.
                self.parts.engine.fit(loop, model, log_every_n_steps=steps_between_logs)
        self.run.heartbeat.begin_activity("ended")
        return trainer._finalize_training(trial, attempt.lengths.num_train_samples, loop.start_time)

    def _prepare_attempt(self, args: TrainingArguments) -> tuple[TrainingLoop, Any]:
        """Plan an attempt, and prepare its data, state, model and optimizer.

        Returns:
            The loop of the run, and the model to train.
        """
        run, attempt, folder = self.run, self.run.attempt, self.run.resume_folder
        # An override of get_train_dataloader prepares its loader in this block.
        with self.parts.loader_factory.treat_as_training_data():
            dataloader = self.trainer.get_train_dataloader()
        if args.on_divergence is not None and run.skipped_samples is None:
            raise UnsupportedArgument(
                f"on_divergence={args.on_divergence!r} needs Trainer.train: let your train() call super().train()."
            )
        self.parts.loader_factory.warn_about_custom_loader(dataloader)
        planned = self.planner.plan_lengths(args, dataloader)
        skipped_samples = run.skipped_samples
        # `RunPlanner.init_state` reads both, behind `_init_training_state`, whose signature has no place for them.
        attempt.lengths = lengths = planned if skipped_samples is None else skipped_samples.extend_lengths(planned)
        run.resumed_progress = self.parts.checkpoint_restorer.load_adapted_progress(folder, lengths)
        attempt.first_epoch, attempt.finished_micro_batches = self.trainer._init_training_state(
            lengths.max_steps, lengths.num_update_steps_per_epoch, planned.num_train_epochs, folder, run.trial
        )
        self.parts.loader_factory.check_evaluation_data()
        model, dataloader = self.trainer._prepare_for_training(lengths.max_steps, dataloader, folder)
        if folder is None:
            self.finders.apply_learning_rate_finder(lengths.max_steps)
            self.trainer.callback_handler.lr_scheduler = self.trainer.lr_scheduler
        has_all_steps = folder is not None and self.trainer.state.global_step >= lengths.max_steps
        attempt.is_finished = has_all_steps or attempt.first_epoch >= lengths.num_train_epochs
        self.planner.log_start()
        run.loop = loop = TrainingLoop(self.parts, dataloader)
        loop.monitors.begin()
        return loop, model

    def _announce_run(self) -> None:
        """Notify trackers and the checkpoint writer that a run begins.

        Trackers do not continue a finished run, which already has its last log line.
        """
        trainer = self.trainer
        progress = self.run.resumed_progress
        if trainer.is_world_process_zero():
            tracker_runs: Mapping[str, Any] = {}
            if progress is not None and (progress.owes_evaluation or not self.run.attempt.is_finished):
                tracker_runs = progress.tracker_runs
            place = self.parts.storage_sync.checkpoint_place(self.run.trial)
            begin_runs(trainer.callback_handler.callbacks, tracker_runs, trainer.args, trainer.state, place)
        if trainer.args.should_save:
            run_folder = None if is_overridden(trainer, "_get_output_dir") else trainer._get_output_dir(self.run.trial)
            self.parts.checkpoint_writer.script_files.record_existing_files(run_folder)

    def _resume_finished_run(self, loop: TrainingLoop) -> None:
        """Load the checkpoint of a finished run, without training, and complete what follows its last save."""
        loop.load_optimizer()
        loop.begin_training()
        folder = self.run.resume_folder
        if folder is None:
            return
        # The run may have ended before its last upload, and before it deleted older checkpoints.
        if self.trainer.args.push_to_hub:
            self.trainer._push_from_checkpoint(folder)
        self.parts.checkpoint_saver.delete_older(folder, self.run.trial)

    # ---- Releasing ---------------------------------------------------------------------------------------------

    def release_trial(self) -> None:
        """Release a trial's model and everything made for it."""
        parts = self.parts
        handler = self.trainer.callback_handler
        self.restarts.release_optimizer()
        parts.engine.release()
        self.trainer.accelerator.free_memory()
        parts.checkpoint_writer.close()
        # The next trial sets these again.
        self.trainer.model = self.trainer.model_wrapped = handler.model = None  # type: ignore[assignment]
        handler.train_dataloader = None
        parts.counters.model_and_flos_per_token = None
        if self.trainer.args.torch_compile:
            # Free the code compiled for this model.
            torch.compiler.reset()
        gc.collect()
        devices.empty_cache()


@contextlib.contextmanager
def _add_step_note(loop: TrainingLoop) -> Iterator[None]:
    """Add the step to an error whose notes do not name it."""
    try:
        yield
    except Exception as error:
        if not any("training" in note for note in getattr(error, "__notes__", ())):
            done = loop.trainer.state.global_step
            place = f"after training step {done}" if done else "before training step 1"
            if loop.batches.step_phase.has_begun:
                place = f"in training step {done + 1}"
            add_note(error, f"This happened {place}.")
        raise
