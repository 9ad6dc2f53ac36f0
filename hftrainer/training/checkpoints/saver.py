"""`CheckpointSaver`: what a run puts into a checkpoint, and what follows from one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments import old_names
from hftrainer.arguments.choices import SaveStrategy
from hftrainer.base.part import Part
from hftrainer.base.signatures import accepted_args
from hftrainer.callbacks.state import drop_from_json, export_states
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.run_checkpoints import rotate_checkpoints
from hftrainer.checkpointing.weights import make_meta_copy, save_configs, save_weights
from hftrainer.checkpointing.writing.files import make_output_dir
from hftrainer.checkpointing.writing.folder import final_folder, staging_folder
from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.randomness import rng_state
from hftrainer.errors import CheckpointNotWritten, RanksLost
from hftrainer.parallel.devices import is_out_of_memory
from hftrainer.parallel.process_group import is_communication_error, lost_ranks_message
from hftrainer.parallel.rank_errors import read_first_error
from hftrainer.strategies.strategy import MakeOptimizer
from hftrainer.training.checkpoints.progress_collection import collect_progress
from hftrainer.training_args import without_tokens

if TYPE_CHECKING:
    from hftrainer.training.steps.loop import TrainingLoop

logger = logging.getLogger(__name__)


class CheckpointSaver(Part):
    """Decides what a run's checkpoint holds, and what follows from it: `on_save`, rotation, uploads, the best model.

    All ranks call it, and it lets them know whether a checkpoint has failed. It does not decide when a checkpoint is
    due (`ControlActions`), nor how it comes to the disk (`CheckpointWriter`).
    """

    def _gather_files_of_other_ranks(self) -> dict[str, Any]:
        """File name → contents, for the other ranks' files in a checkpoint: random states and progress."""
        rank = self.trainer.args.process_index
        size = self.trainer.args.world_size
        if size == 1:
            return {}
        if self.trainer.args.save_only_model:
            # Overrides on other ranks may write files.
            self.trainer.accelerator.processes.barrier()
            return {}
        own_files: dict[str, Any] = {layout.rng_name(rank, size): rng_state()}
        if self.run.loop is not None:
            own_files[layout.progress_name(rank, size)] = vars(collect_progress(self.run.loop))
        files_by_rank = self.trainer.accelerator.processes.gather_objects([own_files])
        del files_by_rank[rank]
        return {name: state for files in files_by_rank for name, state in files.items()}

    def _write_files(self, folder: str, files_of_other_ranks: Mapping[str, Any]) -> None:
        """Write everything that a run needs to resume."""
        trainer = self.trainer
        parts = self.parts
        parts.strategy.write_shards(folder, parts.checkpoint_writer.write_shard)
        parts.strategy.write_full_states(folder, parts.checkpoint_writer.call_or_defer)
        uses_thread = not trainer.args.save_only_model and self._can_write_optimizer_in_parallel()
        if uses_thread:
            with parts.checkpoint_writer.write_in_thread():
                trainer._save_optimizer_and_scheduler(folder)
        with parts.engine.apply_callback_weights(trainer.model) as from_callbacks:
            trainer.save_model(folder, **accepted_args(trainer.save_model, {"_internal_call": True}))
        if not trainer.args.save_only_model:
            if not uses_thread:
                trainer._save_optimizer_and_scheduler(folder)
            trainer._save_scaler(folder)
            trainer._save_rng_state(folder)
            self.save_progress(folder)
            for name, state in files_of_other_ranks.items():
                torch.save(state, os.path.join(folder, name))
            if from_callbacks.state:
                parts.checkpoint_writer.save(
                    from_callbacks.state, os.path.join(folder, layout.LIGHTNING_CALLBACKS_NAME)
                )
        # The sharded formats cannot load adapters alone.
        elif parts.strategy.shards_model and libraries.is_peft(parts.unwrapped_model):
            self.save_state_files(None, folder)
        trainer.state.stateful_callbacks = export_states(self.parts.stateful_callbacks())
        self.write_state(folder)

    def _can_write_optimizer_in_parallel(self) -> bool:
        """Whether a thread can write the optimizer's state in parallel with the weights. Waits for the device."""
        if is_overridden(self.trainer, "save_model", "_save", "_save_optimizer_and_scheduler"):
            # An override expects the files that transformers writes before it.
            return False
        device_type = self.trainer.args.device.type
        if device_type == "cuda":
            # The thread may use another stream.
            torch.cuda.synchronize()
        # XLA's states are copied to the CPU before they are written.
        return device_type in ("cpu", "cuda", "xla")

    def write_state(self, folder: str) -> None:
        """Write `trainer_state.json`, with only the fields of the followed release."""
        path = os.path.join(folder, layout.TRAINER_STATE_NAME)
        self.trainer.state.save_to_json(path)
        # Releases without this field cannot read a file that has it.
        if not self.parts.policy.records_best_step:
            drop_from_json(path, "best_global_step")
        self.parts.storage_sync.upload_files()

    def wait_for_save(self) -> None:
        """Wait for a background checkpoint, and notify all ranks whether it was written."""
        state = self.trainer.state
        writer = self.parts.checkpoint_writer
        broadcast_from_main = self.trainer.accelerator.processes.broadcast_from_main
        if writer.is_async:
            writer.wait_for_shard()
            broadcast_from_main(writer.wait)
            writer.has_failed, state.best_model_checkpoint = broadcast_from_main(
                lambda: (writer.has_failed, state.best_model_checkpoint)
            )

    def ensure_saved(self) -> None:
        """Write a checkpoint of this step unless it exists, and wait until it is on disk."""
        self.wait_for_save()
        run, state = self.run, self.trainer.state
        if run.attempt.last_saved_step != state.global_step or self.parts.checkpoint_writer.has_failed:
            with run.measure_activity("saving"):
                self.trainer._save_checkpoint(self.trainer.model_wrapped, run.trial)
                run.attempt.last_saved_step = state.global_step
                self.call_on_save()
        self.wait_for_save()

    def last_checkpoint(self) -> str | None:
        """The newest complete checkpoint of the run; None in a process that writes no checkpoints."""
        folders = [self.run.resume_folder, *self.run.attempt.checkpoints_written]
        return folders[-1] if self.trainer.args.should_save else None

    def should_save_on_interrupt(self) -> bool:
        """Whether a signal or an error saves a checkpoint before the run ends."""
        args = self.trainer.args
        return args.enable_jit_checkpoint or (args.save_on_interrupt and args.save_strategy != SaveStrategy.NO)

    def only_checkpoint(self) -> str | None:
        """The best checkpoint, if all others are deleted at the end."""
        # If the last save failed, keep the previous checkpoint, from which the run can resume.
        keeps_others = self.trainer.args.save_total_limit != 1 or self.parts.checkpoint_writer.has_failed
        return None if keeps_others else self.trainer.state.best_model_checkpoint

    def call_on_save(self) -> None:
        """Call `on_save` once the checkpoint is written, with the state that it holds."""
        trainer = self.trainer
        state = dataclasses.replace(trainer.state) if self.parts.checkpoint_writer.is_async else trainer.state

        def call_callbacks() -> None:
            # If this checkpoint was written in the background, the next one may be due already.
            should_save = trainer.control.should_save
            trainer.control = trainer.callback_handler.on_save(trainer.args, state, trainer.control)
            trainer.control.should_save |= should_save

        trainer.control.should_save = False
        self.parts.checkpoint_writer.call_when_complete(call_callbacks)

    def save_state_files(self, optimizer: MakeOptimizer | None, folder: str) -> None:
        """Write the optimizer's state, unless it is None, and the other state files of one process."""
        for name, state in self.parts.strategy.state_files(optimizer):
            self.parts.checkpoint_writer.save(state, os.path.join(folder, name))

    def save_progress(self, folder: str) -> None:
        """Write the progress that `trainer_state.json` does not hold."""
        # A checkpoint within a step resumes from the step count alone.
        if self.run.loop is not None and not self.run.loop.batches.step_phase.has_begun:
            name = layout.progress_name(self.trainer.args.process_index, self.trainer.args.world_size)
            torch.save(vars(collect_progress(self.run.loop)), os.path.join(folder, name))

    def save_after_error(self, loop: TrainingLoop, error: Exception) -> None:
        """Save a checkpoint before an error ends the run, unless an optimizer step is incomplete.

        Distributed runs save no checkpoint: other ranks may be at a different step, and exit with this rank.
        """
        is_distributed = loop.flag_sync.is_distributed
        is_lost = is_distributed and is_communication_error(error) and not isinstance(error, RanksLost)
        # If a rank has printed its error, the traceback names that.
        if is_lost and not read_first_error(os.getpid()):
            logger.error(lost_ranks_message("gradients or weights of all ranks"))
        should_restart = self.trainer.args.auto_find_batch_size and is_out_of_memory(error)
        is_updating = loop.batches.step_phase.may_have_changed_weights
        if isinstance(error, CheckpointNotWritten) or should_restart or is_distributed or is_updating:
            return
        has_new_step = self.trainer.state.global_step > self.run.attempt.initial_step
        if not has_new_step or self.run.trial is not None or not self.should_save_on_interrupt():
            return
        count = len(self.run.attempt.checkpoints_written)
        try:
            self.ensure_saved()
            self.run.attempt.has_saved_after_error = len(self.run.attempt.checkpoints_written) > count
        except Exception:
            logger.exception("Could not save a checkpoint after the error that ends the run.")

    # ---- Implementations of the Trainer's methods --------------------------------------------------------------

    @contextlib.contextmanager
    def prepare_save(self, folder: str, *, internal: bool) -> Iterator[dict[str, Any] | None]:
        """Yields the keyword arguments for `Trainer._save`; None if this process writes no model."""
        strategy = self.parts.strategy
        model = libraries.unwrap_compiled(self.trainer.model)
        if internal and strategy.saves_only_shards:
            # transformers then writes only the shards; with 'dcp' we also write the model's other files.
            yield {"state_dict": {}} if strategy.initial_plan.saves_dcp and self.trainer.args.should_save else None
            return
        weights = strategy.checkpoint_weights(model)
        if self.trainer.args.should_save:
            if not internal:
                make_output_dir(folder)
            if weights is not None:
                yield {"state_dict": weights}
            else:
                with self.parts.engine.apply_callback_weights(model) as values:
                    # Callbacks such as ModelPruning may rename the model's weights.
                    yield {} if values.weights is None else {"state_dict": values.weights}
        else:
            yield None
        if not internal:
            strategy.save_remaining_shards(folder)

    def save_model_files(self, folder: str, weights: dict[str, Any] | None) -> None:
        """Write the files of a model; see `Trainer._save`.

        Args:
            folder: the folder to write to.
            weights: the full weights; None to read them from the model; empty if they are saved as shards.
        """
        os.makedirs(folder, exist_ok=True)
        model = self.parts.unwrapped_model
        logger.info("Saving the model to %s.", final_folder(folder))
        safe = bool(old_names.old_argument(self.trainer.args, "save_safetensors"))
        write = functools.partial(save_weights, model, folder, safe=safe)
        # torch writes files from CPU memory.
        needs_copy = self.trainer.args.device.type == "xla"
        if weights == {}:
            save_configs(model, folder)
        elif libraries.is_peft(model):
            # Adapters are small, so this process does not write them in the background.
            write(self.parts.strategy.to_cpu(model.state_dict()) if needs_copy else weights)
        else:
            if (self.parts.checkpoint_writer.defers_writes or needs_copy) and weights is None:
                # Pass the weights, so that the writer copies them before training changes the model.
                weights = libraries.unwrap_compiled(self.trainer.model).state_dict()
            self.parts.checkpoint_writer.call_or_defer(
                write,
                weights,
                make_picklable=lambda: functools.partial(save_weights, make_meta_copy(model), folder, safe=safe),
            )
        processing_class = self.trainer.processing_class
        if processing_class is None and self.parts.policy.saves_tokenizer_of_collator:
            processing_class = getattr(self.trainer.data_collator, "tokenizer", None)
            if processing_class is not None:
                logger.info("Saving the data_collator's tokenizer, since the Trainer has no processing_class.")
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        torch.save(without_tokens(self.trainer.args), os.path.join(folder, layout.TRAINING_ARGS_NAME))

    def write_checkpoint(self, trial: Any) -> None:
        """Write the checkpoint of this step atomically.

        Args:
            trial: the hyperparameter trial, if any.
        """
        state = self.trainer.state
        self.trainer.store_flos()
        self.wait_for_save()
        self.parts.storage_sync.wait_for_space()
        self.run.attempt.last_saved_step = state.global_step
        run_folder = self.trainer._get_output_dir(trial)
        earlier_best = state.best_model_checkpoint
        best_path = os.path.join(run_folder, f"{layout.PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        is_best_on_disk = self.trainer.accelerator.processes.broadcast_from_main(lambda: os.path.isdir(best_path))
        if state.best_global_step == state.global_step or is_best_on_disk:
            state.best_model_checkpoint = best_path
        path = os.path.join(run_folder, f"{layout.PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        rotate = self._make_rotation(run_folder, path)

        def on_written() -> None:
            self.run.attempt.checkpoints_written.append(path)
            if not self.trainer.args.auto_find_batch_size:
                self.run.initial_state = None
            rotate()

        def on_failure() -> None:
            self.trainer.state.best_model_checkpoint = earlier_best

        self._write_on_all_ranks(path, on_written, on_failure)
        if self.parts.checkpoint_writer.has_failed:
            on_failure()
        if self.trainer.args.push_to_hub:
            self.parts.checkpoint_writer.call_when_complete(functools.partial(self.trainer._push_from_checkpoint, path))
        # The override may write into the folder after this method returns.
        if is_overridden(self.trainer, "_save_checkpoint"):
            self.wait_for_save()

    def delete_older(self, checkpoint: str, trial: Any) -> None:
        """Delete what the save of the run's last checkpoint would have deleted if the run had not been killed then."""
        run_folder = os.path.abspath(self.trainer._get_output_dir(trial))
        is_of_run = os.path.dirname(os.path.abspath(checkpoint)) == run_folder
        if self.trainer.args.should_save and is_of_run and self.parts.storage_sync.mirror is None:
            self._make_rotation(run_folder, checkpoint)()

    def _write_on_all_ranks(self, path: str, on_written: Callable[[], None], on_failure: Callable[[], None]) -> None:
        """Write a checkpoint on all ranks, and notify them whether it failed.

        Args:
            path: the folder of the checkpoint.
            on_written: called when it is complete; see `CheckpointWriter.checkpoint`.
            on_failure: called if the storage fails.
        """
        trainer = self.trainer
        writer = self.parts.checkpoint_writer
        strategy = self.parts.strategy
        processes = trainer.accelerator.processes
        other_files = self._gather_files_of_other_ranks()
        # Staging folders are named after their writer. If each node has a writer, use that of the nearest lower rank.
        staging_path = str(staging_folder(path)) if trainer.args.should_save else None
        folders = processes.gather_objects([staging_path])
        make_optimizer = None if trainer.args.save_only_model else self.parts.require_optimizer
        strategy.gather_states(trainer.model, make_optimizer)
        try:
            if trainer.args.should_save:
                with writer.checkpoint(path, on_complete=on_written, on_failure=on_failure) as folder:
                    if folder is not None:
                        self._write_files(folder, other_files)
            else:
                staging_path = next(filter(None, folders[processes.rank :: -1]))
                # Overrides may gather weights on all ranks.
                trainer.save_model(staging_path, **accepted_args(trainer.save_model, {"_internal_call": True}))
                with writer.report_shard_errors(path):
                    strategy.write_shards(staging_path, writer.write_shard)
        finally:
            strategy.end_checkpoint()
        writer.has_failed = any(processes.gather_objects([writer.has_failed]))

    def _make_rotation(self, run_folder: str, path: str) -> Callable[[], None]:
        """A function that deletes checkpoints beyond `save_total_limit`, for use once `path` is written."""
        # Keep the checkpoint from which a restart with smaller batches resumes.
        resume_folder = self.run.resume_folder
        needed_checkpoints = [resume_folder] if resume_folder and self.trainer.args.auto_find_batch_size else []
        best_folder = self.trainer.state.best_model_checkpoint
        upload = self.parts.storage_sync.make_upload(path, [best_folder, *needed_checkpoints])

        def rotate_as_overridden() -> None:
            self.trainer._rotate_checkpoints(use_mtime=True, output_dir=run_folder)
            if upload is not None:
                upload()

        if is_overridden(self.trainer, "_rotate_checkpoints", "_sorted_checkpoints"):
            return rotate_as_overridden
        limit = self.trainer.args.save_total_limit
        kept = [path, *needed_checkpoints]
        return upload or functools.partial(rotate_checkpoints, run_folder, limit, best_folder, kept)
