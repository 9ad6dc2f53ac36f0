"""Matches an optimizer's state to other parameter groups, by the names of the parameters."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.compat.libraries import bare_name
from hftrainer.optimizers.param_groups import NAMES_WITHOUT_GROUPS

logger = logging.getLogger(__name__)

_NAME_KEYS = frozenset({"name", "param_names"})


def has_named_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the Trainer built the optimizer with `param_groups`."""
    return hasattr(optimizer, NAMES_WITHOUT_GROUPS)


def match_by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state with its parameters in the order and the groups of `optimizer`.

    Returns `state` itself if it has that order, or if neither it nor the optimizer was built with `param_groups`.

    Args:
        state: as `optimizer.state_dict()` returns it; a state without names has the order without `param_groups`.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
    """
    saved_groups, new_groups = state["param_groups"], optimizer.param_groups
    is_named = all(group.keys() >= _NAME_KEYS for group in saved_groups)
    names_by_id = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
    if not has_named_groups(optimizer):
        # Load a script's own named groups by position, as torch does.
        is_plain = all(
            "param_names" not in group and names_by_id.keys() >= set(map(id, group["params"])) for group in new_groups
        )
        if not (is_named and is_plain):
            return state
    saved_names = _saved_names(saved_groups, optimizer, is_named)
    new_names = [[names_by_id[id(parameter)] for parameter in group["params"]] for group in new_groups]
    if is_named and saved_names == new_names:
        return state
    saved = {
        name: (number, group)
        for names, group in zip(saved_names, saved_groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    numbers = {name: number for name, (number, _) in saved.items()}
    states = _renumber(state["state"], numbers, list(itertools.chain(*new_names)))
    return {**state, "state": states, "param_groups": list(_regroup(saved, new_names, new_groups, saved_groups[0]))}


def _saved_names(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, is_named: bool) -> list[list[str]]:
    """The names of the parameters in each saved group."""
    if is_named:
        return [group["param_names"] for group in groups]
    all_names = iter(getattr(optimizer, NAMES_WITHOUT_GROUPS))
    return [list(itertools.islice(all_names, len(group["params"]))) for group in groups]


def _renumber(states: dict[int, Any], numbers: dict[str, int], order: list[str]) -> dict[int, Any]:
    """The states of the parameters in `order`. `numbers` has the number of each in `states`."""
    if missing_names := [name for name in order if name not in numbers]:
        logger.warning("The checkpoint has no optimizer state for %s: it starts from zero.", ", ".join(missing_names))
    saved_numbers = [numbers.get(name) for name in order]
    return {new: states[number] for new, number in enumerate(saved_numbers) if number in states}


def _regroup(saved: dict[str, Any], new_names: list[list[str]], groups: Any, default: Any) -> Iterator[dict[str, Any]]:
    """The new groups, each with the settings of the saved group that held its parameters, or else of the default."""
    numbers = itertools.count()
    for names, group in zip(new_names, groups, strict=True):
        source = next((saved[name][1] for name in names if name in saved), default)
        settings = {key: value for key, value in source.items() if key not in _NAME_KEYS}
        name_settings = {key: group[key] for key in _NAME_KEYS if key in group}
        yield {**settings, **name_settings, "params": list(itertools.islice(numbers, len(names)))}


def apply_settings(
    initial_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, is_regrouped: bool
) -> bool:
    """Set the groups' settings to those of the arguments. Returns whether the groups have changed.

    The counters in the groups stay those of the checkpoint, and so does the schedule's factor on the learning rate.

    Args:
        initial_groups: the groups as built from the arguments.
        optimizer: the optimizer, with the groups of the checkpoint.
        is_regrouped: whether the groups hold other parameters than in the checkpoint.
    """
    settings = (set(inspect.signature(type(optimizer)).parameters) & optimizer.defaults.keys()) - {"lr", "fused"}
    settings = (settings - {"foreach", "capturable", "differentiable"}) | {"initial_lr"}
    for initial, group in zip(initial_groups, optimizer.param_groups, strict=True):
        group.update({key: initial[key] for key in _NAME_KEYS if key in initial})
        changes = {key: initial[key] for key in settings if key in initial and initial[key] != group.get(key)}
        if "initial_lr" in changes and (saved_lr := group.get("initial_lr")):
            group["lr"] = initial["initial_lr"] * (group["lr"] / saved_lr)
        # A schedule may lack `initial_lr`.
        elif "initial_lr" in changes or (is_regrouped and "initial_lr" not in initial):
            group["lr"] = initial["lr"]
        group.update(changes)
        is_regrouped = is_regrouped or bool(changes)
    return is_regrouped


def adapt_schedule_state(state: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """The state of a schedule, with the values that `scheduler` has for each group."""
    values = scheduler.state_dict()
    return {**state, **{key: values[key] for key in ("base_lrs", "lr_lambdas", "min_lrs", "_last_lr") if key in values}}


def follow_schedule(scheduler: Any, optimizer: torch.optim.Optimizer, *, has_changed: bool) -> None:
    """Set the learning rates to those of the schedule at its current step.

    Args:
        scheduler: the schedule, with its state from the checkpoint.
        optimizer: its optimizer.
        has_changed: whether the settings of the groups have changed.
    """
    if has_changed and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
