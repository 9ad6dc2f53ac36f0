"""Optimizers and schedules of Keras, converted to torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.optimization_tf import CLIPPING

#: Settings that have no effect unless the features that they configure are on.
_IDLE_KEYS = {"name", "learning_rate", "ema_momentum", "ema_overwrite_frequency", "jit_compile", "is_legacy_optimizer"}
_ADAM = {"beta_1", "beta_2", "epsilon", "amsgrad", "weight_decay", "weight_decay_rate"}
_SGD = {"momentum", "nesterov", "weight_decay"}


def clip(parameters: Iterable[nn.Parameter], settings: dict[str, float]) -> None:
    """Clip gradients as a Keras optimizer with these settings does."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if (limit := settings.get("clipvalue")) is not None:
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
    if (limit := settings.get("clipnorm")) is not None:
        for gradient in gradients:
            gradient.mul_(limit / gradient.norm().clamp(min=limit))
    if gradients and (limit := settings.get("global_clipnorm")) is not None:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(limit / norm.clamp(min=limit))


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class KerasAdam(torch.optim.AdamW):
    """Adam as in Keras: it adds epsilon to the root of the moment before correcting the bias."""

    def __init__(self, params: Any, clipping: dict[str, float] | None = None, **settings: Any) -> None:
        self.clipping = clipping or {}
        super().__init__(params, **settings)

    def step(self, closure: Any = None) -> Any:
        """Take one optimizer step."""
        clip(_parameters(self), self.clipping)
        for group in self.param_groups:
            steps = group["keras_steps"] = group.get("keras_steps", 0) + 1
            group["eps"] = group.setdefault("keras_eps", group["eps"]) / math.sqrt(1 - group["betas"][1] ** steps)
        return super().step(closure)


class KerasSGD(torch.optim.Optimizer):
    """SGD as in Keras: the velocity includes the learning rate of each step."""

    def __init__(self, params: Any, clipping: dict[str, float] | None = None, **settings: Any) -> None:
        self.clipping = clipping or {}
        super().__init__(params, {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip(_parameters(self), self.clipping)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group)
        return loss

    def _update_parameter(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        parameter.mul_(1 - rate * group["weight_decay"])
        if not momentum:
            parameter.add_(gradient, alpha=-rate)
            return
        state = self.state[parameter]
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(momentum).add_(gradient, alpha=-rate)
        if group["nesterov"]:
            parameter.add_(velocity, alpha=momentum).add_(gradient, alpha=-rate)
        else:
            parameter.add_(velocity)


class KerasSchedule(torch.optim.lr_scheduler.LRScheduler):
    """A Keras schedule, or any function from completed optimizer steps to the learning rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Callable[[int], Any]) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of the next step, for each group."""
        return [float(self.schedule(self.last_epoch))] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """The position only, since each run creates the schedule."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


def to_torch(
    optimizer: Any, schedule: Any, model: nn.Module, names: dict[int, str]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Convert a TFTrainer's optimizer and schedule to torch.

    Args:
        optimizer: an optimizer of torch or Keras, or `AdamWeightDecay`.
        schedule: a torch scheduler, or a function of the steps; None for the optimizer's rate.
        model: the model to train.
        names: parameter id → name, which patterns for weight decay are matched against.

    Raises:
        UnsupportedArgument: for optimizers and settings without an equivalent in torch.
        InvalidArgument: for a schedule without an optimizer.
    """
    if optimizer is None:
        raise InvalidArgument("optimizers: there is a schedule but no optimizer. Pass both, or neither.")
    if schedule is None and not isinstance(optimizer, torch.optim.Optimizer):
        schedule = _read_rate(optimizer)
    torch_optimizer = (
        optimizer if isinstance(optimizer, torch.optim.Optimizer) else _convert_optimizer(optimizer, model, names)
    )
    # A torch optimizer without a schedule keeps its learning rate.
    if schedule is None:
        schedule = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: 1.0)
    if not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        schedule = KerasSchedule(torch_optimizer, schedule)
    return torch_optimizer, schedule


def _read_rate(optimizer: Any) -> Any:
    """The learning rate or schedule of a Keras optimizer. Public attributes show only the current value."""
    rate: Any = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        rate = getattr(optimizer, "_hyper", {}).get("learning_rate", getattr(optimizer, "learning_rate", None))
    if callable(rate) and not hasattr(rate, "numpy"):
        return rate
    value = float(rate.numpy() if hasattr(rate, "numpy") else rate)
    return lambda step: value


def _convert_optimizer(optimizer: Any, model: nn.Module, names: dict[int, str]) -> torch.optim.Optimizer:
    kind = type(optimizer).__name__
    known_keys = _ADAM if kind in ("Adam", "AdamW", "AdamWeightDecay") else _SGD if kind == "SGD" else None
    if known_keys is None or not hasattr(optimizer, "get_config"):
        raise UnsupportedArgument(
            f"optimizers: {kind} has no counterpart here. Use Keras's Adam, AdamW or SGD, AdamWeightDecay, or a torch "
            "optimizer of the model's parameters."
        )
    config = {key: value.item() if hasattr(value, "item") else value for key, value in optimizer.get_config().items()}
    unknown_keys = [
        key for key, value in config.items() if key not in known_keys | _IDLE_KEYS | set(CLIPPING) and value
    ]
    if unknown_keys:
        raise UnsupportedArgument(
            f"optimizers: {kind} with {', '.join(f'{key}={config[key]!r}' for key in unknown_keys)} has no counterpart "
            "here: remove these settings, or use a torch optimizer."
        )
    decay = config.get("weight_decay_rate") or config.get("weight_decay") or 0.0
    clipping = {key: config[key] for key in CLIPPING if config.get(key) is not None}
    groups = _make_groups(optimizer, model, names, decay)
    if known_keys is _SGD:
        return KerasSGD(groups, clipping, momentum=config["momentum"], nesterov=config["nesterov"])
    betas = (config["beta_1"], config["beta_2"])
    # The scheduler sets the learning rate.
    return KerasAdam(groups, clipping, lr=1.0, betas=betas, eps=config["epsilon"], amsgrad=bool(config["amsgrad"]))


def _make_groups(optimizer: Any, model: nn.Module, names: dict[int, str], decay: float) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay, by the optimizer's patterns."""
    included_patterns = getattr(optimizer, "_include_in_weight_decay", None) or []
    excluded_patterns = list(getattr(optimizer, "_exclude_from_weight_decay", None) or [])
    # Keras stores the ids of variables.
    if any(not isinstance(pattern, str) for pattern in excluded_patterns):
        raise UnsupportedArgument("exclude_from_weight_decay: torch does not know Keras variables; use var_names.")
    if (pattern := getattr(optimizer, "_exclude_from_weight_decay_pattern", None)) is not None:
        excluded_patterns.append(pattern.pattern)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for pattern in included_patterns:
        if not any(re.search(pattern, names[id(parameter)]) for parameter in parameters):
            raise InvalidArgument(
                f"include_in_weight_decay: {pattern!r} is in no parameter's name. Use torch's names, such "
                f"as {names[id(parameters[0])]!r}."
            )

    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    for parameter in parameters:
        name = names[id(parameter)]
        has_decay = any(re.search(pattern, name) for pattern in included_patterns) or not any(
            re.search(pattern, name) for pattern in excluded_patterns
        )
        groups[0 if has_decay else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]
