"""What is asked of a function or a data set that somebody else wrote."""

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
    """How many arguments `function` takes by position; `*args` counts as one, what a `partial` has bound as none."""
    kind = inspect.Parameter
    by_position = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD, kind.VAR_POSITIONAL)
    return sum(parameter.kind in by_position for parameter in inspect.signature(function).parameters.values())


def is_measured(name: str) -> bool:
    """Whether a metric tells what something cost in time or memory."""
    return (
        name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
        or "_mem_cpu" in name
        or "_mem_gpu" in name
    )
