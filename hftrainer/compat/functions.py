"""Questions about functions, datasets and metrics of users."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def has_length(dataset: Any) -> bool:
    """Whether `len(dataset)` gives a number."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):
        return False


def number_of_arguments(function: Callable[..., Any]) -> int:
    """Number of positional arguments of `function`; `*args` counts as one, those bound by `partial` do not count."""
    kind = inspect.Parameter
    by_position = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD, kind.VAR_POSITIONAL)
    return sum(parameter.kind in by_position for parameter in inspect.signature(function).parameters.values())


def is_measured(name: str) -> bool:
    """Whether a metric is a measurement of time or memory."""
    return (
        name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
        or "_mem_cpu" in name
        or "_mem_gpu" in name
    )
