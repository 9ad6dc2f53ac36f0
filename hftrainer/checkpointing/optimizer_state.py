"""Loads the states of optimizer, schedule and scaler, also into other parameter groups than they were written with."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.arguments.choices import as_text
from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.base.safe_loading import load_torch_file, projectors
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.file_checks import FRESH_OPTIMIZER, check_optimizer_state, check_value_types
from hftrainer.checkpointing.saved_arguments import read_arguments
from hftrainer.compat.libraries import bare_name
from hftrainer.errors import InvalidSetup, UnsupportedArgument
from hftrainer.optimizers.param_groups import NAMES_WITHOUT_GROUPS
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

_NAME_KEYS = frozenset({"name", "param_names"})


# ---- Loading -------------------------------------------------------------------------------------------------------


def load_optimizer_and_scheduler(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, is_sharded: bool = False
) -> None:
    """Load both states in place; log a warning if either is missing, as with `save_only_model`.

    Args:
        folder: the checkpoint.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        scheduler: its schedule.
        is_sharded: whether the model is sharded over processes; if so, all processes must call this function.
    """
    optimizer_file = os.path.join(folder, layout.OPTIMIZER_NAME)
    scheduler_file = os.path.join(folder, layout.SCHEDULER_NAME)
    shard_folder = _find_optimizer_shards(folder)
    has_full_state = layout.has_state_files(layout.FULL_STATE_FILES, "optimizer", folder)
    if not ((os.path.isfile(optimizer_file) or shard_folder or has_full_state) and os.path.isfile(scheduler_file)):
        logger.warning("%s lacks the optimizer or scheduler state: both start from scratch.", folder)
        return
    initial_groups = [dict(group) for group in optimizer.param_groups]
    is_by_name = is_sharded or has_full_state
    is_regrouped = _load_optimizer(folder, model, optimizer, sharded=is_by_name, shard_folder=shard_folder)
    if is_regrouped or has_named_groups(optimizer):
        has_changed = apply_settings(initial_groups, optimizer, is_regrouped=is_regrouped)
        load_scheduler_or_scaler(scheduler, folder, "scheduler", lambda state: adapt_schedule_state(state, scheduler))
        follow_schedule(scheduler, optimizer, has_changed=has_changed)
    else:
        if is_by_name or shard_folder:
            _check_group_count(scheduler_file, len(initial_groups))
        load_scheduler_or_scaler(scheduler, folder, "scheduler")


def _load_optimizer(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool, shard_folder: str | None
) -> bool:
    """Load the optimizer's state, and return whether its parameters were put into other groups.

    Args:
        folder: the checkpoint.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        sharded: whether the model is sharded, or the state is keyed by name.
        shard_folder: the folder of shards that holds the state, if any.
    """
    optimizer_file = os.path.join(folder, layout.OPTIMIZER_NAME)
    if sharded or shard_folder:
        # Imported late, since the module imports torch's FSDP.
        from hftrainer.checkpointing import sharded as sharded_states

        if not sharded and shard_folder and os.path.basename(shard_folder) == layout.DCP_FOLDER:
            state = sharded_states.read_dcp_optimizer(shard_folder, model, optimizer)
            _load_whole_optimizer(state, shard_folder, model, optimizer)
            return False

        def read() -> dict[str, Any]:
            saved_state = load_torch_file(optimizer_file, allowed=projectors())
            return match_by_name(saved_state, model, optimizer)

        sharded_states.load_optimizer(model, optimizer, folder, read)
        return False
    saved_state = load_torch_file(optimizer_file, allowed=projectors())
    with name_file_in_errors(optimizer_file):
        state = match_by_name(saved_state, model, optimizer)
    _load_whole_optimizer(state, optimizer_file, model, optimizer)
    return state is not saved_state


def _load_whole_optimizer(
    state: dict[str, Any], path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Check and load the state of all parameters, which was read from `path`."""
    with name_file_in_errors(path):
        check_optimizer_state(state, optimizer)
        if next(model.parameters()).device.type == "xla":
            # torch's fused optimizers do not run on XLA devices.
            for group in state["param_groups"]:
                if group.get("fused"):
                    group["fused"] = None
        optimizer.load_state_dict(state)


def explain_incompatible_state(folder: str, args: TrainingArguments, error: Exception) -> None:
    """Raise InvalidSetup if a state did not load since it was written with another `optim` or `lr_scheduler_type`."""
    path = os.path.join(folder, layout.TRAINING_ARGS_NAME)
    name = "lr_scheduler_type" if layout.SCHEDULER_NAME in str(error) else "optim"
    current = as_text(getattr(args, name))
    saved = read_arguments(path).get(name) if os.path.isfile(path) else None
    if saved not in (None, current):
        problem = f"{folder} was written with {name}={saved!r}, whose state {name}={current!r} cannot use"
        raise InvalidSetup(f"{problem}: resume with {name}={saved!r}. {FRESH_OPTIMIZER}") from error


def _check_group_count(scheduler_file: str, count: int) -> None:
    """Refuse a schedule with more than `count` groups.

    A state by parameter name does not say which group each parameter was in.

    Raises:
        UnsupportedArgument: if the schedule has more groups.
    """
    with name_file_in_errors(scheduler_file):
        saved_count = len(load_torch_file(scheduler_file).get("_last_lr") or ())
    if saved_count > count:
        raise UnsupportedArgument(
            f"{os.path.dirname(scheduler_file)} was written with {saved_count} parameter groups, but the optimizer has "
            f"{count}. A checkpoint of FSDP or of checkpoint_format='dcp' that was written with param_groups needs "
            "param_groups to resume: pass the same, or [{'pattern': '*', 'lr_scale': 1.0}], which changes nothing."
        )


def _find_optimizer_shards(folder: str) -> str | None:
    """The folder of shards that holds the optimizer's state, if any. A DCP folder may lack it."""
    shard_folder = layout.find_shard_folder("optimizer", folder)
    if shard_folder is None or os.path.basename(shard_folder) != layout.DCP_FOLDER:
        return shard_folder
    # Imported late, since the module imports torch's FSDP.
    from hftrainer.checkpointing.sharded import holds_optimizer

    return shard_folder if holds_optimizer(shard_folder) else None


#: Keys of a parameter group that are not user settings, such as how a device computes the step.
_INTERNAL_KEYS = frozenset({"params", "lr", "fused", "foreach", "capturable", "differentiable"})


def warn_about_kept_settings(initial_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Log a warning about the script's optimizer settings that the checkpoint overrides."""
    overrides: dict[str, str] = {}
    for initial, group in zip(initial_groups, optimizer.param_groups, strict=False):
        for key, value in initial.items():
            if key not in _INTERNAL_KEYS and isinstance(value, (int, float, str, tuple)) and group.get(key) != value:
                name = "learning_rate" if key == "initial_lr" else key
                overrides.setdefault(name, f"{name}={group.get(key)!r}, not {value!r}")
    if overrides:
        logger.warning(
            "The optimizer settings of the checkpoint stay in use: %s. To use yours, start without a checkpoint, or "
            "set them in optimizer.param_groups and the scheduler's base_lrs in a callback.",
            "; ".join(overrides.values()),
        )


def load_scheduler_or_scaler(target: Any, folder: str, name: str, convert: Callable[[Any], Any] | None = None) -> None:
    """Load and check the state of the "scheduler" or "scaler"; log a warning without one.

    Args:
        target: the scheduler or scaler.
        folder: the checkpoint.
        name: "scheduler" or "scaler".
        convert: converts the state before it is loaded.
    """
    path = os.path.join(folder, f"{name}.pt")
    if not os.path.isfile(path):
        logger.warning("%s lacks the %s state: the %s starts from scratch.", folder, name, name)
        return
    state = load_torch_file(path)
    with name_file_in_errors(path):
        state = state if convert is None else convert(state)
        expected = target.state_dict()
        # As in transformers, a schedule that follows a metric may continue any other.
        is_other = "factor" in expected and "lr_lambdas" in state
        check_value_types(state, {key: value for key, value in expected.items() if key in state or not is_other})
        target.load_state_dict(state)


# ---- Other parameter groups ----------------------------------------------------------------------------------------


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
    saved_groups = state["param_groups"]
    new_groups = optimizer.param_groups
    is_named = all(group.keys() >= _NAME_KEYS for group in saved_groups)
    names_by_id = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
    if not has_named_groups(optimizer):
        # Load a script's own named groups by position, as torch does.
        ids = names_by_id.keys()
        is_plain = all("param_names" not in group and ids >= set(map(id, group["params"])) for group in new_groups)
        if not (is_named and is_plain):
            return state
    saved_names = _saved_names(saved_groups, optimizer, is_named)
    new_names = [[names_by_id[id(parameter)] for parameter in group["params"]] for group in new_groups]
    if is_named and saved_names == new_names:
        return state
    saved: dict[str, tuple[int, dict[str, Any]]] = {}
    for names, group in zip(saved_names, saved_groups, strict=True):
        saved |= {name: (number, group) for name, number in zip(names, group["params"], strict=True)}
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
    for group_names, group in zip(new_names, groups, strict=True):
        source = next((saved[name][1] for name in group_names if name in saved), default)
        settings = {key: value for key, value in source.items() if key not in _NAME_KEYS}
        name_settings = {key: group[key] for key in _NAME_KEYS if key in group}
        yield {**settings, **name_settings, "params": list(itertools.islice(numbers, len(group_names)))}


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
        # Not every schedule sets `initial_lr`.
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
