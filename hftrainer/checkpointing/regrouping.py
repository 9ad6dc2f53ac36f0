"""Finds the state of each parameter by name, for an optimizer whose groups are others than those of the checkpoint."""

from __future__ import annotations

import inspect
import itertools
import logging
from typing import Any

import torch
from torch import nn

from hftrainer.compat.peers import bare_name

logger = logging.getLogger(__name__)

#: Attribute of an optimizer that the Trainer made with `param_groups`: the names in the order without that argument.
NAMES_WITHOUT_GROUPS = "_hftrainer_names_without_groups"
_NAMES = frozenset({"name", "param_names"})


def has_named_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the Trainer made the optimizer with `param_groups`."""
    return hasattr(optimizer, NAMES_WITHOUT_GROUPS)


def by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state with its parameters in the order and the groups of `optimizer`.

    The state itself, if it has that order already, or if neither the optimizer nor the state is of `param_groups`.

    Args:
        state: as `optimizer.state_dict()` returns it; a state without names has the order without `param_groups`.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
    """
    then, now = state["param_groups"], optimizer.param_groups
    is_named = all(group.keys() >= _NAMES for group in then)
    own = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
    if not has_named_groups(optimizer):
        # A script's own named groups are loaded by position, as torch loads them.
        is_plain = all("param_names" not in group and own.keys() >= set(map(id, group["params"])) for group in now)
        if not (is_named and is_plain):
            return state
    if is_named:
        names_then = [group["param_names"] for group in then]
    else:
        unnamed = iter(getattr(optimizer, NAMES_WITHOUT_GROUPS))
        names_then = [list(itertools.islice(unnamed, len(group["params"]))) for group in then]
    names_now = [[own[id(parameter)] for parameter in group["params"]] for group in now]
    if is_named and names_then == names_now:
        return state
    found = {
        name: (number, group)
        for names, group in zip(names_then, then, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    order = [name for names in names_now for name in names]
    if missing := [name for name in order if name not in found]:
        logger.warning("The checkpoint has no state of %s: their moments start at zero.", ", ".join(missing))
    states = {
        number: state["state"][found[name][0]]
        for number, name in enumerate(order)
        if name in found and found[name][0] in state["state"]
    }
    groups: list[dict[str, Any]] = []
    numbers = itertools.count()
    for names, group in zip(names_now, now, strict=True):
        source = next((found[name][1] for name in names if name in found), then[0])
        kept = {key: value for key, value in source.items() if key not in _NAMES}
        named = {key: group[key] for key in _NAMES if key in group}
        groups.append({**kept, **named, "params": list(itertools.islice(numbers, len(names)))})
    return {**state, "state": states, "param_groups": groups}


def take_settings(before: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, regrouped: bool) -> bool:
    """Set the groups' settings to those of the arguments, if they differ; returns whether the groups have changed.

    What an optimizer counts in its groups stays that of the checkpoint, as does how far the schedule has changed the
    learning rate.

    Args:
        before: the groups as they were made.
        optimizer: the optimizer, with the groups of the checkpoint.
        regrouped: whether the groups hold other parameters than in the checkpoint.
    """
    settings = (set(inspect.signature(type(optimizer)).parameters) & optimizer.defaults.keys()) - {"lr", "fused"}
    settings = (settings - {"foreach", "capturable", "differentiable"}) | {"initial_lr"}
    for given, group in zip(before, optimizer.param_groups, strict=True):
        group.update({key: given[key] for key in _NAMES if key in given})
        changed = {key: given[key] for key in settings if key in given and given[key] != group.get(key)}
        if "initial_lr" in changed and (first := group.get("initial_lr")):
            group["lr"] = given["initial_lr"] * (group["lr"] / first)
        elif "initial_lr" in changed or (regrouped and "initial_lr" not in given):  # of a schedule without it
            group["lr"] = given["lr"]
        group.update(changed)
        regrouped = regrouped or bool(changed)
    return regrouped


def fit_schedule(state: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """The state of a schedule, with the values that `scheduler` has for each group."""
    now = scheduler.state_dict()
    return {**state, **{key: now[key] for key in ("base_lrs", "lr_lambdas", "min_lrs", "_last_lr") if key in now}}


def follow_schedule(scheduler: Any, optimizer: torch.optim.Optimizer, *, changed: bool) -> None:
    """Set the learning rates to those of the schedule at its step.

    Args:
        scheduler: the schedule, with its state of the checkpoint.
        optimizer: its optimizer.
        changed: whether the settings of the groups have changed.
    """
    if changed and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
