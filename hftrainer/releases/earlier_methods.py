"""Trainer methods that transformers has removed. Scripts and libraries still call or override them."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from hftrainer.base.nested import nested_numpify
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.layout import checkpoints_newest_first, sort_checkpoints
from hftrainer.checkpointing.run_checkpoints import rotate_checkpoints
from hftrainer.errors import InvalidSetup, UnsupportedArgument
from hftrainer.model.apply_arguments import add_noise_to_embeddings
from hftrainer.training_args import TrainingArguments


class EarlierMethods:
    """Mixin of `Trainer` with the methods that transformers has removed. It declares the attributes that they use."""

    args: TrainingArguments
    state: TrainerState
    accelerator: Any
    neftune_noise_alpha: float | None
    # The NEFTune hook of a run; remains set after the hook is removed.
    neftune_hook_handle: Any
    is_in_train: bool
    is_deepspeed_enabled: bool
    _hftrainer: Any

    # ---- Training ----------------------------------------------------------------------------------------------

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Add NEFTune's noise to the embeddings (v4.35 to v5.0); a run calls this if `neftune_noise_alpha` is set."""
        if self.neftune_noise_alpha is None:
            raise InvalidSetup("_activate_neftune() needs the scale of the noise: set neftune_noise_alpha.")
        self.neftune_hook_handle = add_noise_to_embeddings(model, self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Remove NEFTune's noise (v4.35 to v5.0)."""
        if getattr(self, "neftune_hook_handle", None) is None:
            raise InvalidSetup("_deactivate_neftune() finds no noise to remove: call _activate_neftune() first.")
        self.neftune_hook_handle.remove()

    def propagate_args_to_deepspeed(self, auto_find_batch_size: bool = False) -> None:
        """Fill in DeepSpeed's configuration again after the arguments changed (v4.37 to v5.0).

        Raises:
            InvalidSetup: without DeepSpeed, and during training.
            UnsupportedArgument: for `auto_find_batch_size`, as for the argument of that name.
        """
        if not self.is_deepspeed_enabled or self.is_in_train:
            reason = "works only before training" if self.is_deepspeed_enabled else "needs the argument deepspeed"
            raise InvalidSetup(f"propagate_args_to_deepspeed() {reason}.")
        if auto_find_batch_size:
            raise UnsupportedArgument(
                "propagate_args_to_deepspeed(auto_find_batch_size=True): DeepSpeed's engine cannot be restarted with "
                "another batch size: set per_device_train_batch_size, and 'auto' in the configuration."
            )
        self._hftrainer.trainer_setup.rebuild_from_arguments()

    # ---- Evaluation --------------------------------------------------------------------------------------------

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Rows gathered from all ranks, or None for None (until v5.0).

        Args:
            tensors: tensors in nested containers.
            name: their name, for messages.
        """
        return None if tensors is None else self.accelerator.gather(tensors)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """Rows gathered from all ranks, as arrays (until v4.57); the arguments are those of `_nested_gather`."""
        return nested_numpify(self._nested_gather(tensors, name))

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Rows padded with `pad_index` to the longest of all ranks (until v4.30)."""
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Delete checkpoints beyond `save_total_limit` (until v5.0). The Trainer calls only an override.

        Args:
            use_mtime: whether to order by modification time, rather than by steps.
            output_dir: the folder of the checkpoints; None means `args.output_dir`.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        newest, best = self._hftrainer.run.attempt.checkpoints_written[-1:], self.state.best_model_checkpoint
        checkpoints = self._sorted_checkpoints(use_mtime=use_mtime, output_dir=folder)
        rotate_checkpoints(folder, self.args.save_total_limit, best, newest, checkpoints)

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = layout.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """The checkpoint folders, oldest first (until v5.0); the arguments are those of `_rotate_checkpoints`."""
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        checkpoints = sort_checkpoints(folder) if use_mtime else list(checkpoints_newest_first(folder))[::-1]
        return [path for path in checkpoints if os.path.basename(path).startswith(f"{checkpoint_prefix}-")]
