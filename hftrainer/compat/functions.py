"""Questions about functions, datasets and metrics of users."""

from __future__ import annotations

import dis
import functools
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


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether `function` can be called with these arguments; True if its parameters are unknown."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def ignores_other_keywords(function: Callable[..., Any]) -> bool:
    """Whether a function has `**kwargs` that it never reads, so that further keywords change nothing."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__func__", type(function).__call__)  # a method, or an object
    code = getattr(function, "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    positional = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[positional]
    return not any(
        step.argval == name or (isinstance(step.argval, tuple) and name in step.argval)
        for step in dis.get_instructions(code)
        if step.opname not in ("MAKE_CELL", "COPY_FREE_VARS")
    )


def is_measured(name: str) -> bool:
    """Whether a metric is a measurement of time or memory."""
    return (
        name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
        or "_mem_cpu" in name
        or "_mem_gpu" in name
    )
