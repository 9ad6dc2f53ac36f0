"""Finds the checkpoint to resume from, and restores what it holds: weights, batch sizes and progress."""

from __future__ import annotations

import logging
import os
import re

from torch import nn

from hftrainer.base.messages import tell
from hftrainer.base.part import Part
from hftrainer.base.tracebacks import add_note
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout, resume
from hftrainer.checkpointing.run_progress import RunProgress, load_progress, read_global_batch_size
from hftrainer.checkpointing.writing.files import check_writable
from hftrainer.checkpointing.writing.folder import clear_stale
from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.elastic import accumulation_steps
from hftrainer.errors import InvalidSetup
from hftrainer.training.checkpoints.progress_collection import position_settings
from hftrainer.training.run_lengths import RunLengths

logger = logging.getLogger(__name__)

#: A parameter, its shape in the checkpoint and its shape in the model, in the message of torch.
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)")


class CheckpointRestorer(Part):
    """Finds the checkpoint that a run resumes from, and restores what it holds; the best weights at the run's end."""

    def find_resume_folder(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Find the checkpoint that all ranks resume from, after completing or removing incomplete folders."""
        processes = self.trainer.accelerator.processes
        args = self.trainer.args
        if args.should_save:
            clear_stale(str(args.output_dir))
        processes.barrier()
        if args.save_strategy != "no" and not is_overridden(self.trainer, "_save_checkpoint"):
            processes.broadcast_from_main(lambda: check_writable(str(args.output_dir)))
        resume_from_checkpoint = self.parts.storage_sync.fetch_checkpoint(resume_from_checkpoint)
        if not (isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.startswith("hub:")):
            return processes.broadcast_from_main(lambda: resume.find_checkpoint(resume_from_checkpoint, args))
        from hftrainer.hub.download import download_checkpoint

        # The first rank of a node downloads the checkpoint; the others read it from the cache.
        with processes.run_in_order(first=self.trainer.is_local_process_zero()):
            resume_folder = download_checkpoint(resume_from_checkpoint, args)
        processes.broadcast_from_main(lambda: resume.find_checkpoint(resume_folder, args))
        return resume_folder

    def keep_global_batch(self, resume_folder: str) -> None:
        """Keep the checkpoint's number of samples per optimizer step by setting the accumulation steps."""
        processes = self.trainer.accelerator.processes
        global_batch_size = processes.broadcast_from_main(lambda: read_global_batch_size(resume_folder))
        if global_batch_size is None:
            text = "elastic=True: %s does not record the samples per step; the current number is used."
            logger.warning(text, resume_folder)
            return
        steps = accumulation_steps(global_batch_size, self.run.train_batch_size, processes.data_world_size)
        if steps != self.trainer.args.gradient_accumulation_steps and self.trainer.is_world_process_zero():
            tell(f"gradient_accumulation_steps={steps} keeps the {global_batch_size} samples of a step (elastic=True).")
        self.trainer.args.gradient_accumulation_steps = steps
        self.parts.trainer_setup.apply_changed_arguments()

    def load_weights_and_batch_size(self, resume_folder: str) -> None:
        """Load the weights of an unsharded model, and the batch size, from a checkpoint."""
        # A sharded model loads its shards later.
        if not self.parts.strategy.shards_model:
            try:
                self.trainer._load_from_checkpoint(resume_folder)
            # torch raises this for weights of different shapes.
            except RuntimeError as error:
                advice = "check that the model is the same, or start without resume_from_checkpoint"
                shapes = ["{} is {} in it and {} in yours".format(*found) for found in _OTHER_SHAPE.findall(str(error))]
                if shapes:
                    found = f"{resume_folder} is of another model ({'; '.join(shapes[:3])})"
                    raise InvalidSetup(f"{found}: {advice}.") from None
                add_note(error, f"This happened while loading the weights of {resume_folder}: {advice}.")
                raise
        finds_batch_size = self.trainer.args.auto_find_batch_size or self.parts.engine.finds_batch_size
        if finds_batch_size or not self.parts.policy.resumes_with_batch_size_of_arguments:
            state = TrainerState.load_from_json(os.path.join(resume_folder, layout.TRAINER_STATE_NAME))
            self.run.train_batch_size = state.train_batch_size or self.run.train_batch_size

    def load_weights(self, model: nn.Module, folder: str, *, is_best: bool = False) -> None:
        """Load a checkpoint's weights into the model, sharded or not; with `is_best`, at the end of a run."""
        load = self.parts.strategy.load_best_model if is_best else self.parts.strategy.load_weights
        has_adapters = libraries.is_peft(self.parts.unwrapped_model)
        incompatible_keys = load(libraries.unwrap_compiled(model), folder, only_trainable=has_adapters)
        if incompatible_keys is not None:
            self.trainer._issue_warnings_after_load(incompatible_keys)

    def load_adapted_progress(self, resume_folder: str | None, lengths: RunLengths) -> RunProgress | None:
        """The progress in a checkpoint, or None if we did not write it. Warns about changed arguments."""
        if resume_folder is None:
            return None
        progress = load_progress(resume_folder, self.trainer.args.process_index, self.trainer.args.world_size)
        state = TrainerState.load_from_json(os.path.join(resume_folder, layout.TRAINER_STATE_NAME))
        # A run without steps left reads no data.
        if progress is not None and state.global_step < lengths.max_steps:
            progress.adapt_to(position_settings(self.parts, lengths), skips_data=not self.trainer.args.ignore_data_skip)
        return progress

    def load_best_at_end(self) -> None:
        """Load the best model with `load_best_model_at_end`, if its checkpoint is complete."""
        best_folder = self.trainer.state.best_model_checkpoint
        if not self.trainer.args.load_best_model_at_end:
            return
        if best_folder is None:
            logger.warning(
                "load_best_model_at_end has no effect: no evaluation returned a number for "
                "metric_for_best_model=%r. The Trainer keeps the last model.",
                self.trainer.args.metric_for_best_model,
            )
            return
        reason = self.trainer.accelerator.processes.broadcast_from_main(lambda: resume.best_weights_damage(best_folder))
        if reason is None:
            self.trainer._load_best_model()
        else:
            logger.error("The best model cannot be loaded, so the Trainer keeps the last one: %s.", reason)
