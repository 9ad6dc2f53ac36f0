"""Reading a checkpoint's files: tensors and plain values only, so that nothing in them is run."""

from __future__ import annotations

import re
import zipfile
from typing import Any

import safetensors.torch
import torch

from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: How torch names the class or function that it refuses.
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def read_torch(path: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `path`, on the CPU.

    Args:
        path: the file.
        mmap: leave tensors on the disk until they are used; for those that are then copied.

    Raises:
        UnsafeCheckpoint: when it holds an object of a class that `torch.serialization.add_safe_globals` does not allow.
        DamagedCheckpoint: when it is no whole file of `torch.save`.
    """
    try:  # the format before torch 1.6 is no zip file and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if refused := _REFUSED.search(str(error)):
            raise UnsafeCheckpoint(
                f"{path} holds a pickled {refused[1]}, which is not read, since unpickling can run any code. If you "
                "trust who wrote the file, import that class and call torch.serialization.add_safe_globals([it]) first."
            ) from error
        raise _damaged(path) from error


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .bin file by name, left on the disk until they are used.

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
