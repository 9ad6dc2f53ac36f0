"""Writes a checkpoint's files, flushes them, and lists sizes and checksums in the manifest.

The manifest is written last and lists all other files.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from hftrainer.checkpointing import layout
from hftrainer.errors import DamagedCheckpoint, FolderNotCreated, NotAFolder

#: Bytes read or written at once. They stay in the processor's cache until their checksum is computed.
_CHUNK = 1 << 20
#: Number of threads that flush files, and of threads that compute checksums.
_FLUSH_THREADS, _CHECKSUM_THREADS = 4, 2
#: Files of at least this many bytes leave the page cache once they are on the disk.
_LARGE = 1 << 22
#: Copies of at least this many bytes get separate, pinned pages, to which a GPU copies faster.
_PINNED_BYTES = 1 << 20
#: Tensor types that view one storage. Other types may consist of several tensors.
_STORAGE_TYPES = (torch.Tensor, torch.nn.Parameter)
#: `save` flushes a file after each block of this many bytes. `write_manifest` flushes smaller files.
FLUSH_BYTES = 1 << 26


def make_output_dir(output_dir: str) -> None:
    """Create a folder that the script passes as `output_dir`, with its parents, unless it exists.

    Raises:
        NotAFolder: if the path or one of its parents is a file.
        FolderNotCreated: for any other reason.
    """
    try:
        os.makedirs(output_dir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotAFolder(
            f"output_dir={output_dir!r}: this path, or one of its parents, is a file. Pass a folder, which need "
            "not exist."
        ) from None
    except OSError as error:
        remedy = ", or change its permissions" if isinstance(error, PermissionError) else ""
        reason = f"output_dir={output_dir!r} cannot be created: {error.strerror}. Pass another folder{remedy}."
        raise FolderNotCreated(error.errno, reason) from None


def check_writable(output_dir: str) -> None:
    """Raise FolderNotCreated if nothing can be saved in a folder that exists, `output_dir`."""
    if os.path.isdir(output_dir) and not os.access(output_dir, os.W_OK | os.X_OK):
        reason = f"output_dir={output_dir!r} cannot be written to: no permission, or a read-only disk."
        raise FolderNotCreated(errno.EACCES, f"{reason} Pass another folder, or change its permissions.")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file's entry in the manifest: size in bytes and CRC-32 of the contents."""

    size: int
    crc32: int


# ---- Copying ---------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies of states in CPU memory, written while training changes the originals.

    The next checkpoint reuses the memory. `DefaultStager` of torch.distributed.checkpoint does the same, but older
    torch releases lack it, and that of torch 2.11 works only once.

    Attributes:
        size: bytes copied since `begin`.
    """

    def __init__(self) -> None:
        self.size = self._used_buffers = 0
        self._buffers: list[torch.UntypedStorage] = []

    def begin(self) -> None:
        """Reuse the memory for a new checkpoint, since its contents have been written."""
        self.size = self._used_buffers = 0

    def close(self) -> None:
        """Release resources other than memory."""

    def copy(self, values: Any) -> Any:
        """A deep copy, in which tensors share memory as in the original."""
        memo: dict[int, Any] = {}
        views = []
        for tensor in _iterate_tensors(values):
            if type(tensor) in _STORAGE_TYPES and tensor.layout == torch.strided:
                views.append((tensor, tensor.untyped_storage()))
            else:
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
        originals = {storage.data_ptr(): storage for _, storage in views}
        self._reserve_memory([storage.nbytes() for storage in originals.values()])
        storages = {key: self._copy_storage(storage) for key, storage in originals.items()}
        for tensor, storage in views:
            tensor_copy = torch.empty(0, dtype=tensor.dtype)
            storage_copy = storages[storage.data_ptr()]
            memo[id(tensor)] = tensor_copy.set_(storage_copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        for device in {tensor.device for tensor in _iterate_tensors(values) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copy.deepcopy(values, memo)

    def _reserve_memory(self, sizes: list[int]) -> None:
        """Prepare for copies of storages of these sizes, in bytes."""
        self.size += sum(sizes)

    def _copy_storage(self, original: torch.UntypedStorage) -> torch.UntypedStorage:
        on_gpu = original.device.type == "cuda"
        return self._next_buffer(original.nbytes(), pinned=on_gpu).copy_(original, non_blocking=on_gpu)

    def _next_buffer(self, size: int, *, pinned: bool) -> torch.UntypedStorage:
        """Memory of exactly this size, reused if possible. torch may pin up to twice as much."""
        if self._used_buffers >= len(self._buffers) or self._buffers[self._used_buffers].nbytes() != size:
            del self._buffers[self._used_buffers :]
            self._buffers.append(torch.UntypedStorage(size))
            if pinned and size >= _PINNED_BYTES:
                self._pin_buffer(self._buffers[-1])
        self._used_buffers += 1
        return self._buffers[self._used_buffers - 1]

    @staticmethod
    def _pin_buffer(buffer: torch.UntypedStorage) -> None:
        runtime = torch.cuda.cudart()
        size = buffer.nbytes()
        # If the system limits pinned memory, copying is only slower.
        if int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
            weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False


def _iterate_tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _iterate_tensors(value)


# ---- Writing ---------------------------------------------------------------------------------------------------------


def save(value: Any, path: str) -> Entry | None:
    """Call `torch.save` with a stream, which lets other threads run; a path would not.

    Returns:
        The manifest entry of a large file, which has been flushed; None for a smaller file.

    Raises:
        OSError: if the file cannot be written or flushed.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as thread, open(path, "wb", buffering=0) as raw_file:
        file = _StreamedFile(path, raw_file, thread)
        try:
            torch.save(value, cast("BinaryIO", file))
            return file.finish()
        except BaseException as error:
            # After an error torch still tries to finish its archive, which raises a second error. Report the first.
            raise (file.error or error) from None


class _StreamedFile:
    """A file for `torch.save` that a thread flushes window by window.

    The thread also computes each window's checksum and drops the window from the page cache, while the next one is
    written. Otherwise a large file, such as an optimizer's state, would need as much memory in the page cache.

    Attributes:
        error: the first error of a write or of the thread.
    """

    def __init__(self, path: str, raw_file: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self.error: BaseException | None = None
        self._path = path
        self._raw_file = raw_file
        self._thread = thread
        self._written_bytes = self._submitted_bytes = 0
        self._checksum: Future[int] | None = None

    def write(self, data: Any) -> int:
        """Write all of the data, and raise the thread's error if it has failed."""
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        try:
            while remaining:
                num_bytes = self._raw_file.write(remaining[:_CHUNK])
                remaining = remaining[num_bytes:]
                self._written_bytes += num_bytes
                if self._written_bytes - self._submitted_bytes >= FLUSH_BYTES:
                    self._submit_flush()
        except BaseException as error:
            self.error = self.error or error
            raise
        return size

    def flush(self) -> None:
        """Do nothing, since the file has no buffer."""

    def finish(self) -> Entry | None:
        """Wait until a large file is on the disk, and return its entry; otherwise None."""
        if self._checksum is None:
            return None
        self._submit_flush()
        return Entry(self._written_bytes, self._checksum.result())

    def _submit_flush(self) -> None:
        """Wait for the previous window, then let the thread flush the data written since."""
        checksum = 0 if self._checksum is None else self._checksum.result()
        self._checksum = self._thread.submit(self._flush_range, self._submitted_bytes, self._written_bytes, checksum)
        self._submitted_bytes = self._written_bytes

    def _flush_range(self, start: int, end: int, checksum: int) -> int:
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
    """Drop a large file, or its bytes from `start` to `end`, from the page cache.

    The file must be flushed. A checkpoint is rarely read again, and would evict the dataset's files from the cache.
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
    """The CRC-32 of a file; or of its bytes from `start` to `end`, continuing `checksum`."""
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        offset = file.seek(start)
        while end is None or offset < end:
            num_bytes = file.readinto(buffer if end is None else buffer[: end - offset])
            if not num_bytes:
                break
            checksum = zlib.crc32(buffer[:num_bytes], checksum)
            offset += num_bytes
    if end is not None and offset < end:
        raise OSError(f"{path} has {offset} bytes instead of {end}")
    return checksum


def link_or_copy(source: Path, target: Path, *, link: bool = True) -> None:
    """Hard-link a file into a folder, which is created, or copy it where the file system has no hard links.

    A symbolic link stays one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        # The copy below reports a missing file.
        with contextlib.suppress(OSError, NotImplementedError):
            os.link(source, target, follow_symlinks=False)
            return
    shutil.copy2(source, target, follow_symlinks=False)


# ---- The manifest ----------------------------------------------------------------------------------------------------


def list_files(folder: Path) -> list[str]:
    """The names of all files below a folder, except the manifest."""
    manifests = {layout.MANIFEST_NAME, f"_{layout.MANIFEST_NAME}"}
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in paths if name not in manifests]


def write_manifest(folder: Path, known_entries: Mapping[str, Entry] | None = None) -> None:
    """Write the manifest of all files in a folder, and flush them to the disk.

    Args:
        folder: the checkpoint.
        known_entries: path → entry, for files whose checksum was computed while they were written.
    """
    entries = _flush_and_describe([folder / name for name in list_files(folder)], known_entries or {})
    files = {path.relative_to(folder).as_posix(): dataclasses.asdict(entry) for path, entry in entries.items()}
    manifest = folder / layout.MANIFEST_NAME
    # Write a temporary file, so that a killed process leaves the old manifest intact.
    temporary = manifest.with_name(f"_{manifest.name}")
    content = {"files": files, "crc32": crc32_of_list(files)}
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(temporary)
    temporary.replace(manifest)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush_to_disk(directory)


def _flush_and_describe(paths: list[Path], known_entries: Mapping[str, Entry]) -> dict[Path, Entry]:
    """Flush files to the disk, and return the entry of each.

    Checksums are computed from the page cache while the disk writes. Neither holds the GIL.

    Raises:
        OSError: the first error of any file.
    """
    sizes = {path: path.stat().st_size for path in paths}

    def checksum(path: Path) -> int:
        entry = known_entries.get(str(path))
        return entry.crc32 if entry is not None and entry.size == sizes[path] else crc32_of_file(path)

    largest_first = sorted(paths, key=lambda path: -sizes[path])
    entries = {}
    with (
        ThreadPoolExecutor(_FLUSH_THREADS, thread_name_prefix="flush") as disk,
        ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="checksum") as processor,
    ):
        flushes = disk.map(flush_to_disk, largest_first)
        checksums = processor.map(checksum, largest_first)
        for path, _, crc32 in zip(largest_first, flushes, checksums, strict=True):
            drop_from_cache(path)
            entries[path] = Entry(sizes[path], crc32)
    return {path: entries[path] for path in paths}


def describe_large_files(folder: Path) -> dict[str, Entry]:
    """Flush the large files in a folder to the disk, and return path → entry."""
    paths = [path for name in list_files(folder) if (path := folder / name).stat().st_size >= _LARGE]
    return {str(path): entry for path, entry in _flush_and_describe(paths, {}).items()}


def crc32_of_list(files: dict[str, Any]) -> int:
    """The manifest's own checksum. Damage to the manifest must not look like changed files."""
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """File name → manifest entry; None if the folder has no manifest.

    Raises:
        DamagedCheckpoint: if the manifest cannot be read; the error names it.
    """
    manifest = folder / layout.MANIFEST_NAME
    return parse_manifest(manifest.read_bytes(), str(manifest)) if manifest.is_file() else None


def parse_manifest(data: bytes, path: str) -> dict[str, Entry]:
    """The entries of a manifest. Raises DamagedCheckpoint, naming `path`, if it cannot be read."""
    try:
        content: Any = json.loads(data.decode())
        files = content["files"]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError("a file is outside of the folder")
        # Manifests of earlier releases have no checksum.
        if "crc32" in content and content["crc32"] != crc32_of_list(files):
            raise ValueError("the list has another checksum")
        return {name: Entry(entry["size"], entry["crc32"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read") from error
