"""`ModelPruning` in a checkpoint: the saved weights are pruned, training continues with the unmasked ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch.nn.utils import prune

from hftrainer_lightning import private_api


def keep_pruning(pruning: ModelPruning, module: torch.nn.Module) -> dict[str, Any]:
    """The state for a resumed run: masks, the values that they hide, and the values before training."""
    first_values = [layer["data"].state_dict() for layer in private_api.first_layers(pruning)]
    return {"masks": _masks(module), "first_values": first_values}


def restore_pruning(pruning: ModelPruning, module: torch.nn.Module, kept: Mapping[str, Any]) -> None:
    """Restore what `keep_pruning` returned, after the callback's `setup`."""
    _put_masks(module, kept["masks"])
    _restore_first_values(pruning, kept["first_values"])


def _restore_first_values(pruning: ModelPruning, first_values: Sequence[Any]) -> None:
    for layer, values in zip(private_api.first_layers(pruning), first_values, strict=True):
        layer["data"].load_state_dict(values)
        for index, name in layer["names"]:
            first = getattr(layer["data"], name)
            live = getattr(private_api.pruned_module(pruning, index), f"{name}_orig", None)
            if live is not None and torch.equal(first, live):
                # After Lightning has reset weights to them, it trains on their storage, so training changes them too.
                first.data = live.data


def _masks(module: torch.nn.Module) -> dict[str, Any]:
    """The masks of pruned parameters, and the unmasked values, with which training continues."""
    return {
        name: {"mask": mask, "original": module.get_parameter(f"{name}_orig").data}
        for buffer, mask in module.named_buffers()
        if (name := buffer.removesuffix("_mask")) != buffer and f"{name}_orig" in dict(module.named_parameters())
    }


def _put_masks(module: torch.nn.Module, masks: Mapping[str, Any]) -> None:
    for path, saved in masks.items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        prune.custom_from_mask(owner, name, saved["mask"])
        getattr(owner, f"{name}_orig").data.copy_(saved["original"])
