"""Reads what torch's distributed checkpoints hold as data: no code of theirs is run, and no file elsewhere is read."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hftrainer.compat.reading import fitting, plain_name, read_pickle
from hftrainer.errors import DamagedCheckpoint

_NAME = ".metadata"
#: Module → classes and functions of which the list of parts is made.
_KINDS = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}
_ALLOWED = frozenset(f"{module}.{name}" for module, kinds in _KINDS.items() for name in kinds)


class PartsReader(FileSystemReader):
    """torch's reader of a folder of parts.

    Args:
        folder: the folder.

    Raises:
        UnsafeCheckpoint: if its list of parts holds an object of any other class than torch writes.
        DamagedCheckpoint: if it cannot be read, or names a file that is not in the folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        path = os.path.join(folder, _NAME)
        if not os.path.isfile(path):
            raise DamagedCheckpoint(f"{path} is missing: delete its folder and resume from an older checkpoint.")
        self._parts = read_pickle(path, _ALLOWED)
        with fitting(path):
            _check(self._parts, folder)
        self._parts.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self) -> Metadata:  # without the rank, for which torch would look for a list of its own
        """The list of parts."""
        return self._parts


def _check(parts: Any, folder: str) -> None:
    if not isinstance(parts, Metadata):
        raise TypeError(f"it is a {type(parts).__name__}")
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    for stored in parts.storage_data.values():
        name = plain_name(stored.relative_path)
        if name not in sizes:
            raise ValueError(f"{name!r} is missing")
        if not 0 <= stored.offset <= stored.offset + stored.length <= sizes[name]:
            raise ValueError(f"{name!r} has {sizes[name]} bytes, too few for {stored}")
