"""`CheckpointWriter`: writes checkpoints synchronously, or in the background from copies in CPU memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hftrainer.base.part import temporary_attributes
from hftrainer.checkpointing.writing import files, writer_process
from hftrainer.checkpointing.writing.folder import CheckpointFolder, ScriptFiles
from hftrainer.errors import CheckpointNotWritten
from hftrainer.parallel.process_group import start_in_thread

logger = logging.getLogger(__name__)

#: A disk with fewer free bytes counts as full.
_FULL_DISK_BYTES = 1 << 18
#: In the background, another process writes checkpoints of at least this many bytes.
_MIN_BYTES_FOR_PROCESS = 1 << 26


#: Error numbers of storage that is full, over a quota, read-only, forbidden or broken.
_STORAGE_ERRORS = frozenset(
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ESTALE EFBIG ENODEV ENXIO".split()
    if hasattr(errno, name)
)
#: Error numbers for a path in an output folder that was deleted.
_PATH_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST})


def is_storage_error(error: BaseException, folder: str) -> bool:
    """Whether an error of writing to `folder` was caused by full, broken or missing storage."""
    if isinstance(error, OSError):
        path = None if error.filename is None else Path(os.path.abspath(str(error.filename)))
        is_inside = path is not None and path.is_relative_to(os.path.abspath(folder))
        return error.errno in _STORAGE_ERRORS or (error.errno in _PATH_ERRORS and is_inside)
    if isinstance(error, SafetensorError):
        return True
    # Tokenizers raise plain exceptions.
    if type(error) is Exception:
        match = re.search(r"\(os error (\d+)\)", str(error))
        return match is not None and int(match[1]) in _STORAGE_ERRORS
    # torch's own writer reports a storage error only in its message.
    return isinstance(error, RuntimeError) and any(
        part in str(error) for part in ("PytorchStreamWriter failed", "inline_container", "unexpected pos")
    )


@dataclass(frozen=True)
class DeferredWrite:
    """A call of `write(values)` to be made in the background.

    Attributes:
        write: the function.
        values: a copy of what it writes.
        make_picklable: makes a picklable function that does the same, for another process.
    """

    write: Callable[[Any], None]
    values: Any
    make_picklable: Callable[[], Callable[[Any], Any]]


@dataclass(eq=False)
class CheckpointInProgress:
    """The writer's state of one checkpoint, until it is published and its callbacks are called.

    Attributes:
        folder: where it is written.
        on_complete: called when the checkpoint is complete.
        on_failure: called in the caller's thread if the storage fails.
        writes: what the background thread writes once the checkpoint is filled.
        pickled_writes: the pickled `writes` for the other process, if it writes this checkpoint.
        known_entries: path → manifest entry, for large files that the writer has written.
        futures: writes of another thread while the checkpoint is filled.
        completion_callbacks: called in the caller's thread when the checkpoint is complete.
        publication: future that is done when the checkpoint is complete; only with background writing.
    """

    folder: CheckpointFolder
    on_complete: Callable[[], None]
    on_failure: Callable[[], None]
    writes: list[DeferredWrite] = field(default_factory=list)
    pickled_writes: list[bytes] = field(default_factory=list)
    known_entries: dict[str, files.Entry] = field(default_factory=dict)
    futures: list[Future[None]] = field(default_factory=list)
    completion_callbacks: list[Callable[[], None]] = field(default_factory=list)
    publication: Future[None] = field(init=False)

    @contextlib.contextmanager
    def discard_partial_on_error(self) -> Iterator[None]:
        """Remove a partially written checkpoint after an error in the block.

        Raises:
            OSError: if the disk is full and torch or safetensors raised another error.
        """
        try:
            yield
        except BaseException as error:
            folder = self.folder
            is_full = folder.staging.is_dir() and shutil.disk_usage(folder.staging).free < _FULL_DISK_BYTES
            folder.discard()
            if is_full and not isinstance(error, OSError) and is_storage_error(error, str(folder.path.parent)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


@dataclass(eq=False)
class CheckpointWriter:
    """Decides when and by what the files of a checkpoint are written: now, or in a thread or another process.

    It does not know what they hold: `CheckpointSaver` says that, within `checkpoint`. The checkpoint is complete or
    absent (`CheckpointFolder`). If storage fails, it is skipped and training continues.

    Args:
        is_async: training waits only for the copy to CPU memory. The buffers are kept for the next checkpoint,
            so they take as much memory as a checkpoint. Another process writes large checkpoints.
        stop_on_error: raise `CheckpointNotWritten` instead of skipping a checkpoint that cannot be written.
        to_cpu: moves a state to the CPU where writing needs it.

    Attributes:
        script_files: finds the files that the script itself has written into checkpoint folders.
        has_failed: whether the last checkpoint could not be written; of this rank until the `CheckpointSaver`, which
            communicates, sets it for all.
    """

    is_async: bool = False
    stop_on_error: bool = False
    to_cpu: Callable[[Any], Any] = lambda state: state
    script_files: ScriptFiles = field(default_factory=ScriptFiles)
    has_failed: bool = False
    _current: CheckpointInProgress | None = None
    _pending: CheckpointInProgress | None = None
    _uses_other_thread: bool = False
    _shard_future: Future[None] | None = None

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        """Make what writes in the background. The thread and the process start with their first task."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._copies = files.HostCopies()
        self._process: writer_process.WriterProcess | None = None
        if self.is_async and writer_process.IS_AVAILABLE:
            self._copies = copies = writer_process.SharedCopies()
            self._process = writer_process.WriterProcess(copies)

    @contextlib.contextmanager
    def checkpoint(
        self, path: str, *, on_complete: Callable[[], None], on_failure: Callable[[], None]
    ) -> Iterator[str | None]:
        """Write a checkpoint. Yields the folder to fill, or None if the storage failed.

        Args:
            path: its folder.
            on_complete: called once the checkpoint is complete, for instance to delete older ones.
            on_failure: called in the caller's thread if the storage fails.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, if this or the previous checkpoint could not be written.
        """
        self._begin_checkpoint()
        current = CheckpointInProgress(CheckpointFolder(path), on_complete, on_failure)
        with self._report_errors(path, on_failure), current.discard_partial_on_error():
            current.folder.begin()
        if self.has_failed:
            yield None
            return
        with self._report_errors(path, on_failure):
            with current.discard_partial_on_error():
                self._current = current
                try:
                    yield str(current.folder.staging)
                except BaseException:
                    self.wait_for_shard()
                    raise
                finally:
                    self._current = None
                    # Otherwise the other thread would continue to write into a discarded folder.
                    wait(current.futures)
                for future in current.futures:
                    future.result()
            if self.is_async:
                self._pack_writes(current)
                current.publication = self._thread.submit(self._publish_checkpoint, current)
                self._pending = current
            else:
                self._publish_checkpoint(current)

    def _publish_checkpoint(self, current: CheckpointInProgress) -> None:
        """Run the deferred writes, rename the folder, and call `on_complete`."""
        with current.discard_partial_on_error():
            if self._shard_future is not None:
                # Wait for the shards of all processes, or raise the first error of any.
                self._shard_future.result()
            self._write_deferred(current)
            self.script_files.copy_to(current.folder)
            current.folder.publish(current.known_entries)
        try:
            current.on_complete()
        except OSError as error:
            logger.warning("Older checkpoints could not be deleted: %s", error)

    def _pack_writes(self, current: CheckpointInProgress) -> None:
        """Pack a large checkpoint's writes for the writer process, or leave them to a thread."""
        if self._process is None or self._copies.size < _MIN_BYTES_FOR_PROCESS:
            return
        try:
            pack = self._process.pack
            current.pickled_writes = [pack(write.make_picklable(), write.values) for write in current.writes]
        # An object of the script may raise anything.
        except Exception as error:
            self._fall_back_to_thread(error)

    def _write_deferred(self, current: CheckpointInProgress) -> None:
        if current.pickled_writes and self._process is not None:
            try:
                current.known_entries.update(self._process.run(current.pickled_writes, current.folder.staging))
                return
            except writer_process.CannotUnpack as error:
                self._fall_back_to_thread(error)
        for deferred_write in current.writes:
            deferred_write.write(deferred_write.values)

    def _fall_back_to_thread(self, error: Exception) -> None:
        logger.info("A thread now writes checkpoints: the writer process failed: %s: %s", type(error).__name__, error)
        if self._process is not None:
            self._process.close()
        self._process = None

    @property
    def defers_writes(self) -> bool:
        """Whether writes are deferred, and therefore need a copy."""
        return self.is_async and self._current is not None

    def call_when_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the last checkpoint is complete: now, or in `poll` or `wait`.

        It is not called for a failed checkpoint.
        """
        if self._pending is not None:
            self._pending.completion_callbacks.append(callback)
        elif not self.has_failed:
            callback()

    def save(self, value: Any, path: str) -> None:
        """Write `value` with `torch.save`, now or with the current checkpoint."""
        # An override may rewrite a file that is written now, so its checksum is computed later.
        is_deferred = self.is_async or self._uses_other_thread
        entries = self._current.known_entries if self._current and is_deferred else {}

        def write(values: Any) -> None:
            if (entry := files.save(values, path)) is not None:
                entries[path] = entry

        self.call_or_defer(write, value, make_picklable=lambda: functools.partial(files.save, path=path))

    def call_or_defer(
        self,
        write: Callable[[Any], None],
        values: Any,
        *,
        make_picklable: Callable[[], Callable[[Any], Any]] | None = None,
    ) -> None:
        """Call `write(values)` now, or with the current checkpoint on a CPU copy of the values.

        Args:
            write: the function.
            values: what it writes.
            make_picklable: makes a picklable function that does the same, for another process; default `write`.
        """
        values = self.to_cpu(values)
        if self._current is not None and self.is_async:
            copies = self._copies.copy(values)
            self._current.writes.append(DeferredWrite(write, copies, make_picklable or (lambda: write)))
        elif self._current is not None and self._uses_other_thread:
            self._current.futures.append(self._thread.submit(write, values))
        else:
            write(values)

    def write_shard(self, write: Callable[[Any], None], values: Any) -> None:
        """Write this process's shard with `write(values)`, now or in the background.

        Every process calls it for each checkpoint, in a block of `checkpoint` or `report_shard_errors`.
        """
        if self.is_async:
            self._shard_future = start_in_thread(functools.partial(write, self._copies.copy(values)))
        else:
            write(values)

    def wait_for_shard(self) -> None:
        """Wait until this process's shard is written. All processes get the same errors; rank 0 reports them."""
        if self._shard_future is not None:
            wait([self._shard_future])

    def _begin_checkpoint(self) -> None:
        self.wait()
        self.has_failed = False
        self._shard_future = None
        self._copies.begin()

    def write_in_thread(self) -> contextlib.AbstractContextManager[None]:
        """Run the writes of the block in another thread. The checkpoint waits for them at the end.

        Until then the values must not change, and devices must have finished computing them.
        """
        return temporary_attributes(self, _uses_other_thread=True)

    def report_shard_errors(self, path: str) -> contextlib.AbstractContextManager[None]:
        """A context in which ranks other than 0 write into the checkpoint.

        It reports storage errors as `checkpoint` does.
        """
        self._begin_checkpoint()
        return self._report_errors(path, lambda: None)

    def poll(self) -> None:
        """Announce a checkpoint that was finished in the background."""
        if self._pending is not None and self._pending.publication.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and call its completion callbacks.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, if it could not be written.
        """
        self.wait_for_shard()
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        self.has_failed = False
        with self._report_errors(str(pending.folder.path), pending.on_failure):
            pending.publication.result()
        if not self.has_failed:
            for callback in pending.completion_callbacks:
                callback()

    def close_ignoring_errors(self) -> None:
        """`close` after another error. Only log an error here, so that it does not replace the first."""
        try:
            self.close()
        except Exception:
            logger.exception("Writing the current checkpoint failed too.")

    def close(self) -> None:
        """Wait, and release the thread and the copies; a later checkpoint has new ones."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._process is not None:
                self._process.close()
            self._copies.close()
            self._open()

    @contextlib.contextmanager
    def _report_errors(self, path: str, on_failure: Callable[[], None]) -> Iterator[None]:
        """Skip the checkpoint after a storage error in the block; with `stop_on_error`, raise."""
        try:
            yield
        except Exception as error:
            if not is_storage_error(error, os.path.dirname(path)):
                raise
            self.has_failed = True
            reason = error.strerror if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS else str(error)
            on_failure()
            message = f"{path} could not be written ({reason}); its partial files were removed."
            if self.stop_on_error:
                raise CheckpointNotWritten(message) from error
            advice = (
                "Training continues, and the next checkpoint is saved as scheduled: free space, or correct the folder."
            )
            logger.error("%s %s", message, advice)
