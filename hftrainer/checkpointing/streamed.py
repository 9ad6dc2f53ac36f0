"""Writes a large file with little of it in memory at a time: a thread flushes, checks and drops what is written."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from typing import Any

import torch

from hftrainer.checkpointing import manifest

#: Bytes after which what was written is flushed; smaller files are left to the manifest.
WINDOW = 1 << 26
#: Bytes that are written, or read, at once.
_PART = 1 << 20
#: Longer than a tick of the clocks that file systems take their times from, in seconds.
_TICK = 0.02


def save(value: Any, path: str) -> None:
    """`torch.save`, as a stream: threads that train can run meanwhile, unlike when torch writes to a path.

    Raises:
        OSError: when the file cannot be written, or flushed.
    """
    file: Any = _StreamedFile(path)
    try:
        torch.save(value, file)
    except BaseException as error:
        file.abandon()
        # torch ends its archive all the same, and raises that this fails too.
        raise (file.error or error) from None
    file.finish()


class _StreamedFile:
    """A file for `torch.save`, which writes it from the first byte to the last; to be finished, or abandoned.

    Pages of the system's cache are used again for what is written next. A file as large as an optimizer's state would
    otherwise need as much memory, and be limited by how fast the system finds it.

    Attributes:
        error: the first error of a write, or of the other thread.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: BaseException | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._written = self._handed_over = 0
        self._flusher: _Flusher | None = None

    def write(self, data: Any) -> int:
        """Write all of it; raises what the other thread has found too."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[self._write(left[:_PART]) :]
        except BaseException as error:
            self.error = self.error or error
            raise
        return size

    def _write(self, part: memoryview) -> int:
        count = self._file.write(part)
        self._written += count
        if self._written - self._handed_over >= WINDOW:
            self._flusher = self._flusher or _Flusher(self.path)
            self._flusher.take(self._written)
            self._handed_over = self._written
        return count

    def flush(self) -> None:
        """Nothing is buffered here."""

    def finish(self) -> None:
        """Close the file; one that was flushed in parts is then on the disk, and its checksum is known."""
        self._file.close()
        if self._flusher is not None:
            checksum = self._flusher.end(self._written)
            time.sleep(_TICK)  # so that any later change has another time
            manifest.note_checksum(self.path, checksum)

    def abandon(self) -> None:
        """Close the file after another error."""
        self._file.close()
        if self._flusher is not None:
            self._flusher.stop()


class _Flusher:
    """A thread that flushes a growing file, reads it for its checksum, and drops it from the system's cache."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sizes: queue.Queue[int | None] = queue.Queue(maxsize=1)  # so that writing waits for the disk
        self._checksum = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
        self._thread.start()

    def take(self, size: int) -> None:
        """Flush the first `size` bytes, as soon as those before are; raises an earlier error."""
        self._sizes.put(size)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Wait for the thread."""
        self._sizes.put(None)
        self._thread.join()

    def end(self, size: int) -> int:
        """Flush the rest, and wait; returns the checksum, or raises the thread's error."""
        self._sizes.put(size)
        self.stop()
        if self._error is not None:
            raise self._error
        return self._checksum

    def _run(self) -> None:
        done = 0
        while (size := self._sizes.get()) is not None:
            if self._error is None:  # after one, only make room for what is handed over
                try:
                    self._flush(done, size)
                except BaseException as error:
                    self._error = error
                done = size

    def _flush(self, start: int, end: int) -> None:
        manifest.flush_to_disk(self._path)
        with open(self._path, "rb", buffering=0) as file:
            place = file.seek(start)
            while place < end:
                data = file.read(min(_PART, end - place))
                if not data:
                    raise OSError(f"{self._path} has {place} bytes instead of {end}")
                self._checksum = zlib.crc32(data, self._checksum)
                place += len(data)
        manifest.drop_from_cache(self._path, start, end)
