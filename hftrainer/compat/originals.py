"""Keeps classes of transformers picklable while `install()` has ours under their names.

A script that imported the original Trainer before `install()` keeps it, with its arguments. It pickles these into each
checkpoint (`training_args.bin`), and pickle refuses a class whose module has another one under its name.
"""

from __future__ import annotations

import enum
import functools
import pkgutil
from typing import Any

_METHOD = "__reduce_ex__"
_ABSENT = object()


class _Class:
    """A class in a pickle: whatever has its name when that is read, with and without hftrainer."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, *args: Any) -> Any:
        """For copies, which stay of the class."""
        return self.kind(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (f"{self.kind.__module__}:{self.kind.__qualname__}",)


class _Empty(_Class):
    """Makes an object of a class without calling its `__init__`."""

    def __call__(self, *args: Any) -> Any:
        return object.__new__(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (object.__new__, _Class(self.kind))


def keep_picklable(kind: Any) -> Any:
    """Make objects of an original class name their class in a pickle; returns what `let_go` needs."""
    before = vars(kind).get(_METHOD, _ABSENT)

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not kind:  # a subclass has a name of its own
            return super(kind, self).__reduce_ex__(protocol) if before is _ABSENT else before(self, protocol)
        if isinstance(self, enum.Enum):
            return _Class(kind), (self.value,)
        if isinstance(self, tuple):
            return _Class(kind), tuple(self)
        own_state = getattr(self, "__getstate__", None)  # each object has one since Python 3.11
        return _Empty(kind), (), dict(vars(self)) if own_state is None else own_state()

    setattr(kind, _METHOD, reduce)
    return before


def let_go(kind: type, before: Any) -> None:
    """Undo `keep_picklable`."""
    if before is _ABSENT:
        delattr(kind, _METHOD)
    else:
        setattr(kind, _METHOD, before)
