"""Calling what subclasses override, whichever release's signature they wrote it for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.lru_cache(maxsize=256)
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the parameters of `function`, or None when it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def accepts(method: Callable[..., Any], keyword: str) -> bool:
    """Whether `method` can be called with `keyword`."""
    names = _keywords(getattr(method, "__func__", method))
    return names is None or keyword in names


def call_with_accepted(method: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Call `method` with `args`, and with those of `optional` that its signature has."""
    return method(*args, **{name: value for name, value in optional.items() if accepts(method, name)})


def with_accepted(method: Callable[..., Any], *keywords: str) -> Callable[..., Any]:
    """`method` itself if it takes all keywords, else a function that drops those it lacks: for hot loops."""
    lacking = [keyword for keyword in keywords if not accepts(method, keyword)]
    if not lacking:
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{name: value for name, value in kwargs.items() if name not in lacking})

    return call


def is_overridden(instance: Any, name: str, base: type) -> bool:
    """Whether `instance` has its own method `name`, by subclassing or assignment, instead of `base`'s."""
    return getattr(getattr(instance, name), "__func__", None) is not getattr(base, name)
