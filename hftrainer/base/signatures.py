"""What functions accept, and calls with the arguments that they accept."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any


def _unwrap(function: Any) -> Iterator[Any]:
    """A function, and the functions that it wraps with `functools.wraps`."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


@functools.lru_cache(maxsize=256)
def _accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Parameter names that `function` and all functions it wraps accept; None for any name."""
    accepted: frozenset[str] | None = None
    for wrapped in _unwrap(function):
        parameters = inspect.signature(wrapped, follow_wrapped=False).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            names = frozenset(parameter.name for parameter in parameters)
            accepted = names if accepted is None else accepted & names
    return accepted


def accepts(method: Callable[..., Any], keyword: str) -> bool:
    """Whether `method` accepts a keyword argument of this name."""
    names = _accepted_names(getattr(method, "__func__", method))
    return names is None or keyword in names


def has_parameter(method: Callable[..., Any], keyword: str) -> bool:
    """Whether `method` has a parameter of this name, rather than only `**kwargs`."""
    functions = _unwrap(getattr(method, "__func__", method))
    return any(keyword in inspect.signature(function, follow_wrapped=False).parameters for function in functions)


def call_with_accepted(method: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Call `method` with `args`, and with the items of `optional` that it accepts."""
    return method(*args, **accepted_args(method, optional))


def accepted_args(method: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The items of `values` that `method` accepts as keyword arguments."""
    names = _accepted_names(getattr(method, "__func__", method))
    if names is None or names.issuperset(values):
        return values
    return {name: value for name, value in values.items() if name in names}


def max_positional_arguments(method: Callable[..., Any]) -> int | None:
    """Number of positional arguments without `self`; None if `*args` accepts any number."""
    return _count_positional_arguments(getattr(method, "__func__", method), inspect.ismethod(method))


# Every optimizer step calls this.
@functools.lru_cache(maxsize=64)
def _count_positional_arguments(function: Callable[..., Any], is_bound: bool) -> int | None:
    counts: list[int] = []
    for wrapped in _unwrap(function):
        parameters = inspect.signature(wrapped, follow_wrapped=False).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
            has_self = is_bound if wrapped is function else next(iter(parameters)).name == "self"
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            counts.append(sum(parameter.kind in kinds for parameter in parameters) - has_self)
    return min(counts, default=None)


def number_of_arguments(function: Callable[..., Any]) -> int:
    """Number of positional parameters of `function`.

    `*args` counts as one. Parameters that `partial` has bound do not count.
    """
    kind = inspect.Parameter
    positional_kinds = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD, kind.VAR_POSITIONAL)
    return sum(parameter.kind in positional_kinds for parameter in inspect.signature(function).parameters.values())


def can_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether `function` can be called with these arguments; True if its parameters are unknown."""
    return _can_bind(inspect.Signature.bind, function, *args, **kwargs)


def can_begin_call(function: Callable[..., Any], *args: Any) -> bool:
    """Whether `function` can be called with these positional arguments, and perhaps others; True if unknown."""
    return _can_bind(inspect.Signature.bind_partial, function, *args)


def _can_bind(bind: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    try:
        bind(inspect.signature(function), *args, **kwargs)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def ignores_other_keywords(function: Callable[..., Any]) -> bool:
    """Whether a function has `**kwargs` that it never reads."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        # A bound method has `__func__`, any other object `__call__`.
        function = getattr(function, "__func__", type(function).__call__)
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
