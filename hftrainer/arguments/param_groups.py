"""Reads and checks the entries of `param_groups`, as far as they need no model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from hftrainer.errors import InvalidArgument

#: Keys of an entry that are ours; all others are settings of the optimizer.
OWN_KEYS = ("pattern", "lr_scale", "layer_decay")
_HOW = 'give a list of dicts such as [{"pattern": "*.embed*", "lr": 1e-5}], or the path of a JSON file with one'


def read(value: Any) -> Any:
    """The entries, parsed if they are a JSON list as text, or the path of a JSON file.

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


def check(entries: Any) -> Iterator[str]:
    """A sentence for each error in the entries."""
    if entries is None:
        return
    if not isinstance(entries, (list, tuple)):
        yield f"param_groups={entries!r}: {_HOW}."
        return
    for number, entry in enumerate(entries):
        where = f"param_groups[{number}]"
        if not isinstance(entry, dict):
            yield f"{where} is {entry!r}: {_HOW}."
            continue
        if not (patterns := patterns_of(entry)) or not all(isinstance(each, str) and each for each in patterns):
            yield f"{where} has no pattern: name its parameters, as in 'pattern': '*.embed*', or by a list of patterns."
        if "params" in entry or "frozen" in entry:
            yield f"{where}: choose parameters by 'pattern', and freeze them with parameter.requires_grad_(False)."
        if "lr" in entry and "lr_scale" in entry:
            yield f"{where} has lr and lr_scale, a factor on learning_rate: give one of them."
        for key in ("lr", "lr_scale", "layer_decay", "weight_decay"):
            given = entry.get(key, 1.0)
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0:
                yield f"{where}: {key}={given!r} is not a number of at least 0."


def patterns_of(entry: dict[str, Any]) -> list[Any]:
    """The patterns of an entry, which has one or a list."""
    given = entry.get("pattern") or []
    return list(given) if isinstance(given, (list, tuple)) else [given]
