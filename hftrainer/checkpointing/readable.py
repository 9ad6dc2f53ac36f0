"""Whether a file of a checkpoint can be read, found out by reading it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import safetensors

from hftrainer.checkpointing import names
from hftrainer.compat.reading import read_torch
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: Endings of what `torch.save` writes.
_TORCH = (".pt", ".pth", ".bin")
#: How the last record of an archive that `torch.save` has written begins, and its length in bytes: it has no comment.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22


def has_form(path: Path) -> bool:
    """Whether a file, by its name, has a form that can be checked."""
    return path.suffix in (".safetensors", ".json", *_TORCH)


def why_unreadable(path: Path, *, load: bool = True) -> str | None:
    """Why a file cannot be read, to be put behind its path; None when it can.

    Args:
        path: the file.
        load: read tensors and values by `torch.load` too, and texts; otherwise only how such a file begins and ends.
    """
    if path.suffix == ".safetensors":
        return _why_not_safetensors(path)
    if path.suffix == ".json":
        return _why_not_json(path)
    if path.suffix in _TORCH:
        return _why_not_begun(path) or (_why_not_loaded(path) if load else None)
    return _why_not_text(path) if load else None


def _why_not_safetensors(path: Path) -> str | None:
    """Opening one compares the length of the file with what its header tells."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return None
    except Exception as error:  # the library raises classes of several kinds
        return f"cannot be read ({error})"


def _why_not_json(path: Path) -> str | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"cannot be read ({error})"
    if path.name == names.TRAINER_STATE_NAME and not (isinstance(value, dict) and "global_step" in value):
        return "holds no state"
    if path.name.endswith(".index.json") and not (
        isinstance(value, dict) and isinstance(value.get("weight_map"), dict)
    ):
        return "lists no shards"
    return None


def _why_not_begun(path: Path) -> str | None:
    """Files from before torch 1.6 are no archives, but pickles."""
    with path.open("rb") as file:
        begin = file.read(2)
    if not begin:
        return "is empty"
    return None if begin[:1] == b"\x80" or zipfile.is_zipfile(path) else "is cut off"


def _why_not_loaded(path: Path) -> str | None:
    archive = zipfile.is_zipfile(path)
    if archive and not _ends_as_archive(path):
        return "has something behind its end"
    try:
        read_torch(str(path), mmap=True)
    except UnsafeCheckpoint:  # as training_args.bin: objects that are not read, in an archive that can be
        damaged = _damaged_member(path) if archive else None
        return None if damaged is None else f"is damaged at {damaged}"
    except DamagedCheckpoint as error:
        return f"cannot be read ({error.__cause__})"
    return None


def _ends_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-_END_LENGTH, 2)
        return file.read().startswith(_END_OF_ARCHIVE)


def _damaged_member(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return str(error)


def _why_not_text(path: Path) -> str | None:
    """What has no form of its own is read as a text: vocabularies, templates, cards."""
    content = path.read_bytes()
    if not content:
        return "is empty"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "is no text, and has no form that could be checked"
    return None
