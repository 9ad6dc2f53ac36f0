"""The parameter groups that `param_groups` selects by name, and the learning rates of layer-wise decay."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hftrainer.arguments.param_groups import OWN_KEYS, patterns_of
from hftrainer.compat import peers
from hftrainer.compat.peers import bare_name
from hftrainer.errors import suggest

_FLAT = "FSDP1 has flattened them: set fsdp_config['use_orig_params']=True, or use FSDP2."


@dataclass
class Selection:
    """The groups of the entries, and what is wrong with these.

    Attributes:
        groups: a dict for each group, as torch takes them; parameters without an entry are in none.
        problems: a sentence for each error.
    """

    groups: list[dict[str, Any]]
    problems: list[str]


def select(
    model: nn.Module, decayed: list[str], entries: list[dict[str, Any]], rate: float, weight_decay: float
) -> Selection:
    """The groups of the entries; a parameter belongs to the first one that matches.

    Args:
        model: the model, wrapped or not.
        decayed: names of the parameters with weight decay, for entries that do not set it.
        entries: as `check` accepts them.
        rate: the learning rate of entries without `lr`.
        weight_decay: the weight decay of entries without it.
    """
    named = {bare_name(name): parameter for name, parameter in model.named_parameters()}
    decays = {bare_name(name) for name in decayed}
    left = [name for name, parameter in named.items() if parameter.requires_grad]
    selection = Selection([], [])
    for number, entry in enumerate(entries):
        patterns = patterns_of(entry)
        taken = [name for name in left if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        problems = list(_unmatched(patterns, named, taken))
        scales: dict[str, tuple[str, float]] = {}
        if "layer_decay" in entry and not problems:
            stacks = find_stacks(model, taken)
            problems += _unclear(stacks, model)
            scales = layer_scales(model, stacks, entry["layer_decay"], taken)
        selection.problems += [f"param_groups[{number}]: {problem}" for problem in problems]
        left = [name for name in left if name not in taken]
        parts: dict[tuple[str, float, float], list[str]] = {}
        for name in taken:
            part, scale = scales.get(name, ("", 1.0))
            decay = entry.get("weight_decay", weight_decay if name in decays else 0.0)
            label = part if "weight_decay" in entry or name in decays else f"{part} no decay"
            parts.setdefault((label.strip(), scale, decay), []).append(name)
        settings = {key: value for key, value in entry.items() if key not in OWN_KEYS}
        # The rate of the first group is logged, so that of the head comes first.
        for (label, scale, decay), names in sorted(parts.items(), key=lambda part: (-part[0][1], -part[0][2])):
            own = entry.get("lr", rate * entry.get("lr_scale", 1.0)) * scale
            title = " | ".join(patterns) + (f" ({label})" if label else "")
            params = [named[name] for name in names]
            group = {**settings, "params": params, "lr": own, "weight_decay": decay, "name": title}
            selection.groups.append(group)
    return selection


def _unmatched(patterns: list[str], named: dict[str, nn.Parameter], taken: list[str]) -> Iterator[str]:
    """A sentence for each pattern that selects nothing."""
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            parts = dict.fromkeys(part for name in named for part in name.split("."))
            near = suggest(pattern, named, suggest(pattern.strip("*."), parts, f", such as {next(iter(named))!r}."))
            flat = any("_flat_param" in name for name in named)
            advice = _FLAT if flat else "model.named_parameters() has their names."
            yield f"{pattern!r} matches no parameter of the model{'.' if flat else near} {advice}"
        elif not any(named[name].requires_grad for name in found):
            yield f"{pattern!r} matches only frozen parameters: leave it out, or let them require gradients."
        elif not set(found) & set(taken):
            yield f"{pattern!r} matches only parameters that earlier entries have: move it up, or leave it out."


def find_stacks(model: nn.Module, names: list[str]) -> dict[str, int]:
    """Prefix of the names in each stack of layers → how many layers it has.

    Args:
        model: the model.
        names: the parameters; a stack has some of them.
    """
    lists = {f"{bare_name(name)}.": each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    # Inside a layer there are other lists, such as those of experts.
    lists = {name: each for name, each in lists.items() if not any(name.startswith(o) for o in lists if o != name)}
    lists = {name: each for name, each in lists.items() if any(other.startswith(name) for other in names)}
    # A list of several heads has no layers inside; a model's only list may be a plain one.
    deep = {name: each for name, each in lists.items() if any(list(layer.children()) for layer in each)}
    return {name: len(each) for name, each in (deep or lists).items()}


def _tower(stack: str, stacks: dict[str, int]) -> str:
    """Prefix of the largest part of the model that has no other stack, such as an encoder or a decoder."""
    starts = itertools.accumulate(stack.split(".")[:-1], lambda start, part: f"{start}{part}.", initial="")
    return next(start for start in starts if not any(each.startswith(start) for each in stacks if each != stack))


def _unclear(stacks: dict[str, int], model: nn.Module) -> Iterator[str]:
    """A sentence, if it is not clear what the layers are."""
    if not stacks:
        yield (
            f"layer_decay finds no layers: {type(model).__name__} has no ModuleList of trained layers. Give an "
            "entry with lr_scale for each."
        )
    if len({*stacks.values()}) > 1:
        listed = ", ".join(f"{count} in {name[:-1]}" for name, count in stacks.items())
        towers = " and ".join(repr(f"{_tower(name, stacks)}*") for name in stacks)
        advice = f"give an entry for each, with {towers} as patterns."
        yield f"layer_decay finds stacks of different lengths, {listed}: {advice}"


def layer_scales(
    model: nn.Module, stacks: dict[str, int], decay: float, names: list[str]
) -> dict[str, tuple[str, float]]:
    """Parameter → its part of the model, and the factor of its learning rate.

    As in BEiT and timm: what comes after the layers has factor 1, the last layer `decay`, and so on to what comes
    before the first one, the embeddings. Of several stacks, such as an encoder and a decoder, each is counted alone.

    Args:
        model: the model.
        stacks: as `find_stacks` returns them.
        decay: the factor from a layer to the one before.
        names: the parameters, in the model's order.
    """
    towers = {_tower(name, stacks): name for name in stacks}
    embeddings = {f"{bare_name(name)}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    scales: dict[str, tuple[str, float]] = {}
    begun = set()
    for name in names:
        tower = next((each for each in towers if name.startswith(each)), None)
        stack = None if tower is None else towers[tower]
        if stack is not None and name.startswith(stack):
            begun.add(tower)
            layer = int(name.removeprefix(stack).partition(".")[0])
            scales[name] = (f"layer {layer}", decay ** (stacks[stack] - layer))
            continue
        # A decoder's embeddings may come after its layers, and those of both towers are outside.
        before = stack is not None and tower not in begun
        before = before or (len(stacks) > 1 and (name in embeddings or "embed" in name))
        deepest = decay ** (max(stacks.values(), default=0) + 1)
        scales[name] = ("before the layers", deepest) if before else ("after the layers", 1.0)
    return scales


def unknown_keys(entries: list[dict[str, Any]], optimizer: Any) -> Iterator[str]:
    """A sentence for each setting of an entry that the optimizer does not take for a group."""
    known = set(inspect.signature(type(optimizer)).parameters) & optimizer.defaults.keys()
    for number, entry in enumerate(entries):
        for key in entry.keys() - known - {*OWN_KEYS, "lr", "weight_decay", "params", "frozen"}:
            yield (
                f"param_groups[{number}]: {type(optimizer).__name__} has no setting {key!r} of a group"
                f"{suggest(key, known, '.')} It takes {', '.join(sorted(known))}, lr_scale and layer_decay."
            )
        if optimizer.defaults.get("relative_step") and {"lr", "lr_scale", "layer_decay"} & entry.keys():
            yield f"param_groups[{number}]: relative_step=True computes the learning rates: set it to False, with lr."
        if "weight_decay" in entry and "weight_decay" not in optimizer.defaults:
            yield f"param_groups[{number}]: {type(optimizer).__name__} has no weight_decay: leave it out."


def describe(groups: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each group: what it holds and its settings."""
    for number, group in enumerate(groups):
        names = group["param_names"]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        count = sum(map(peers.element_count, group["params"]))
        rates = f"lr={group['lr']:g}, weight_decay={group.get('weight_decay', 0.0):g}"
        yield (
            f"Parameter group {number}, {group['name']}: {len(names)} tensors, {count:,} parameters, {rates}"
            + (f": {shown}" if names else "")
        )
