"""The parameter groups that `param_groups` selects by name, and the learning rates of layer-wise decay."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from hftrainer.arguments.checks.param_group_entries import OWN_KEYS, patterns_of
from hftrainer.base.messages import count_of
from hftrainer.compat import libraries
from hftrainer.compat.libraries import bare_name
from hftrainer.errors import suggest

#: Attribute of optimizers built with `param_groups`: the parameter names in the order without that argument.
NAMES_WITHOUT_GROUPS = "_hftrainer_names_without_groups"
_FLAT = "FSDP1 has flattened the parameters: set fsdp_config['use_orig_params']=True, or use FSDP2."


def select_groups(
    model: nn.Module, decayed_names: list[str], entries: list[dict[str, Any]], learning_rate: float, weight_decay: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """The parameter groups of the entries, and the errors in the entries.

    A parameter joins the first entry that matches; those without an entry are in no group.

    Args:
        model: the model, wrapped or not.
        decayed_names: names of the parameters with weight decay, for entries that do not set it.
        entries: the entries, as `check_entries` accepts them.
        learning_rate: the learning rate of entries without `lr`.
        weight_decay: the weight decay of entries that do not set it.
    """
    named_parameters = {bare_name(name): parameter for name, parameter in model.named_parameters()}
    decayed = {bare_name(name) for name in decayed_names}
    remaining = [name for name, parameter in named_parameters.items() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    errors: list[str] = []
    for number, entry in enumerate(entries):
        patterns = patterns_of(entry)
        matching = [name for name in remaining if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        problems = list(_find_unmatched(patterns, named_parameters, matching))
        scales: dict[str, tuple[str, float]] = {}
        if "layer_decay" in entry and not problems:
            stacks = find_stacks(model, matching)
            problems += _check_stacks(stacks, model)
            scales = layer_scales(model, stacks, entry["layer_decay"], matching)
        errors += [f"param_groups[{number}]: {problem}" for problem in problems]
        remaining = [name for name in remaining if name not in matching]
        parameters = {name: named_parameters[name] for name in matching}
        groups += _make_groups(entry, parameters, scales, decayed, learning_rate, weight_decay)
    return groups, errors


def _make_groups(
    entry: dict[str, Any],
    parameters: dict[str, nn.Parameter],
    scales: dict[str, tuple[str, float]],
    decays: set[str],
    learning_rate: float,
    weight_decay: float,
) -> Iterator[dict[str, Any]]:
    """An entry's groups of `parameters`: one for each part, scale and weight decay."""
    parts: dict[tuple[str, float, float], list[str]] = {}
    for name in parameters:
        part, scale = scales.get(name, ("", 1.0))
        decay = entry.get("weight_decay", weight_decay if name in decays else 0.0)
        label = part if "weight_decay" in entry or name in decays else f"{part} no decay"
        parts.setdefault((label.strip(), scale, decay), []).append(name)
    settings = {key: value for key, value in entry.items() if key not in OWN_KEYS}
    # The first group's learning rate is logged, so the head's group comes first.
    for (label, scale, decay), names in sorted(parts.items(), key=lambda part: (-part[0][1], -part[0][2])):
        group_rate = entry.get("lr", learning_rate * entry.get("lr_scale", 1.0)) * scale
        title = " | ".join(patterns_of(entry)) + (f" ({label})" if label else "")
        params = [parameters[name] for name in names]
        yield {**settings, "params": params, "lr": group_rate, "weight_decay": decay, "name": title}


def _find_unmatched(
    patterns: list[str], named_parameters: dict[str, nn.Parameter], matching: list[str]
) -> Iterator[str]:
    """An error for each pattern that selects nothing."""
    for pattern in patterns:
        matches = fnmatch.filter(named_parameters, pattern)
        if not matches and any("_flat_param" in name for name in named_parameters):
            yield f"{pattern!r} matches no parameter of the model. {_FLAT}"
        elif not matches:
            parts = dict.fromkeys(part for name in named_parameters for part in name.split("."))
            example = f", such as {next(iter(named_parameters))!r}."
            suggestion = suggest(pattern, named_parameters, suggest(pattern.strip("*."), parts, example))
            advice = "See model.named_parameters() for the names."
            yield f"{pattern!r} matches no parameter of the model{suggestion} {advice}"
        elif not any(named_parameters[name].requires_grad for name in matches):
            yield f"{pattern!r} matches only frozen parameters: remove it, or set requires_grad=True."
        elif not set(matches) & set(matching):
            yield f"{pattern!r} matches only parameters that earlier entries select: move it up, or remove it."


def find_stacks(model: nn.Module, names: list[str]) -> dict[str, int]:
    """Name prefix of each stack of layers → number of its layers.

    Args:
        model: the model.
        names: names of parameters; stacks without any of them are left out.
    """
    lists = {f"{bare_name(name)}.": part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    stacks: dict[str, int] = {}
    deep_stacks: dict[str, int] = {}
    for prefix, layers in lists.items():
        # Ignore lists inside a layer, such as those of experts.
        is_inner = any(prefix.startswith(other) for other in lists if other != prefix)
        if is_inner or not any(name.startswith(prefix) for name in names):
            continue
        stacks[prefix] = len(layers)
        if any(list(layer.children()) for layer in layers):
            deep_stacks[prefix] = len(layers)
    # Prefer lists whose items have submodules, unlike a list of plain heads.
    return deep_stacks or stacks


def _tower(stack: str, stacks: dict[str, int]) -> str:
    """Prefix of the largest module without another stack, such as an encoder or a decoder."""
    starts = itertools.accumulate(stack.split(".")[:-1], lambda start, part: f"{start}{part}.", initial="")
    return next(start for start in starts if not any(other.startswith(start) for other in stacks if other != stack))


def _check_stacks(stacks: dict[str, int], model: nn.Module) -> Iterator[str]:
    """An error if the layers cannot be identified."""
    if not stacks:
        yield (
            f"layer_decay finds no layers: {type(model).__name__} has no ModuleList of trained layers. Use an "
            "entry with lr_scale for each layer."
        )
    if len({*stacks.values()}) > 1:
        listed = ", ".join(f"{count} in {name[:-1]}" for name, count in stacks.items())
        towers = " and ".join(repr(f"{_tower(name, stacks)}*") for name in stacks)
        advice = f"use an entry for each, with {towers} as patterns."
        yield f"layer_decay finds stacks of different lengths, {listed}: {advice}"


def layer_scales(
    model: nn.Module, stacks: dict[str, int], decay: float, names: list[str]
) -> dict[str, tuple[str, float]]:
    """Parameter name → its part of the model and its learning-rate factor.

    As in BEiT and timm: modules after the layers have factor 1, the last layer has `decay`, the one before it
    `decay ** 2`, and so on down to the embeddings. Stacks such as an encoder and a decoder are counted separately.

    Args:
        model: the model.
        stacks: the stacks, as `find_stacks` returns them.
        decay: the factor from a layer to the previous one.
        names: names of parameters, in the model's order.
    """
    towers = {_tower(name, stacks): name for name in stacks}
    embeddings = {f"{bare_name(name)}.weight" for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    scales: dict[str, tuple[str, float]] = {}
    started_towers = set()
    for name in names:
        tower = next((prefix for prefix in towers if name.startswith(prefix)), None)
        stack = None if tower is None else towers[tower]
        if stack is not None and name.startswith(stack):
            started_towers.add(tower)
            layer = int(name.removeprefix(stack).partition(".")[0])
            scales[name] = (f"layer {layer}", decay ** (stacks[stack] - layer))
            continue
        # A decoder's embeddings may follow its layers, and shared embeddings are outside both towers.
        is_before_layers = stack is not None and tower not in started_towers
        is_before_layers = is_before_layers or (len(stacks) > 1 and (name in embeddings or "embed" in name))
        smallest_scale = decay ** (max(stacks.values(), default=0) + 1)
        scales[name] = ("before the layers", smallest_scale) if is_before_layers else ("after the layers", 1.0)
    return scales


def find_unknown_keys(entries: list[dict[str, Any]], optimizer: Any) -> Iterator[str]:
    """An error for each setting of an entry that the optimizer does not accept."""
    known = set(inspect.signature(type(optimizer)).parameters) & optimizer.defaults.keys()
    for number, entry in enumerate(entries):
        for key in entry.keys() - known - {*OWN_KEYS, "lr", "weight_decay", "params", "frozen"}:
            yield (
                f"param_groups[{number}]: {type(optimizer).__name__} does not accept {key!r} for a parameter group"
                f"{suggest(key, known, '.')} It accepts {', '.join(sorted(known))}, lr_scale and layer_decay."
            )
        if optimizer.defaults.get("relative_step") and {"lr", "lr_scale", "layer_decay"} & entry.keys():
            yield f"param_groups[{number}]: relative_step=True computes the learning rates: use False, and set lr."
        if "weight_decay" in entry and "weight_decay" not in optimizer.defaults:
            yield f"param_groups[{number}]: {type(optimizer).__name__} has no weight_decay: remove it."


def describe_groups(groups: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each group with its parameters and settings."""
    for number, group in enumerate(groups):
        names = group["param_names"]
        examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        count = sum(map(libraries.element_count, group["params"]))
        rates = f"lr={group['lr']:g}, weight_decay={group.get('weight_decay', 0.0):g}"
        yield (
            f"Parameter group {number}, {group['name']}: {count_of(len(names), 'tensors')}, "
            f"{count_of(count, 'parameters')}, {rates}" + (f": {examples}" if names else "")
        )
