"""The manifest: a list of a checkpoint's files with sizes and checksums, to detect damage.

It is the last file written, and covers all others. In a folder without one (of transformers, or of older releases),
only damage that the files themselves show is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrainer.checkpointing import names
from hftrainer.checkpointing.deepspeed_parts import holds_parts
from hftrainer.checkpointing.readable import has_form, why_unreadable
from hftrainer.checkpointing.weights import has_weights, missing_shard
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint

_CHUNK = 1 << 20  # bytes: stays in a processor's cache between reading and checksum
#: Threads that wait for the disk, and threads that compute checksums.
_FLUSHING, _READING = 4, 2
#: Checksums that were computed while files were written, with what tells a later change, until a manifest lists them.
_noted: dict[Path, tuple[tuple[int, ...] | None, int]] = {}
#: Files of at least this many bytes leave the page cache once they are on the disk.
_LARGE = 1 << 22
#: Files with weights, and indices of their shards.
_WEIGHTS = re.compile(r"(\.safetensors|model.*\.bin|\.index\.json|model_states\.pt)$")
#: Other files that a resumed run reads; added files with other names are not checked.
_STATES = re.compile(r"^((optimizer|rng_state|progress)[\w-]*|scheduler|scaler|lightning_callbacks)\.(pt|pth|bin)$")


@dataclass(frozen=True)
class Entry:
    """The manifest's entry for a file: its size in bytes, and the CRC-32 of its contents."""

    size: int
    crc32: int


def write_manifest(folder: str | Path) -> None:
    """Write the manifest of all files in `folder`, and flush them to the disk."""
    root = Path(folder)
    manifest = root / names.MANIFEST_NAME
    files = {path.relative_to(root).as_posix(): entry for path, entry in _flush_and_describe(_files(root)).items()}
    beside = manifest.with_name(f"_{manifest.name}")  # a process that is killed here leaves the old manifest
    content = {"files": files, "crc32": _crc32_of_list(files)}
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(beside)
    beside.replace(manifest)
    for directory in [*(path for path in root.rglob("*") if path.is_dir()), root]:
        flush_to_disk(directory)


def _files(root: Path) -> list[Path]:
    own = {root / names.MANIFEST_NAME, root / f"_{names.MANIFEST_NAME}"}
    return [path for path in sorted(root.rglob("*")) if path.is_file() and path not in own]


def _flush_and_describe(paths: list[Path]) -> dict[Path, dict[str, int]]:
    """Size and checksum of each file; all are on the disk when this returns.

    Checksums are computed while the disk writes, from the page cache: neither holds the interpreter's lock.

    Raises:
        OSError: the first one of any file.
    """
    largest_first = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with (
        ThreadPoolExecutor(_FLUSHING, thread_name_prefix="flush") as disk,
        ThreadPoolExecutor(_READING, thread_name_prefix="checksum") as processor,
    ):
        flushes = {path: disk.submit(flush_to_disk, path) for path in largest_first}
        checksums = {path: processor.submit(_checksum, path) for path in largest_first}
        try:
            for path in largest_first:
                flushes[path].result()
                checksums[path].result()
                drop_from_cache(path)
        except BaseException:
            disk.shutdown(cancel_futures=True)
            processor.shutdown(cancel_futures=True)
            raise
    return {path: {"size": path.stat().st_size, "crc32": checksums[path].result()} for path in paths}


def note_checksum(path: str, crc32: int) -> None:
    """Keep the checksum of a file that was computed while it was written, for the manifest that will list it."""
    _noted[Path(path)] = _stamp(Path(path)), crc32


def _checksum(path: Path) -> int:
    """The checksum that was noted, if the file is unchanged since; otherwise that of its contents."""
    stamp, crc32 = _noted.pop(path, (None, 0))
    return crc32 if stamp is not None and stamp == _stamp(path) else _crc32(path)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What any change to a file changes; None where the file system keeps times in seconds, which may hide one."""
    stat = path.stat()
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    return None if any(time % 10**9 == 0 for time in times) else (stat.st_ino, stat.st_size, *times)


def drop_from_cache(path: str | Path, start: int = 0, end: int = 0) -> None:
    """Free the memory in which the system keeps a large file that is on the disk, or its bytes from `start` to `end`.

    A checkpoint is seldom read again. The memory serves the next one; otherwise it would push out the files of the
    data set.
    """
    if not hasattr(os, "posix_fadvise") or os.path.getsize(path) < _LARGE:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # advice, which some file systems do not take
            os.posix_fadvise(descriptor, start, end and end - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _crc32(path: Path) -> int:
    checksum, buffer = 0, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _crc32_of_list(files: dict[str, Any]) -> int:
    """The manifest's own checksum: damage to it must not look like changed files."""
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def flush_to_disk(path: str | Path) -> None:
    """Flush a file, or a folder's entries, to the disk; for folders, some file systems cannot do it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def read_manifest(folder: str | Path) -> dict[Path, Entry] | None:
    """The manifest's entry for each file; None for a folder without a manifest.

    Raises:
        ValueError: when the manifest cannot be read; names it.
    """
    manifest = Path(folder) / names.MANIFEST_NAME
    if not manifest.is_file():
        return None
    try:
        content: Any = json.loads(manifest.read_text(encoding="utf-8"))
        files = content["files"]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("a file is outside of the folder")
        entries = {manifest.parent / name: Entry(each["size"], each["crc32"]) for name, each in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{manifest} cannot be read") from error
    if "crc32" in content and content["crc32"] != _crc32_of_list(files):  # earlier manifests have no checksum
        raise ValueError(f"{manifest} cannot be read")
    return entries


def why_unusable(folder: str | Path, *, contents: bool = True) -> str | None:
    """Why a run cannot resume from a checkpoint folder, naming the file; None when the checkpoint is whole.

    Args:
        folder: the folder.
        contents: compare the checksums too, which reads all files.
    """
    if not os.path.isfile(os.path.join(folder, names.TRAINER_STATE_NAME)):
        return f"{os.path.join(folder, names.TRAINER_STATE_NAME)} is missing"
    return damage(folder, contents=contents)


def damage(folder: str | Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is unchanged since it was written.

    Args:
        folder: the checkpoint.
        contents: read all files and compare checksums, not only sizes.
    """
    try:
        return _damage(Path(folder), contents)
    except OSError as error:  # the checkpoint is being deleted, or the disk fails
        return _read_failure(folder, error)
    except DamagedCheckpoint as error:  # a file that names others does not name files of the folder
        return str(error).rstrip(".")


def _read_failure(folder: str | Path, error: OSError) -> str:
    return f"{error.filename or folder} cannot be read ({error.strerror or error})"


def _damage(folder: Path, contents: bool) -> str | None:
    try:
        entries = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if entries is None:
        return visible_damage(folder)
    for path, entry in entries.items():
        if not path.is_file():
            return f"{path} is missing"
        if (found := path.stat().st_size) != entry.size:
            return f"{path} has {found} bytes instead of {entry.size}"
        if contents and _crc32(path) != entry.crc32:
            return f"the contents of {path} have changed since it was written"
    return None


def visible_damage(folder: str | Path) -> str | None:
    """What is wrong with a folder that has no manifest, as far as its files show."""
    for path in _files(Path(folder)):
        if has_form(path) and (reason := why_unreadable(path, load=False)):
            return f"{path} {reason}"
    if (shard := missing_shard(str(folder))) is not None:
        return f"{shard} is missing"
    weights = (
        path
        for path in Path(folder).rglob("*")
        if path.name.endswith((".safetensors", "model.bin", "model_fsdp.bin", ".distcp"))
    )
    shards = Path(folder).glob("pytorch_model-*.bin")
    return None if any(weights) or any(shards) or holds_parts(str(folder)) else f"{folder} holds no weights"


def _is_read(path: Path) -> bool:
    """Whether a resumed run reads a file of this name."""
    return bool(_WEIGHTS.search(path.name) or _STATES.match(path.name)) or path.name == names.TRAINER_STATE_NAME


@dataclass(frozen=True)
class Changes:
    """Differences from the manifest: paths within the checkpoint.

    Attributes:
        added: new files.
        removed: missing files.
        resized: files with a different size.
        altered: files with the same size but different contents.
        unreadable: what is wrong with an added or resized file, naming it, or which weights are missing; None when a
            run can resume from the checkpoint.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    unreadable: str | None = None

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.resized or self.altered)

    def __str__(self) -> str:
        kinds = {
            "added": self.added,
            "removed": self.removed,
            "different size": self.resized,
            "same size, different contents": self.altered,
        }
        return "; ".join(f"{kind}: {', '.join(paths)}" for kind, paths in kinds.items() if paths)

    @property
    def can_be_accepted(self) -> bool:
        """Whether `accept` can repair a damaged checkpoint: altered files, or a damaged manifest."""
        unreadable = self.unreadable or ""
        return names.MANIFEST_NAME in unreadable or (bool(self.altered) and not unreadable)

    def damage(self, folder: str | Path) -> str | None:
        """The change that must be damage, naming the file; None if all changes may be intended.

        Converting weights adds, removes and resizes files. Different bytes in a file of the same size are typical of a
        failing disk.
        """
        if self.altered:
            return f"the contents of {Path(folder) / self.altered[0]} have changed since it was written, not its size"
        return self.unreadable


def changes(folder: str | Path, *, only_weights: bool = False) -> Changes:
    """The changes to a checkpoint since it was written; reads all of its files.

    Args:
        folder: the checkpoint; one without a manifest has no changes, but may have damage that its files show.
        only_weights: check only the weights.
    """
    root = Path(folder)
    try:
        entries = read_manifest(root)
        if entries is None:
            return Changes(unreadable=visible_damage(root))
        return _changes(root, entries, _WEIGHTS if only_weights else re.compile(""))
    except ValueError as error:  # `DamagedCheckpoint` too
        return Changes(unreadable=str(error).rstrip("."))
    except OSError as error:
        return Changes(unreadable=_read_failure(folder, error))


def _changes(root: Path, entries: dict[Path, Entry], asked: re.Pattern[str]) -> Changes:
    entries = {path: entry for path, entry in entries.items() if asked.search(path.name)}
    added = [path for path in _files(root) if path not in entries and asked.search(path.name)]
    kept = [path for path in entries if path.is_file()]
    resized = [path for path in kept if path.stat().st_size != entries[path].size]
    altered = [path for path in kept if path not in resized and _crc32(path) != entries[path].crc32]
    read = ((path, why_unreadable(path)) for path in [*resized, *filter(_is_read, added)])
    unreadable = next((f"{path} {reason}" for path, reason in read if reason is not None), None)
    removed = [path for path in entries if path not in kept]
    if unreadable is None and not altered:  # so the index can be trusted
        unreadable = _missing_weights(root, removed)

    def shown(paths: Iterable[Path]) -> tuple[str, ...]:
        return tuple(path.relative_to(root).as_posix() for path in paths)

    return Changes(
        added=shown(added),
        removed=shown(removed),
        resized=shown(resized),
        altered=shown(altered),
        unreadable=unreadable,
    )


def _missing_weights(root: Path, removed: list[Path]) -> str | None:
    """Which weights are missing without a replacement; weights in a subclass's own format are not known here."""
    if (shard := missing_shard(str(root))) is not None:
        return f"{shard} is missing"
    weights = next((path for path in removed if _WEIGHTS.search(path.name)), None)
    return None if weights is None or has_weights(str(root)) else f"{weights} is missing, and no weights replace it"


def accept(folder: str | Path) -> Changes:
    """Accept a checkpoint in its current state: check that its files can be read, and write a new manifest.

    Returns:
        Differences from the old manifest; empty if there was none, or if it could not be read.

    Raises:
        CheckpointNotFound: for a folder that is not a checkpoint, or that lacks weights.
        DamagedCheckpoint: for a file that cannot be read; names it.
    """
    root = Path(folder)
    if not (root / names.TRAINER_STATE_NAME).is_file():
        lacks = f"it lacks {names.TRAINER_STATE_NAME}" if root.is_dir() else "the folder does not exist"
        raise CheckpointNotFound(f"{folder} is not a checkpoint: {lacks}; name a checkpoint-xxx folder.")
    try:
        entries = read_manifest(root) or {}
    except ValueError:
        entries = {}
    found = _changes(root, entries, re.compile("")) if entries else Changes()
    for path in _files(root):
        asked = not entries or path in entries or _is_read(path)
        if asked and has_form(path) and (reason := why_unreadable(path)):
            raise DamagedCheckpoint(f"{path} {reason}: a run cannot resume from it; restore the file.")
    if (reason := _missing_weights(root, [root / name for name in found.removed])) is not None:
        raise CheckpointNotFound(f"{reason}: a run cannot resume from it; restore the file.")
    write_manifest(root)
    return found
