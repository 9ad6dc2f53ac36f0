"""The list of a checkpoint's files with their sizes and checksums, by which a damaged one is known.

It is the last file written, and covers all others. A folder without one (of transformers, or of older releases) is
judged by what its files themselves tell.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import safetensors

from hftrainer.checkpointing import names

_CHUNK = 1 << 22  # bytes
#: Files with weights, and the lists of their shards.
_WEIGHTS = re.compile(r"(\.safetensors|model.*\.bin|\.index\.json)$")


def write_manifest(folder: str | Path) -> None:
    """Write the manifest of everything in `folder`, and flush it all to the disk."""
    root = Path(folder)
    manifest = root / names.MANIFEST_NAME
    listed = (path for path in sorted(root.rglob("*")) if path.is_file() and path != manifest)
    files = {path.relative_to(root).as_posix(): _describe(path) for path in listed}
    manifest.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(manifest)
    for directory in [*(path for path in root.rglob("*") if path.is_dir()), root]:
        flush_to_disk(directory)


def _describe(path: Path) -> dict[str, int]:
    """Size and checksum of a file, once it is on the disk."""
    flush_to_disk(path)
    return {"size": path.stat().st_size, "crc32": _crc32(path)}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def flush_to_disk(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; some file systems cannot do it for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def why_unusable(folder: str | Path, *, contents: bool = True) -> str | None:
    """Why nothing can go on from a checkpoint folder, naming the file; None when it is whole.

    Args:
        folder: the folder.
        contents: compare the checksums too, which reads all of it.
    """
    if not os.path.isfile(os.path.join(folder, names.TRAINER_STATE_NAME)):
        return f"{os.path.join(folder, names.TRAINER_STATE_NAME)} is missing"
    return damage(folder, contents=contents)


def damage(folder: str | Path, *, contents: bool = True, only_weights: bool = False) -> str | None:
    """What is wrong with a checkpoint, naming the file; None for a whole one.

    Args:
        folder: the checkpoint.
        contents: read all files and compare their checksums, rather than their sizes alone.
        only_weights: ask for the weights and nothing else.
    """
    try:
        return _damage(Path(folder), contents, only_weights)
    except OSError as error:  # it is deleted meanwhile, or the disk fails
        return f"{error.filename or folder} cannot be read ({error.strerror or error})"


def _damage(folder: Path, contents: bool, only_weights: bool) -> str | None:
    manifest = folder / names.MANIFEST_NAME
    if not manifest.is_file():
        return _visible_damage(folder)
    try:
        files: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {manifest.parent / name: (entry["size"], entry["crc32"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} cannot be read"
    for path, (size, checksum) in expected.items():
        if only_weights and not _WEIGHTS.search(path.name):
            continue
        if not path.is_file():
            return f"{path} is missing"
        if (found := path.stat().st_size) != size:
            return f"{path} has {found} bytes instead of {size}"
        if contents and _crc32(path) != checksum:
            return f"the contents of {path} have changed since it was written"
    return None


def _visible_damage(folder: Path) -> str | None:
    """What is wrong with a folder that has no manifest, as far as its files tell."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            try:
                with safetensors.safe_open(path, framework="pt"):
                    pass
            except Exception as error:
                return f"{path} cannot be read ({error})"
        elif path.suffix == ".json" and path.is_file():
            try:
                value = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                return f"{path} cannot be read ({error})"
            if path.name == names.TRAINER_STATE_NAME and "global_step" not in value:
                return f"{path} holds no state"
            for shard in value.get("weight_map", {}).values() if path.name.endswith(".index.json") else ():
                if not path.with_name(shard).is_file():
                    return f"{path.with_name(shard)} is missing"
        elif path.suffix in (".pt", ".pth", ".bin") and path.is_file() and (reason := _not_torch(path)):
            return f"{path} {reason}"
    weights = (
        path
        for path in folder.rglob("*")
        if path.name.endswith((".safetensors", "model.bin", "model_fsdp.bin", ".distcp"))
    )
    shards = folder.glob("pytorch_model-*.bin")
    return None if any(weights) or any(shards) else f"{folder} holds no weights"


def _not_torch(path: Path) -> str | None:
    """Why a file is none that `torch.save` has written; those from before torch 1.6 are no archives, but pickles."""
    with path.open("rb") as file:
        begin = file.read(2)
    if not begin:
        return "is empty"
    return None if begin[:1] == b"\x80" or zipfile.is_zipfile(path) else "is cut off"
