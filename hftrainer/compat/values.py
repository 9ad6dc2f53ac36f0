"""Values of users (metrics, log lines, states of callbacks) as JSON has them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.compat.messages import warn_once

logger = logging.getLogger(__name__)

_PLAIN = (int, float, str, bool, type(None))


def as_json(value: Any, name: str) -> Any:
    """A copy of a value as JSON has it: arrays and tensors as lists or numbers, sets as sorted lists.

    Other objects become their `repr`, with a warning that names them: a run does not end because its log has one.

    Args:
        value: numbers, text, arrays, tensors (dense or sparse), and mappings, lists, tuples and sets of them.
        name: what it is called, for the warning.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_as_key(key): as_json(each, f"{name}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return [as_json(each, name) for each in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    elif callable(getattr(value, "toarray", None)):  # scipy's sparse arrays
        value = value.toarray()
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, _PLAIN):
        return value
    warn_once(logger, f"{name} is a {type(value).__name__}, which JSON does not have: its repr is written.")
    return repr(value)


def is_plain(line: Mapping[str, Any]) -> bool:
    """Whether all values of a log line are numbers or text already, and all names text."""
    return all(type(name) is str and type(value) in _PLAIN for name, value in line.items())


def _as_key(key: Any) -> str:
    """A key as JSON writes it; keys of several types could not be sorted."""
    return key if isinstance(key, str) else json.dumps(key) if isinstance(key, _PLAIN) else str(key)
