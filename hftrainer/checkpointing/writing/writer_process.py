"""A process that writes checkpoints from copies in memory that it shares with training.

A thread would share the GIL with training. The first large checkpoint starts the process, which imports its modules
while training continues, and ends with the pipe to its parent. It needs no more memory than a thread, since both write
from the same copy of the state.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import mmap
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from hftrainer.checkpointing.writing.files import Entry, HostCopies, describe_large_files

#: Whether processes can share memory without a file system. /dev/shm may be small.
IS_AVAILABLE = hasattr(os, "memfd_create") and bool(sys.executable)
#: Alignment of each storage in bytes.
_ALIGNMENT = 64
#: The code of the process. It receives `sys.path`, without which it might not find our package.
_CODE = """\
import json, signal, sys
# A run that receives one of these signals writes a last checkpoint.
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from hftrainer.checkpointing.writing.writer_process import serve_calls
serve_calls(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass
class _Region:
    """A region of the shared memory: offset in the file, mapping, and pinned storage if any."""

    start: int
    mapping: mmap.mmap
    pinned: torch.UntypedStorage | None = None


class SharedCopies(HostCopies):
    """Copies of states in an anonymous file, which another process can map.

    Each call of `copy` gets a region of the size that it needs in the file. The next checkpoint reuses the regions. A
    call that needs more gets a new region, and the memory of the old one is released.

    Attributes:
        descriptor: the descriptor of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = os.memfd_create("checkpoint")
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self._places: dict[int, tuple[int, int]] = {}
        self._regions: list[_Region] = []
        self._length = self._end = 0

    def begin(self) -> None:
        """Reuse the memory for a new checkpoint, since its contents have been written."""
        super().begin()
        self._places = {}

    def close(self) -> None:
        """Close the file; its memory is released with the copies."""
        self._finalizer()

    def place_of(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Offset and size of a copied storage in the file, in bytes; otherwise None."""
        return self._places.get(storage.data_ptr())

    def _reserve_memory(self, sizes: list[int]) -> None:
        super()._reserve_memory(sizes)
        length = max(sum(_align(size) for size in sizes), 1)
        if self._used_buffers == len(self._regions) or len(self._regions[self._used_buffers].mapping) < length:
            start = self._length
            length = _align(length, mmap.ALLOCATIONGRANULARITY)
            self._length += length
            os.ftruncate(self.descriptor, self._length)
            for old_region in self._regions[self._used_buffers : self._used_buffers + 1]:
                old_region.pinned = None
                old_region.mapping.madvise(mmap.MADV_REMOVE)
            region = _Region(start, mmap.mmap(self.descriptor, length, offset=start))
            self._regions[self._used_buffers : self._used_buffers + 1] = [region]
        self._used_buffers += 1
        self._end = 0

    def _next_buffer(self, size: int, *, pinned: bool) -> torch.UntypedStorage:
        region = self._regions[self._used_buffers - 1]
        if pinned and region.pinned is None:
            region.pinned = _map_storage(region.mapping, 0, len(region.mapping))
            self._pin_buffer(region.pinned)
        storage = _map_storage(region.mapping, self._end, size)
        self._places[storage.data_ptr()] = (region.start + self._end, size)
        self._end += _align(size)
        return storage


def _align(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _map_storage(mapping: mmap.mmap, start: int, size: int) -> torch.UntypedStorage:
    if not size:
        return torch.UntypedStorage(0)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=size).untyped_storage()


class _Pickler(pickle.Pickler):
    """Pickles the location of a tensor's copy instead of its contents."""

    def __init__(self, file: io.BytesIO, copies: SharedCopies) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._copies = copies

    def persistent_id(self, value: Any) -> Any:
        """The location and shape of a copied tensor; None for other values, which are pickled."""
        if type(value) is not torch.Tensor or value.device.type != "cpu":
            return None
        place = self._copies.place_of(value.untyped_storage())
        return place and (place, value.dtype, value.storage_offset(), tuple(value.size()), value.stride())


class _Unpickler(pickle.Unpickler):
    """Reads tensors from the shared memory. Tensors that shared a storage share it again."""

    def __init__(self, data: bytes, mapping: mmap.mmap | None, storages: dict[Any, torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._mapping = mapping
        self._storages = storages

    def persistent_load(self, location: Any) -> torch.Tensor:
        """The tensor at a location."""
        place, dtype, offset, size, stride = location
        assert self._mapping is not None
        if place not in self._storages:
            self._storages[place] = _map_storage(self._mapping, *place)
        return torch.empty(0, dtype=dtype).set_(self._storages[place], offset, size, stride)


class CannotUnpack(Exception):
    """The process cannot start, or cannot unpickle a write: a thread must write this checkpoint."""


class WriterProcess:
    """Starts and uses the process that writes. Only one thread at a time may use it.

    Args:
        copies: the copies that it writes.
    """

    def __init__(self, copies: SharedCopies) -> None:
        self._copies = copies
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._has_answered = False

    def pack(self, write: Callable[[Any], Any], values: Any) -> bytes:
        """Pickle a call of `write(values)` for `run`. An object of the script may raise any error."""
        buffer = io.BytesIO()
        _Pickler(buffer, self._copies).dump((write, values))
        return buffer.getvalue()

    def run(self, calls: Sequence[bytes], staging_path: Path) -> dict[str, Entry]:
        """Run the calls in the process. Errors of the calls are raised here.

        Args:
            calls: what `pack` returned; all are unpacked before the first one runs.
            staging_path: the folder into which they write.

        Returns:
            Path → manifest entry, for the large files in the folder; these are on the disk.

        Raises:
            CannotUnpack: if the process cannot unpack the calls.
            OSError: if the process has ended.
        """
        if self._pipe is None:
            self._start_process()
        assert self._pipe is not None
        try:
            self._pipe.send((list(calls), str(staging_path)))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            status = self._end_process()
            exit_text = f"by signal {-status}" if status < 0 else f"with status {status}"
            if not self._has_answered:
                raise CannotUnpack(f"it has ended {exit_text}") from None
            raise OSError(
                errno.EIO, f"the process that writes checkpoints has ended {exit_text}", str(staging_path)
            ) from None
        self._has_answered = True
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _start_process(self) -> None:
        parent_end, child_end = Pipe()
        files = (self._copies.descriptor, child_end.fileno())
        command = [sys.executable, "-c", _CODE, json.dumps(sys.path), *map(str, files)]
        try:
            # Ctrl-C in a terminal does not reach a new session.
            self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            parent_end.close()
            raise CannotUnpack(f"it cannot be started ({error})") from None
        finally:
            child_end.close()
        self._pipe = parent_end
        self._has_answered = False

    def _end_process(self) -> int:
        """End the process, and return its exit status."""
        assert self._pipe is not None and self._process is not None
        # The process may have ended already.
        with contextlib.suppress(OSError):
            # Closing the pipe is not enough: forked processes, such as a loader's workers, hold a copy of its end.
            self._pipe.send(None)
        self._pipe.close()
        status = self._process.wait()
        self._pipe = self._process = None
        return status

    def close(self) -> None:
        """End the process, if it is running."""
        if self._pipe is not None:
            self._end_process()


# ---- In the process --------------------------------------------------------------------------------------------------


def serve_calls(descriptor: int, pipe: int) -> None:
    """Answer calls until the pipe is closed.

    Args:
        descriptor: descriptor of the shared memory.
        pipe: descriptor of the pipe.
    """
    # Training has priority.
    os.nice(10)
    torch.set_num_threads(1)
    connection = Connection(pipe)
    while True:
        try:
            if (request := connection.recv()) is None:
                return
            connection.send(_call_or_return_error(descriptor, *request))
        # The run has ended.
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _call_or_return_error(descriptor: int, calls: list[bytes], staging_path: str) -> dict[str, Entry] | Exception:
    """The entries of the large files, or the error (RuntimeError if not picklable)."""
    try:
        return _run_calls(descriptor, calls, staging_path)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        # Unpickling fails if the class of the exception takes other arguments.
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error


def _run_calls(descriptor: int, calls: list[bytes], staging_path: str) -> dict[str, Entry]:
    mapping = mmap.mmap(descriptor, 0) if os.fstat(descriptor).st_size else None
    storages: dict[Any, torch.UntypedStorage] = {}
    try:
        writes = [_Unpickler(data, mapping, storages).load() for data in calls]
    # An object of the script may raise anything.
    except Exception as error:
        raise CannotUnpack(f"{type(error).__name__}: {error}") from None
    for write, values in writes:
        write(values)
    return describe_large_files(Path(staging_path))
