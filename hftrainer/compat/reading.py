"""Reads files of a checkpoint: only tensors and plain values, so that no code in them is run."""

from __future__ import annotations

import contextlib
import re
import reprlib
import types
import typing
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch

from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: The class or function that torch refuses, in its message.
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def read_torch(path: str, *, mmap: bool = False) -> Any:
    """Load a file of `torch.save`, on the CPU.

    Args:
        path: the file.
        mmap: read tensors from disk only when they are used; for tensors that are then copied.

    Raises:
        UnsafeCheckpoint: if it holds an object of a class that `torch.serialization.add_safe_globals` does not allow.
        DamagedCheckpoint: if it is not a complete file of `torch.save`.
    """
    try:  # the format before torch 1.6 is not a zip file and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if refused := _REFUSED.search(str(error)):
            raise UnsafeCheckpoint(
                f"{path} holds a pickled {refused[1]}, which is not read, since unpickling can run any code. If you "
                "trust the file's author, import that class and call torch.serialization.add_safe_globals([it]) first."
            ) from error
        raise _damaged(path) from error


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .bin file by name, read from disk only when they are used.

    Raises:
        UnsafeCheckpoint, DamagedCheckpoint: as `read_torch`.
    """
    if not path.endswith(".safetensors"):
        return read_torch(path, mmap=True)
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _damaged(path) from error


@contextlib.contextmanager
def fitting(path: str) -> Iterator[None]:
    """Name the file if what was read from it does not fit where it is put.

    Raises:
        DamagedCheckpoint: for any error that is not about the system, nor clear already.
    """
    try:
        yield
    except (OSError, MemoryError, DamagedCheckpoint, UnsafeCheckpoint):
        raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} does not hold what a checkpoint of this run holds ({type(error).__name__}: {error}): resume from "
            "another checkpoint."
        ) from error


def check_fields(values: Mapping[str, Any], kind: type) -> None:
    """Check values against the types of a dataclass's fields; names that it does not have are left alone.

    Raises:
        TypeError: names the field.
    """
    for name, hint in typing.get_type_hints(kind).items():
        if name in values and not _is_of(values[name], hint):
            raise TypeError(f"{name} is {reprlib.repr(values[name])}")


def _is_of(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_is_of(each, inner[0]) for each in value)
    if hint is float or hint is int:  # a bool is an int, and an int will do for a float
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    return isinstance(value, origin or hint)


def _damaged(path: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: delete its folder and resume from an older checkpoint.")
