"""Reads and checks the entries of `param_groups`, as far as this needs no model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from hftrainer.errors import InvalidArgument, suggest

#: Keys of an entry that are ours; all others are settings of the optimizer.
OWN_KEYS = ("pattern", "lr_scale", "layer_decay")
_HOW = 'use a list of dicts such as [{"pattern": "*.embed*", "lr": 1e-5}], or the path of a JSON file with one'


def read_entries(value: Any) -> Any:
    """The entries, parsed from JSON text or from a JSON file if they are a string.

    Raises:
        InvalidArgument: if they cannot be read.
    """
    if not isinstance(value, str):
        return value
    try:
        if value.lstrip().startswith("["):
            return json.loads(value)
        with open(os.path.expanduser(value), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"param_groups={value!r} cannot be read ({error}): {_HOW}.") from error


def check_entries(entries: Any) -> Iterator[str]:
    """An error message for each problem in the entries."""
    if entries is None:
        return
    if not isinstance(entries, (list, tuple)):
        yield f"param_groups={entries!r}: {_HOW}."
        return
    for number, entry in enumerate(entries):
        entry_name = f"param_groups[{number}]"
        if isinstance(entry, dict):
            yield from _check_entry(entry_name, entry)
        else:
            yield f"{entry_name} is {entry!r}: {_HOW}."


def _check_entry(entry_name: str, entry: dict[str, Any]) -> Iterator[str]:
    patterns = patterns_of(entry)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        typo = next((f", but {key!r}" for key in entry if suggest(key, OWN_KEYS[:1]) and key != "pattern"), "")
        yield f"{entry_name} has no pattern{typo}: name its parameters, as in 'pattern': '*.embed*' or a list."
    if "params" in entry or "frozen" in entry:
        yield f"{entry_name}: choose parameters by 'pattern', and freeze them with parameter.requires_grad_(False)."
    if "lr" in entry and "lr_scale" in entry:
        yield f"{entry_name} has lr and lr_scale, a factor on learning_rate: set only one of them."
    for key in ("lr", "lr_scale", "layer_decay", "weight_decay"):
        value = entry.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            yield f"{entry_name}: {key}={value!r} is not a number of at least 0."


def patterns_of(entry: dict[str, Any]) -> list[Any]:
    """The patterns of an entry, always as a list."""
    patterns = entry.get("pattern") or []
    return list(patterns) if isinstance(patterns, (list, tuple)) else [patterns]
