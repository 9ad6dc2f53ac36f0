"""The files of a checkpoint: written, flushed to the disk, and listed in the manifest with sizes and checksums.

The manifest is the last file written, and covers all others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from hftrainer.checkpointing import names
from hftrainer.errors import DamagedCheckpoint

#: Bytes that are read or written at once: they stay in a processor's cache between reading and checksum.
_CHUNK = 1 << 20
#: Threads that wait for the disk, and threads that compute checksums.
_FLUSHING, _READING = 4, 2
#: Files of at least this many bytes leave the page cache once they are on the disk.
_LARGE = 1 << 22
#: Copies of at least this many bytes get separate, pinned pages, to which a GPU copies faster.
_PINNED = 1 << 20
#: Types of tensors that are a view of their storage; others may be made of several tensors.
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
#: `save` flushes a file whenever this many bytes were written; smaller files are flushed with the manifest.
FLUSH_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Entry:
    """The manifest's entry for a file: its size in bytes, and the CRC-32 of its contents."""

    size: int
    crc32: int


# ---- Copying ---------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies of states in CPU memory, which are written while training changes the originals.

    The memory is kept for the next checkpoint. `DefaultStager` of torch.distributed.checkpoint does the same, but older
    releases of torch do not have it, and that of torch 2.11 works only once.

    Attributes:
        size: bytes copied since `begin`.
    """

    def __init__(self) -> None:
        self.size = self._used = 0
        self._buffers: list[torch.UntypedStorage] = []

    def begin(self) -> None:
        """Reuse the memory, whose contents have been written."""
        self.size = self._used = 0

    def close(self) -> None:
        """Release what is not memory."""

    def copy(self, values: Any) -> Any:
        """A deep copy; tensors that share memory share it in the copy too."""
        memo: dict[int, Any] = {}
        plain = []
        for tensor in _tensors(values):
            if type(tensor) in _WITH_STORAGE and tensor.layout == torch.strided:
                plain.append((tensor, tensor.untyped_storage()))
            else:
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
        originals = {storage.data_ptr(): storage for _, storage in plain}
        self._reserve([storage.nbytes() for storage in originals.values()])
        storages = {key: self._filled(storage) for key, storage in originals.items()}
        for tensor, storage in plain:
            copied, kept = torch.empty(0, dtype=tensor.dtype), storages[storage.data_ptr()]
            memo[id(tensor)] = copied.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())
        for device in {tensor.device for tensor in _tensors(values) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copy.deepcopy(values, memo)

    def _reserve(self, sizes: list[int]) -> None:
        """Prepare to copy storages of these sizes, in bytes."""
        self.size += sum(sizes)

    def _filled(self, original: torch.UntypedStorage) -> torch.UntypedStorage:
        on_gpu = original.device.type == "cuda"
        return self._buffer(original.nbytes(), pinned=on_gpu).copy_(original, non_blocking=on_gpu)

    def _buffer(self, size: int, *, pinned: bool) -> torch.UntypedStorage:
        """Memory of exactly this size, reused if possible; torch's own pinned memory may be up to twice as large."""
        if self._used >= len(self._buffers) or self._buffers[self._used].nbytes() != size:
            del self._buffers[self._used :]
            self._buffers.append(torch.UntypedStorage(size))
            if pinned and size >= _PINNED:
                self._pin(self._buffers[-1])
        self._used += 1
        return self._buffers[self._used - 1]

    @staticmethod
    def _pin(buffer: torch.UntypedStorage) -> None:
        runtime, size = torch.cuda.cudart(), buffer.nbytes()
        # If the system limits pinned memory, copying is only slower.
        if int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
            weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)


# ---- Writing ---------------------------------------------------------------------------------------------------------


def save(value: Any, path: str) -> Entry | None:
    """Call `torch.save` with a stream, so that other threads run meanwhile; they do not if torch gets a path.

    Returns:
        The manifest's entry of a large file, which is then on the disk; None for a smaller file.

    Raises:
        OSError: when the file cannot be written, or flushed.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as thread, open(path, "wb", buffering=0) as opened:
        file = _StreamedFile(path, opened, thread)
        try:
            torch.save(value, cast("BinaryIO", file))
            return file.finish()
        except BaseException as error:
            # After an error torch still tries to finish its archive, and raises a second error: report the first one.
            raise (file.error or error) from None


class _StreamedFile:
    """A file for `torch.save`: a thread flushes each window, computes its checksum and drops it from the page cache.

    Meanwhile the next window is written. Otherwise a file as large as an optimizer's state would need as much memory
    in the page cache.

    Attributes:
        error: the first error of a write, or of the thread.
    """

    def __init__(self, path: str, opened: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self.error: BaseException | None = None
        self._path, self._opened, self._thread = path, opened, thread
        self._written = self._handed_over = 0
        self._checksum: Future[int] | None = None

    def write(self, data: Any) -> int:
        """Write all of the data; also raises an error of the thread."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                count = self._opened.write(left[:_CHUNK])
                left = left[count:]
                self._written += count
                if self._written - self._handed_over >= FLUSH_BYTES:
                    self._submit_flush()
        except BaseException as error:
            self.error = self.error or error
            raise
        return size

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""

    def finish(self) -> Entry | None:
        """Wait until a large file is on the disk."""
        if self._checksum is None:
            return None
        self._submit_flush()
        return Entry(self._written, self._checksum.result())

    def _submit_flush(self) -> None:
        """Let the thread flush the data written since the last call, once it has flushed the previous window."""
        checksum = 0 if self._checksum is None else self._checksum.result()
        self._checksum = self._thread.submit(self._flush, self._handed_over, self._written, checksum)
        self._handed_over = self._written

    def _flush(self, start: int, end: int, checksum: int) -> int:
        flush_to_disk(self._path)
        checksum = crc32_of_file(self._path, start, end, checksum)
        drop_from_cache(self._path, start, end)
        return checksum


def flush_to_disk(path: str | Path) -> None:
    """Flush a file or a folder's entries to the disk.

    Errors for folders are ignored, since some file systems cannot flush them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def drop_from_cache(path: str | Path, start: int = 0, end: int = 0) -> None:
    """Drop a large file, or its bytes from `start` to `end`, from the page cache. It must be on the disk.

    A checkpoint is rarely read again, and would evict the files of the data set from the cache.
    """
    if not hasattr(os, "posix_fadvise") or os.path.getsize(path) < _LARGE:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems do not support this advice.
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, end and end - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def crc32_of_file(path: str | Path, start: int = 0, end: int | None = None, checksum: int = 0) -> int:
    """The CRC-32 of a file; or `checksum`, continued with the bytes from `start` to `end`."""
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        position = file.seek(start)
        while end is None or position < end:
            count = file.readinto(buffer if end is None else buffer[: end - position])
            if not count:
                break
            checksum = zlib.crc32(buffer[:count], checksum)
            position += count
    if end is not None and position < end:
        raise OSError(f"{path} has {position} bytes instead of {end}")
    return checksum


# ---- The manifest ----------------------------------------------------------------------------------------------------


def list_files(folder: Path) -> list[str]:
    """The names of all files below a folder, except the manifest."""
    own = {names.MANIFEST_NAME, f"_{names.MANIFEST_NAME}"}
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in found if name not in own]


def write_manifest(folder: Path, written: Mapping[str, Entry] | None = None) -> None:
    """Write the manifest of all files in a folder, and flush them to the disk.

    Args:
        folder: the checkpoint.
        written: path → entry, for files whose checksum was computed while they were written.
    """
    entries = _flush_and_describe([folder / name for name in list_files(folder)], written or {})
    files = {path.relative_to(folder).as_posix(): dataclasses.asdict(entry) for path, entry in entries.items()}
    manifest = folder / names.MANIFEST_NAME
    # Write a temporary file, so that a killed process leaves the old manifest intact.
    beside = manifest.with_name(f"_{manifest.name}")
    content = {"files": files, "crc32": crc32_of_list(files)}
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(beside)
    beside.replace(manifest)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush_to_disk(directory)


def _flush_and_describe(paths: list[Path], written: Mapping[str, Entry]) -> dict[Path, Entry]:
    """The entry of each file; all are on the disk when this returns.

    Checksums are computed from the page cache while the disk writes; neither holds the GIL.

    Raises:
        OSError: the first one of any file.
    """
    sizes = {path: path.stat().st_size for path in paths}

    def checksum(path: Path) -> int:
        entry = written.get(str(path))
        return entry.crc32 if entry is not None and entry.size == sizes[path] else crc32_of_file(path)

    largest_first, found = sorted(paths, key=lambda path: -sizes[path]), {}
    with (
        ThreadPoolExecutor(_FLUSHING, thread_name_prefix="flush") as disk,
        ThreadPoolExecutor(_READING, thread_name_prefix="checksum") as processor,
    ):
        flushed, checksums = disk.map(flush_to_disk, largest_first), processor.map(checksum, largest_first)
        for path, _, crc32 in zip(largest_first, flushed, checksums, strict=True):
            drop_from_cache(path)
            found[path] = Entry(sizes[path], crc32)
    return {path: found[path] for path in paths}


def describe_large_files(folder: Path) -> dict[str, Entry]:
    """Path → entry of each large file in a folder; all of them are on the disk when this returns."""
    paths = [path for name in list_files(folder) if (path := folder / name).stat().st_size >= _LARGE]
    return {str(path): entry for path, entry in _flush_and_describe(paths, {}).items()}


def crc32_of_list(files: dict[str, Any]) -> int:
    """The manifest's own checksum: damage to it must not look like changed files."""
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """The manifest's entry for each file name; None for a folder without a manifest.

    Raises:
        DamagedCheckpoint: when the manifest cannot be read; the error names it.
    """
    manifest = folder / names.MANIFEST_NAME
    return parse_manifest(manifest.read_bytes(), str(manifest)) if manifest.is_file() else None


def parse_manifest(data: bytes, path: str) -> dict[str, Entry]:
    """The entries of a manifest; DamagedCheckpoint, naming its path, if it cannot be read."""
    try:
        content: Any = json.loads(data.decode())
        files = content["files"]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("a file is outside of the folder")
        if "crc32" in content and content["crc32"] != crc32_of_list(files):  # earlier manifests have no checksum
            raise ValueError("the list has another checksum")
        return {name: Entry(each["size"], each["crc32"]) for name, each in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read") from error
