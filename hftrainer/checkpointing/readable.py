"""Whether a file of a checkpoint can be read, checked by reading it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import safetensors

from hftrainer.checkpointing import names
from hftrainer.compat.reading import read_torch
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: Suffixes of files that `torch.save` writes.
_TORCH = (".pt", ".pth", ".bin")
#: First bytes and length in bytes of the last record of a `torch.save` archive, which has no comment.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22


def has_form(path: Path) -> bool:
    """Whether a file's name shows a format that can be checked."""
    return path.suffix in (".safetensors", ".json", *_TORCH)


def why_unreadable(path: Path, *, load: bool = True) -> str | None:
    """Why a file cannot be read, to be appended to its path; None when it can.

    Args:
        path: the file.
        load: also load files of `torch.save`, and read text files; otherwise check only how the former begin and end.
    """
    if path.suffix == ".safetensors":
        return _why_not_safetensors(path)
    if path.suffix == ".json":
        return _why_not_json(path)
    if path.suffix in _TORCH:
        return _why_not_begun(path) or (_why_not_loaded(path) if load else None)
    return _why_not_text(path) if load else None


def _why_not_safetensors(path: Path) -> str | None:
    """Opening the file compares its length with its header."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return None
    except Exception as error:  # the library raises several exception classes
        return f"cannot be read ({error})"


def _why_not_json(path: Path) -> str | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"cannot be read ({error})"
    if path.name == names.TRAINER_STATE_NAME and not (isinstance(value, dict) and "global_step" in value):
        return "does not contain a state"
    if path.name.endswith(".index.json") and not (
        isinstance(value, dict) and isinstance(value.get("weight_map"), dict)
    ):
        return "does not list shards"
    return None


def _why_not_begun(path: Path) -> str | None:
    """Files from before torch 1.6 are pickles, not archives."""
    with path.open("rb") as file:
        begin = file.read(2)
    if not begin:
        return "is empty"
    return None if begin[:1] == b"\x80" or _is_archive(path) else "is truncated"


def _why_not_loaded(path: Path) -> str | None:
    archive = _is_archive(path)
    if archive and not _ends_as_archive(path):
        return "has extra bytes at its end"
    try:
        read_torch(str(path), mmap=True)
    except UnsafeCheckpoint:  # such as training_args.bin: the archive can be checked without unpickling its objects
        damaged = _damaged_member(path) if archive else None
        return None if damaged is None else f"is damaged at {damaged}"
    except DamagedCheckpoint as error:
        return f"cannot be read ({error.__cause__})"
    return None


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # says that it goes on in another file
        return False


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
    """Files of other formats are read as text: vocabularies, templates, model cards."""
    content = path.read_bytes()
    if not content:
        return "is empty"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "is not text, and its format cannot be checked"
    return None
