"""A process that writes checkpoints, from copies in memory that it shares with the process that trains.

A thread shares Python's lock with training. The process is started by the first large checkpoint, imports what it
needs while training goes on, and ends with the pipe to its parent. What it reads is the one copy of the state that a
thread would need too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
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

from hftrainer.checkpointing.files import Entry, HostCopies, describe_large_files

logger = logging.getLogger(__name__)

#: Whether the system has memory that processes share without a file system; that of /dev/shm may be small.
IS_AVAILABLE = hasattr(os, "memfd_create") and bool(sys.executable)
#: Bytes of which the place of each storage is a multiple.
_ALIGNED = 64
#: What the process runs. It gets the folders of modules, in which it might not find ours itself.
_CODE = """\
import json, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # a run that is asked to end writes a last checkpoint
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from hftrainer.checkpointing.writer_process import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass
class _Part:
    """A part of the shared memory: its beginning in the file, its mapping, and that as pinned memory, if it is."""

    start: int
    mapped: mmap.mmap
    pinned: torch.UntypedStorage | None = None


class SharedCopies(HostCopies):
    """Copies of states in an anonymous file, which another process can map.

    Each call of `copy` gets a part of the file, of the size that it needs; the next checkpoint uses the parts again.
    One that needs more gets a new part, and the memory of the old one is released.

    Attributes:
        file: its descriptor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.file = os.memfd_create("checkpoint")
        self._closing = weakref.finalize(self, os.close, self.file)
        self._places: dict[int, tuple[int, int]] = {}
        self._parts: list[_Part] = []
        self._length = self._end = 0

    def begin(self) -> None:
        """Reuse the memory, whose contents have been written."""
        super().begin()
        self._places = {}

    def close(self) -> None:
        """Close the file; its memory is released with the copies."""
        self._closing()

    def place(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Where a copied storage begins in the file, and its size, in bytes; None for any other storage."""
        return self._places.get(storage.data_ptr())

    def _reserve(self, sizes: list[int]) -> None:
        super()._reserve(sizes)
        needed = max(sum(_aligned(size) for size in sizes), 1)
        if self._used == len(self._parts) or len(self._parts[self._used].mapped) < needed:
            start, needed = self._length, _aligned(needed, mmap.ALLOCATIONGRANULARITY)
            self._length += needed
            os.ftruncate(self.file, self._length)
            for replaced in self._parts[self._used : self._used + 1]:
                replaced.pinned = None
                replaced.mapped.madvise(mmap.MADV_REMOVE)
            self._parts[self._used : self._used + 1] = [_Part(start, mmap.mmap(self.file, needed, offset=start))]
        self._used += 1
        self._end = 0

    def _buffer(self, size: int, *, pinned: bool) -> torch.UntypedStorage:
        part = self._parts[self._used - 1]
        if pinned and part.pinned is None:
            part.pinned = _storage_in(part.mapped, 0, len(part.mapped))
            self._pin(part.pinned)
        storage = _storage_in(part.mapped, self._end, size)
        self._places[storage.data_ptr()] = (part.start + self._end, size)
        self._end += _aligned(size)
        return storage


def _aligned(size: int, to: int = _ALIGNED) -> int:
    return -(-size // to) * to


def _storage_in(mapped: mmap.mmap, start: int, size: int) -> torch.UntypedStorage:
    if not size:
        return torch.UntypedStorage(0)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=size).untyped_storage()


class _Pickler(pickle.Pickler):
    """Writes where a tensor's copy is, in place of its contents."""

    def __init__(self, file: io.BytesIO, copies: SharedCopies) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._copies = copies

    def persistent_id(self, value: Any) -> Any:
        """The place and the shape of a copied tensor; None for all else, which is pickled."""
        if type(value) is not torch.Tensor or value.device.type != "cpu":
            return None
        place = self._copies.place(value.untyped_storage())
        return place and (place, value.dtype, value.storage_offset(), tuple(value.size()), value.stride())


class _Unpickler(pickle.Unpickler):
    """Reads tensors from the shared memory; those that share a storage share it here too."""

    def __init__(self, data: bytes, mapped: mmap.mmap | None, storages: dict[Any, torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._mapped, self._storages = mapped, storages

    def persistent_load(self, known: Any) -> torch.Tensor:
        """The tensor at a place."""
        place, dtype, offset, size, stride = known
        assert self._mapped is not None
        if place not in self._storages:
            self._storages[place] = _storage_in(self._mapped, *place)
        return torch.empty(0, dtype=dtype).set_(self._storages[place], offset, size, stride)


class CannotUnpack(Exception):
    """The process cannot start, or cannot import a class of the script: a thread must write this checkpoint."""


class WriterProcess:
    """The process, from the side of training. Used by one thread at a time.

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
        packed = io.BytesIO()
        _Pickler(packed, self._copies).dump((write, values))
        return packed.getvalue()

    def run(self, calls: Sequence[bytes], folder: Path) -> dict[str, Entry]:
        """Make the calls in the process.

        Args:
            calls: what `pack` returned; all are unpacked before the first is made.
            folder: into which they write.

        Returns:
            Path → the manifest's entry, for the large files in the folder, which are on the disk.

        Raises:
            CannotUnpack: if the process cannot unpack them.
            OSError: if the process has ended; all errors that the calls raise.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((list(calls), str(folder)))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            status = self._end()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            if not self._has_answered:
                raise CannotUnpack(f"it has ended {how}") from None
            raise OSError(errno.EIO, f"the process that writes checkpoints has ended {how}", str(folder)) from None
        self._has_answered = True
        if isinstance(answer, BaseException):
            raise answer
        entries: dict[str, Entry] = answer
        return entries

    def _start(self) -> None:
        ours, theirs = Pipe()
        given = (self._copies.file, theirs.fileno())
        words = [sys.executable, "-c", _CODE, json.dumps(sys.path), *map(str, given)]
        try:
            # In a session of its own, which Ctrl-C in a terminal does not reach.
            self._process = subprocess.Popen(words, pass_fds=given, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            ours.close()
            raise CannotUnpack(f"it cannot be started ({error})") from None
        finally:
            theirs.close()
        self._pipe, self._has_answered = ours, False

    def _end(self) -> int:
        """End the process; returns its status."""
        assert self._pipe is not None and self._process is not None
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send(None)  # closing is not enough: forked processes, such as a loader's, hold the pipe too
        self._pipe.close()
        status = self._process.wait()
        self._pipe = self._process = None
        return status

    def close(self) -> None:
        """End the process, if it is running."""
        if self._pipe is not None:
            self._end()


# ---- In the process --------------------------------------------------------------------------------------------------


def serve(file: int, pipe: int) -> None:
    """Answer calls until the pipe is closed.

    Args:
        file: descriptor of the shared memory.
        pipe: descriptor of the pipe.
    """
    os.nice(10)  # training comes first
    torch.set_num_threads(1)
    connection = Connection(pipe)
    while True:
        try:
            if (asked := connection.recv()) is None:
                return
            connection.send(_answer(file, *asked))
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the run has ended
            return


def _answer(file: int, calls: list[bytes], folder: str) -> dict[str, Entry] | Exception:
    """The entries of the large files, or the error; one that cannot be pickled as a RuntimeError with its text."""
    try:
        return _make(file, calls, folder)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # classes of libraries, with any parameters
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error


def _make(file: int, calls: list[bytes], folder: str) -> dict[str, Entry]:
    mapped = mmap.mmap(file, 0) if os.fstat(file).st_size else None
    storages: dict[Any, torch.UntypedStorage] = {}
    try:
        unpacked = [_Unpickler(data, mapped, storages).load() for data in calls]
    except Exception as error:  # any object of the script may raise anything
        raise CannotUnpack(f"{type(error).__name__}: {error}") from None
    for write, values in unpacked:
        write(values)
    return describe_large_files(Path(folder))
