"""Whether the contents of a checkpoint's file can be those of this run, before they are used.

Their errors would otherwise come later, in a step of training, from where nothing leads to the file.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

_NUMBERS = (int, float, torch.Tensor)
#: Kinds of values that None does not replace.
_NEEDED = (*_NUMBERS, list, tuple)
#: What Adam keeps of each parameter that it has stepped.
_OF_ADAM = {"step", "exp_avg", "exp_avg_sq"}
#: Settings of optimizers in each release of torch; others were added, and have defaults.
_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}


def check_values(found: Any, now: Any, name: str = "the state") -> None:
    """Check that plain values have the types of those that they replace; nothing is said of further ones.

    Raises:
        TypeError: names the value.
    """
    if isinstance(now, Mapping):
        if not isinstance(found, Mapping):
            raise TypeError(f"{name} is {reprlib.repr(found)}")
        if missing := [key for key in now if key not in found]:
            raise TypeError(f"{name} lacks {missing[0]!r}")
        for key, value in now.items():
            check_values(found[key], value, str(key))
    elif not _like(found, now):
        raise TypeError(f"{name} is {reprlib.repr(found)}, not such as {reprlib.repr(now)}")


def _like(found: Any, now: Any) -> bool:
    if now is None or (found is None and (isinstance(now, bool) or not isinstance(now, _NEEDED))):  # such as `fused`
        return not isinstance(found, torch.Tensor) or found.numel() == 1
    if isinstance(now, list):  # of parameter groups, which callbacks add to
        enough = isinstance(found, (list, tuple)) and len(found) >= len(now)
        return enough and all(_like(each, now[0]) for each in found if now)
    if isinstance(now, tuple):
        same = isinstance(found, (list, tuple)) and len(found) == len(now)
        return same and all(_like(one, each) for one, each in zip(found, now, strict=True))
    if isinstance(now, _NUMBERS) and not isinstance(now, bool):
        return isinstance(found, _NUMBERS) and (not isinstance(found, torch.Tensor) or found.numel() == 1)
    return isinstance(found, type(now))


def check_optimizer_state(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check settings and tensors of an optimizer's state.

    Tensors of Adam and SGD have the shape of their parameter, but for the steps; those of others are not known.

    Raises:
        TypeError, KeyError, ValueError: for what cannot be a state of this optimizer.
    """
    groups = state["param_groups"]
    for saved, group in zip(groups, optimizer.param_groups, strict=False):
        check_values(saved, {key: value for key, value in group.items() if key in saved and key != "params"})
        if missing := (_SETTINGS & group.keys()) - saved.keys():
            raise KeyError(f"param_groups lacks {min(missing)}, as after a change of optim")
        if saved.get("fused") and saved.get("differentiable"):
            raise ValueError("param_groups has fused and differentiable")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    of_torch = type(optimizer).__module__.startswith("torch.optim.adam") or isinstance(optimizer, torch.optim.SGD)
    if not of_torch:
        return
    for index, parameter in zip(indices, parameters, strict=False):
        for name, value in state["state"].get(index, {}).items():
            _check_moment(name, value, parameter)
    for group in groups:
        _check_names([state["state"].get(index) for index in group["params"]], group, optimizer)


def _check_names(states: list[dict[str, Any] | None], group: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check that all parameters of a group that have a state have the same, and what Adam needs."""
    kept = [state.keys() for state in states if state]
    if any(names != kept[0] for names in kept):
        raise KeyError("the states of some parameters lack what others have")
    needed = _OF_ADAM | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    if kept and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and (missing := needed - kept[0]):
        raise KeyError(f"the states lack {min(missing)}")


def _check_moment(name: str, value: Any, parameter: torch.Tensor) -> None:
    """Fused kernels do not compare shapes: a wrong one is a segmentation fault."""
    if name == "step":
        check_values(value, 0, name)
    elif isinstance(value, torch.Tensor) and value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
    elif not isinstance(value, torch.Tensor) and (value is not None or name != "momentum_buffer"):  # SGD's first step
        raise TypeError(f"{name} is {reprlib.repr(value)}")
