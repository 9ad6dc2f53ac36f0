"""GaLore and APOLLO, which project the gradients of selected linear layers to a lower rank.

The layer-wise variants step each parameter during backward, as soon as its gradient is ready, and free the gradient.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


def make_arguments(
    name: str,
    args: TrainingArguments,
    model: nn.Module | None,
    optimizer_class: Any,
    projection: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Class and keyword arguments of a low-rank optimizer, including its parameter groups.

    Args:
        name: the optimizer's name; those ending in 'layerwise' step each parameter during backward.
        args: the training arguments; `optim_target_modules` names the layers.
        model: the model.
        optimizer_class: the optimizer's class.
        projection: settings of the parameter group whose gradients are projected.
        kwargs: keyword arguments of the optimizer.

    Raises:
        InvalidArgument: without a model or a matching layer, or for gradient accumulation with a layer-wise optimizer.
        UnsupportedArgument: for a layer-wise optimizer in several processes.
    """
    if model is None:
        raise InvalidArgument(f"optim={name!r} needs the model, to find its layers: pass model=.")
    targets = find_target_weights(name, args.optim_target_modules, model)
    named_parameters = list(model.named_parameters())
    other_parameters = [parameter for parameter_name, parameter in named_parameters if parameter_name not in targets]
    projected_parameters = [parameter for parameter_name, parameter in named_parameters if parameter_name in targets]
    groups = [{"params": other_parameters}, {"params": projected_parameters, **projection}]
    if not name.endswith("layerwise"):
        return optimizer_class, {**kwargs, "params": groups}
    if args.gradient_accumulation_steps != 1:
        raise InvalidArgument(
            f"optim={name!r} steps during each backward pass, so gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} is not possible: set it to 1."
        )
    if args.world_size > 1:
        raise UnsupportedArgument(
            f"optim={name!r} steps before the gradients are all-reduced: use optim={name.removesuffix('_layerwise')!r}."
        )
    optimizers = {parameter: optimizer_class([{"params": [parameter]}], **kwargs) for parameter in other_parameters}
    for parameter in projected_parameters:
        optimizers[parameter] = optimizer_class([{"params": [parameter], **projection}], **kwargs)
    return LayerWiseDummyOptimizer, {**kwargs, "optimizer_dict": optimizers}


def find_target_weights(name: str, targets: Any, model: nn.Module) -> set[str]:
    """Weight names of the linear layers that `optim_target_modules` selects.

    Args:
        name: the optimizer's name, for errors.
        targets: 'all-linear', a regular expression for a layer's full name, or a list of substrings or regular
            expressions.
        model: the model to search.
    """
    if not isinstance(targets, (str, list)) or not targets:
        raise InvalidArgument(
            f"optim={name!r} needs optim_target_modules, the layers whose gradients are projected: 'all-linear', a "
            f"regular expression, or a list of names; got {targets!r}."
        )
    is_all_linear = isinstance(targets, str) and targets.replace("_", "-") == "all-linear"
    weight_names = set()
    for module_name, module in model.named_modules():
        matches_name, matches_pattern = _matches(targets, module_name)
        if isinstance(module, nn.Linear) and (is_all_linear or matches_name or matches_pattern):
            weight_names.add(f"{module_name}.weight")
        elif matches_name and not isinstance(module, nn.Linear):
            logger.warning("optim_target_modules: %s is not a linear layer and is ignored.", module_name)
    if not weight_names:
        raise InvalidArgument(f"optim_target_modules={targets!r} matches no linear layer of {type(model).__name__}.")
    return weight_names


def _matches(targets: str | list[str], name: str) -> tuple[bool, bool]:
    """Whether a layer's name matches literally, and whether it matches as a regular expression."""
    if isinstance(targets, str):
        return targets == name, bool(re.fullmatch(targets, name))
    return any(part in name for part in targets), any(re.fullmatch(part, name) for part in targets)


class LayerWiseDummyOptimizer(Optimizer):
    """Represents one optimizer per parameter, with a `step` that does nothing.

    The learning rate is copied to all these optimizers, so that a scheduler only has to change this one.

    Args:
        optimizer_dict: the optimizer of each parameter.
        lr: the learning rate.
        kwargs: the keyword arguments of the optimizers.
    """

    def __init__(
        self, optimizer_dict: dict[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **kwargs: Any
    ) -> None:
        self.optimizer_dict = optimizer_dict or {}
        # torch needs a parameter. It is random, as in transformers, so that later random draws are the same.
        super().__init__([torch.randn(1, 1)], {"lr": lr})
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._update_parameter)
            for parameter in self.optimizer_dict
            if parameter.requires_grad
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks that step the parameters, before another optimizer takes over."""
        for hook in self._hooks:
            hook.remove()

    def _update_parameter(self, parameter: nn.Parameter) -> None:
        optimizer = self.optimizer_dict[parameter]
        for group in optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each gradient is cleared right after its step."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing: every parameter was updated during backward."""

    def state_dict(self) -> dict[str, Any]:
        """The state, including that of each parameter's optimizer in the order of the parameters."""
        layers = [optimizer.state_dict() for optimizer in self.optimizer_dict.values()]
        return {**super().state_dict(), "layers": layers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. States written by transformers lack those of the parameters' optimizers."""
        layers = state_dict.get("layers")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "layers"})
        if layers is None:
            logger.warning("The checkpoint lacks the states of the layer-wise optimizers: their moments start at zero.")
            return
        for optimizer, state in zip(self.optimizer_dict.values(), layers, strict=True):
            optimizer.load_state_dict(state)
