"""Checks values that were read from a checkpoint's files, and names the file in errors."""

from __future__ import annotations

import contextlib
import pickle
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hftrainer.errors import DamagedCheckpoint, InvalidSetup


@contextlib.contextmanager
def name_file_in_errors(path: str) -> Iterator[None]:
    """Add the file's name to errors that its content causes.

    Raises:
        DamagedCheckpoint: for any error except OSError, MemoryError, UnpicklingError, InvalidSetup, and itself.
    """
    try:
        yield
    except (OSError, MemoryError, DamagedCheckpoint, InvalidSetup, pickle.UnpicklingError):
        raise
    except Exception as error:
        found = f"{path} does not hold what a checkpoint of this run holds ({type(error).__name__}: {error})"
        raise DamagedCheckpoint(found + DamagedCheckpoint.REMEDY) from error


def check_file_name(name: str) -> str:
    """Returns `name` if it is a plain file name.

    Raises:
        ValueError: if the name leads to another folder.
    """
    if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
        raise ValueError(f"{name!r} is not in this folder")
    return name


def check_fields(values: Mapping[str, Any], dataclass_type: type) -> None:
    """Check values against the field types of a dataclass. Unknown names are ignored.

    Raises:
        TypeError: names the field.
    """
    for name, hint in typing.get_type_hints(dataclass_type).items():
        if name in values and not _matches_type(values[name], hint):
            raise TypeError(f"{name} is {reprlib.repr(values[name])}, not of type {hint}")


def _matches_type(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches_type(value, alternative) for alternative in inner)
    if origin is list:
        return isinstance(value, list) and all(_matches_type(item, inner[0]) for item in value)
    # Bool is a subclass of int; an int is valid for a float.
    if hint is float or hint is int:
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    return isinstance(value, origin or hint)
