"""Loads tensors and plain values from checkpoint files, without running code in them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import safetensors.torch
import torch

from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: Environment variables that force `weights_only` to True or False in `torch.load`.
_FORCE_SAFE, _FORCE_UNSAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
#: Matches the name of the refused class or function in torch's error message.
_REFUSED_NAME = re.compile(r"GLOBAL ([\w.]+)")
#: The classes of plain objects that GaLore and APOLLO keep in their state besides tensors.
_PROJECTORS = {
    "galore_torch.galore_projector": "GaLoreProjector",
    "apollo_torch.svd_projector": "GaLoreProjector",
    "apollo_torch.random_projector": "GradientProjector",
}


def as_bytes(value: Any) -> torch.Tensor:
    """The bytes of `torch.save(value)` as a tensor, which any program can load. `load_torch_file` unpacks it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()


def load_torch_file(
    path: str, *, allowed: Iterable[Any] = (), mmap: bool = False, packed_value: torch.Tensor | None = None
) -> Any:
    """Load a file of `torch.save` on the CPU.

    Args:
        path: the file.
        allowed: classes and functions that the file may hold, besides those that
            `torch.serialization.add_safe_globals` allows.
        mmap: read tensors from disk only when they are used; for tensors that are then copied.
        packed_value: a tensor of `as_bytes`, which is loaded instead of the file.

    Raises:
        UnsafeCheckpoint: for an object of another class.
        DamagedCheckpoint: if the file is not a complete file of `torch.save`.
    """
    # The format before torch 1.6 is not a zip file and cannot be mapped.
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": mmap and zipfile.is_zipfile(path)}
    source: Any = path if packed_value is None else io.BytesIO(packed_value.numpy().tobytes())
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(source, **options)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise _make_read_error(path, error) from error


def projectors() -> list[Any]:
    """The classes that the states of GaLore and APOLLO hold, if they are imported."""
    return [getattr(sys.modules[module], name) for module, name in _PROJECTORS.items() if module in sys.modules]


@contextlib.contextmanager
def weights_only(path: str, allowed: Iterable[type] = ()) -> Iterator[None]:
    """Force `weights_only=True` for a library that calls `torch.load`.

    Args:
        path: the checkpoint, for the message.
        allowed: classes whose objects the library writes.

    Raises:
        UnsafeCheckpoint, DamagedCheckpoint: as `load_torch_file`.
    """
    previous_values = {name: os.environ.pop(name, None) for name in (_FORCE_SAFE, _FORCE_UNSAFE)}
    os.environ[_FORCE_SAFE] = "1"
    try:
        with torch.serialization.safe_globals(list(allowed)):
            yield
    except UnsafeCheckpoint:
        raise
    except pickle.UnpicklingError as error:
        raise _make_read_error(path, error) from error
    finally:
        del os.environ[_FORCE_SAFE]
        os.environ.update({name: value for name, value in previous_values.items() if value is not None})


def read_pickle(path: str, allowed: Iterable[str]) -> Any:
    """Load a plain pickle file, which torch cannot read.

    Args:
        path: the file.
        allowed: full names of the classes and functions that the file may hold, besides torch's dtypes and those
            that `torch.serialization.add_safe_globals` allows.

    Raises:
        UnsafeCheckpoint, DamagedCheckpoint: as `load_torch_file`.
    """
    with open(path, "rb") as file:
        content = io.BytesIO(file.read())
    try:
        return _Unpickler(content, frozenset(allowed)).load()
    except Exception as error:
        raise _make_read_error(path, error) from error


class _Unpickler(pickle._Unpickler):
    """Refuses classes that are not allowed, with torch's error message.

    It uses Python's implementation, because the C one allocates a table as large as the file requests.
    """

    def __init__(self, file: Any, allowed: frozenset[str]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in self._allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        for safe_class in torch.serialization.get_safe_globals():
            if not isinstance(safe_class, tuple) and f"{safe_class.__module__}.{safe_class.__qualname__}" == full_name:
                return safe_class
        raise pickle.UnpicklingError(f"GLOBAL {full_name} is not allowed")


def _make_read_error(path: str, error: Exception) -> UnsafeCheckpoint | DamagedCheckpoint:
    if (refusal := _REFUSED_NAME.search(str(error))) is None:
        return DamagedCheckpoint(f"{path} is damaged{DamagedCheckpoint.REMEDY}")
    return UnsafeCheckpoint(
        f"{path} holds a pickled {refusal[1]}, which is not loaded, since unpickling can run any code. If you trust "
        "the file's author, import that class and call torch.serialization.add_safe_globals([it]) first."
    )


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .bin file by name, read from disk only when they are used.

    Raises:
        UnsafeCheckpoint, DamagedCheckpoint: as `load_torch_file`.
    """
    if not path.endswith(".safetensors"):
        return load_torch_file(path, mmap=True)
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _make_read_error(path, error) from error
