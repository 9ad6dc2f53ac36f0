"""Optimizer names, and the parameter groups that they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hftrainer.errors import UnsupportedArgument
from hftrainer.trainer_pt_utils import get_parameter_names
from hftrainer.trainer_utils import OptimizerNames
from hftrainer.training_args import TrainingArguments

#: Weight decay never applies to parameters whose lower-cased names match one of these, nor to `nn.LayerNorm`.
NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay applies to."""
    return get_parameter_names(model, [nn.LayerNorm], NO_DECAY)


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: with weight decay and without."""
    names = set(decayed)
    trainable = [(name in names, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for decays, parameter in trainable if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in trainable if not decays], "weight_decay": 0.0},
    ]


def _adamw(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    kwargs: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        kwargs["fused"] = True
    return torch.optim.AdamW, kwargs


#: Optimizer name → its class and keywords, from the arguments.
OPTIMIZERS: dict[str, Callable[[TrainingArguments], tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw,
}


def optimizer_cls_and_kwargs(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and keywords of the optimizer that `args.optim` names.

    Raises:
        UnsupportedArgument: for an optimizer that this release does not have.
    """
    name = OptimizerNames(args.optim).value
    if name not in OPTIMIZERS:
        raise UnsupportedArgument(
            f"optim={name!r} is not supported yet: use one of {', '.join(OPTIMIZERS)}, or pass "
            "optimizer_cls_and_kwargs=(class, keywords) or optimizers=(optimizer, scheduler)."
        )
    return OPTIMIZERS[name](args)
