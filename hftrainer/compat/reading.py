"""Reads files of a checkpoint: only tensors and plain values, so that no code in them is run."""

from __future__ import annotations

import re
import zipfile
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


def _damaged(path: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: delete its folder and resume from an older checkpoint.")
