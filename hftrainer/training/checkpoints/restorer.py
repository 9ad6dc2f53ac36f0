"""Restores what a checkpoint holds: weights, batch size and progress."""

from __future__ import annotations

import logging
import os

from torch import nn

from hftrainer.base.part import Part
from hftrainer.base.tracebacks import add_note
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names, resume
from hftrainer.checkpointing.run_progress import RunProgress, load_progress
from hftrainer.compat import libraries
from hftrainer.training.checkpoints.progress import position_settings
from hftrainer.training.run_lengths import RunLengths

logger = logging.getLogger(__name__)


class CheckpointRestorer(Part):
    """Restores weights, batch size and progress, and the best weights at the end of a run."""

    def load_weights_and_batch_size(self, folder: str) -> None:
        """Load the weights of an unsharded model, and the batch size, from a checkpoint."""
        # A sharded model loads its shards later.
        if not self.parts.strategy.shards_model:
            try:
                self.trainer._load_from_checkpoint(folder)
            # torch raises this for weights of different shapes.
            except RuntimeError as error:
                advice = "check that the model is the same, or start without resume_from_checkpoint"
                add_note(error, f"This happened while loading the weights of {folder}: {advice}.")
                raise
        finds_batch_size = self.trainer.args.auto_find_batch_size or self.parts.engine.finds_batch_size
        if finds_batch_size or not self.parts.policy.resumes_with_batch_size_of_arguments:
            state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
            self.run.train_batch_size = state.train_batch_size or self.run.train_batch_size

    def load_weights(self, model: nn.Module, folder: str, *, is_best: bool = False) -> None:
        """Load a checkpoint's weights into the model, sharded or not; with `is_best`, at the end of a run."""
        load = self.parts.strategy.load_best_model if is_best else self.parts.strategy.load_weights
        has_adapters = libraries.is_peft(self.parts.unwrapped_model)
        incompatible_keys = load(libraries.unwrap_compiled(model), folder, only_trainable=has_adapters)
        if incompatible_keys is not None:
            self.trainer._issue_warnings_after_load(incompatible_keys)

    def load_adapted_progress(self, folder: str | None, lengths: RunLengths) -> RunProgress | None:
        """The progress in a checkpoint, or None if we did not write it. Warns about changed arguments."""
        if folder is None:
            return None
        progress = load_progress(folder, self.trainer.args.process_index, self.trainer.args.world_size)
        state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
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
        reason = self.trainer.accelerator.processes.broadcast_from_main(lambda: resume.unloadable_reason(best_folder))
        if reason is None:
            self.trainer._load_best_model()
        else:
            logger.error("The best model cannot be loaded, so the Trainer keeps the last one: %s.", reason)
