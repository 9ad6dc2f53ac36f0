"""Restarts training from the last checkpoint, or from a copy of the run's initial state."""

from __future__ import annotations

import copy
import gc
import logging
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.choices import as_text
from hftrainer.base.messages import count_of, tell
from hftrainer.base.nested import nested_apply
from hftrainer.base.part import Part
from hftrainer.callbacks.handler import restore_callbacks
from hftrainer.callbacks.progress_bar import close_bars
from hftrainer.callbacks.state import export_states
from hftrainer.data.randomness import rng_state, set_rng_state
from hftrainer.errors import InvalidArgument, TrainingDiverged, UnsupportedArgument
from hftrainer.model.inspection import clear_gradients
from hftrainer.optimizers.low_rank import LayerWiseDummyOptimizer
from hftrainer.parallel import devices
from hftrainer.training.divergence import DivergedStep, SkippedSamples

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)


class InitialStateSnapshot:
    """A CPU copy of a run's initial state: trained weights, buffers, random states, and what the script passes.

    Frozen weights, which are most of a model with adapters, are not copied.

    Args:
        trainer: the Trainer, before the first attempt. The state includes its loss scaler, if it has one, and the
            script's optimizer and scheduler, if it passed them. LOMO is refused, since its hooks cannot be
            removed from the model for a restart.
    """

    def __init__(self, trainer: Trainer) -> None:
        if (optim := as_text(trainer.args.optim)) in ("lomo", "adalomo"):
            raise InvalidArgument(
                f"optim={optim!r} leaves hooks in the model that cannot be removed for a restart: "
                "set per_device_train_batch_size instead of auto_find_batch_size, and remove on_divergence."
            )
        self._model = trainer.model
        self._tensors = {name: _to_cpu(tensor) for name, tensor in self._tensors_to_restore().items()}
        self._scaler = trainer.accelerator.scaler
        self._scaler_state = None if self._scaler is None else self._scaler.state_dict()
        self._optimizer_states = [
            (optimizer, nested_apply(_to_cpu, optimizer.state_dict()))
            for optimizer in (trainer.optimizer, trainer.lr_scheduler)
            if optimizer is not None
        ]
        self.callback_states = copy.deepcopy(export_states(trainer._hftrainer.stateful_callbacks()))
        self._rng_state = rng_state()
        # The model may be on several devices.
        if torch.cuda.is_available():
            self._rng_state["cuda"] = torch.cuda.get_rng_state_all()

    def _tensors_to_restore(self) -> dict[str, torch.Tensor]:
        weights = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        return {**weights, **dict(self._model.named_buffers())}

    def restore(self) -> None:
        """Copy the initial state back into the model, optimizer, scheduler and scaler.

        Raises:
            UnsupportedArgument: if weights have been unfrozen or added since the copy.
        """
        if new_names := self._tensors_to_restore().keys() - self._tensors.keys():
            raise UnsupportedArgument(
                f"The run cannot return to its start, since {min(new_names)!r} has been unfrozen or added since: save "
                "a checkpoint earlier, or remove auto_find_batch_size."
            )
        with torch.no_grad():
            for name, tensor in self._tensors_to_restore().items():
                tensor.copy_(self._tensors[name])
        clear_gradients(self._model)
        for owner, state in self._optimizer_states:
            owner.load_state_dict(nested_apply(_to_cpu, state))
        if self._scaler is not None and self._scaler_state is not None:
            # Initialize the scaler, if that has not been done yet, and discard the state of the failed step.
            self._scaler.scale(next(self._model.parameters()).new_zeros(()))
            self._scaler.update(self._scaler_state["scale"])
            self._scaler.load_state_dict(self._scaler_state)
        set_rng_state(self._rng_state)


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


class Restarts(Part):
    """Restarts the training of a run, and releases the objects of the previous attempt."""

    def read_skips_and_copy_state(self, trial: Any) -> None:
        """Read which samples the run skips, and copy its initial state if it may restart from that."""
        args = self.trainer.args
        self.run.has_rolled_back = False
        skips = args.on_divergence is not None
        self.run.skipped_samples = SkippedSamples(self.trainer, trial, self.run.resume_folder) if skips else None
        has_no_checkpoint = self.run.resume_folder is None and not self.parts.strategy.shards_model
        needs_start = args.auto_find_batch_size or (args.on_divergence == "rollback" and has_no_checkpoint)
        self.run.initial_state = InitialStateSnapshot(self.trainer) if needs_start else None

    def roll_back(self, diverged_step: DivergedStep, optimizers: tuple[Any, Any]) -> None:
        """Return to the last checkpoint, or else to the initial state, after a step diverged."""
        assert self.run.skipped_samples is not None
        initial_state = self.run.initial_state
        self.run.has_rolled_back = True
        self.parts.checkpoint_saver.wait_for_save()
        processes = self.trainer.accelerator.processes
        mirror = self.parts.storage_sync.mirror
        if mirror is not None:
            processes.run_on_main(mirror.wait)
        resume_folder: str | None = processes.broadcast_from_main(self.parts.checkpoint_saver.last_checkpoint)
        message = self.run.skipped_samples.add_diverged_step(diverged_step, resume_folder)
        if mirror is not None:
            processes.run_on_main(mirror.upload_files)
        if resume_folder is None and initial_state is None:
            raise TrainingDiverged(
                f"{message}, but no checkpoint exists yet, and the initial state of a sharded model is not copied: "
                "save earlier, with a smaller save_steps."
            )
        if self.trainer.is_world_process_zero():
            tell(f"{message}. Training continues from {resume_folder or 'the start of the run'}.")
        close_bars(self.trainer.callback_handler.callbacks)
        clear_gradients(self.trainer.model_wrapped)
        self._end_attempt("rolled back", optimizers)
        if (scaler := self.trainer.accelerator.scaler) is not None:
            # End the scaler's step, which the optimizer did not make.
            scaler.update(scaler.get_scale())
        if resume_folder is not None:
            self.parts.checkpoint_restorer.load_weights_and_batch_size(resume_folder)
        elif initial_state is not None:
            initial_state.restore()
            handler = self.trainer.callback_handler
            states = initial_state.callback_states
            self.trainer.control = restore_callbacks(handler, self.trainer.control, states)
        self.run.resume_folder = resume_folder

    def halve_batches(self, optimizers: tuple[Any, Any]) -> None:
        """Discard the optimizer, hooks and checkpoints of a failed attempt, and restore the initial state."""
        initial_state = self.run.initial_state
        assert initial_state is not None
        self.run.train_batch_size //= 2
        logger.warning("Out of memory: restarting with %s in a batch.", count_of(self.run.train_batch_size, "samples"))
        self._end_attempt("out of memory", optimizers)
        self.parts.storage_sync.discard_checkpoints(self.run.attempt.checkpoints_written)
        initial_state.restore()

    def _end_attempt(self, reason: str, optimizers: tuple[Any, Any]) -> None:
        """Release the objects of an attempt, and set the optimizer and scheduler from before it."""
        if self.run.loop is not None:
            self.run.loop.close(reason)
        self.release_optimizer()
        self.trainer.optimizer, self.trainer.lr_scheduler = optimizers
        gc.collect()
        devices.empty_cache()

    def release_optimizer(self) -> None:
        """Release a run's optimizer with its hooks, and Lightning's objects that hold it."""
        handler = self.trainer.callback_handler
        if isinstance(self.trainer.optimizer, LayerWiseDummyOptimizer):
            self.trainer.optimizer.remove_hooks()
        self.parts.engine.pl_trainer = self.parts.engine.pl_module = None
        self.trainer.optimizer = self.trainer.lr_scheduler = None
        handler.optimizer = handler.lr_scheduler = None
        self.parts.checkpoint_writer.close_ignoring_errors()
