"""Writes checkpoints one after the other: synchronously, or in the background from copies in CPU memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hftrainer.checkpointing import files, names, writer_process
from hftrainer.checkpointing.files import Entry
from hftrainer.checkpointing.folder import CheckpointFolder
from hftrainer.checkpointing.writer_process import CannotUnpack, SharedCopies, WriterProcess
from hftrainer.errors import CheckpointNotWritten
from hftrainer.parallel.process_group import start_in_thread

logger = logging.getLogger(__name__)

#: A disk with fewer free bytes counts as full.
_FULL_BELOW = 1 << 18
#: In the background, another process writes checkpoints with states of at least so many bytes.
_WORTH_A_PROCESS = 1 << 26


#: Error numbers of a storage that is full, over a quota, read-only, forbidden or broken.
_STORAGE_ERRORS = frozenset(
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ESTALE EFBIG ENODEV ENXIO".split()
    if hasattr(errno, name)
)
#: Error numbers for a path in the output folder when that folder was deleted.
_PATH_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST})


def is_storage_error(error: BaseException, output_dir: str) -> bool:
    """Whether writing to `output_dir` failed because of the storage: full, read-only, over a quota, or missing."""
    if isinstance(error, OSError):
        below = os.path.abspath(str(error.filename)).startswith(os.path.abspath(output_dir))
        return error.errno in _STORAGE_ERRORS or (error.errno in _PATH_ERRORS and below)
    if isinstance(error, SafetensorError):
        return True
    if type(error) is Exception:  # raised by tokenizers
        found = re.search(r"\(os error (\d+)\)", str(error))
        return found is not None and int(found[1]) in _STORAGE_ERRORS
    # torch's own writer reports a storage error only in its message.
    return isinstance(error, RuntimeError) and any(
        part in str(error) for part in ("PytorchStreamWriter failed", "inline_container", "unexpected pos")
    )


@dataclass(frozen=True)
class DeferredWrite:
    """A call of `write(values)` that is made in the background.

    Attributes:
        write: the function.
        values: a copy of what it writes.
        portable: makes a function that does the same and can be pickled, for another process.
    """

    write: Callable[[Any], None]
    values: Any
    portable: Callable[[], Callable[[Any], Any]]


@dataclass(eq=False)
class CheckpointInProgress:
    """A checkpoint from its first file until it is announced.

    Attributes:
        folder: where it is written.
        then: called when it is complete.
        if_failed: called in the caller's thread if the storage fails.
        writes: what the background thread writes once the checkpoint is filled.
        packed: the same for the other process, if it writes this checkpoint.
        written: path → manifest entry, for large files that the writer has written.
        futures: writes that another thread does while the checkpoint is filled.
        announcements: called in the caller's thread when it is complete.
        published: future that is done when the checkpoint is complete; None without background writing.
    """

    folder: CheckpointFolder
    then: Callable[[], None]
    if_failed: Callable[[], None]
    writes: list[DeferredWrite] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)
    written: dict[str, Entry] = field(default_factory=dict)
    futures: list[Future[None]] = field(default_factory=list)
    announcements: list[Callable[[], None]] = field(default_factory=list)
    published: Future[None] | None = None

    @contextlib.contextmanager
    def discard_partial_on_error(self) -> Iterator[None]:
        """Remove a partially written checkpoint after an error in the block.

        Raises:
            OSError: if the disk is full, but torch or safetensors raised another error for it.
        """
        try:
            yield
        except BaseException as error:
            folder = self.folder
            full = folder.staging.is_dir() and shutil.disk_usage(folder.staging).free < _FULL_BELOW
            folder.discard()
            if full and not isinstance(error, OSError) and is_storage_error(error, str(folder.path.parent)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


#: Change time (ctime) in ns and size in bytes. Not mtime, which copies may keep from their source.
_Stamp = tuple[int, int]
#: File times may lag behind the clock by this many ns.
_COARSE = 2_000_000_000


class ScriptFiles:
    """Finds the files that a script writes into checkpoint folders itself, to add them to the checkpoint.

    Overrides write them before they call `super()._save_checkpoint`. A killed process may have left an incomplete
    folder; its files are not part of the checkpoint that this run writes there.
    """

    def __init__(self) -> None:
        self._oldest: int | None = None
        self._known: dict[Path, _Stamp] = {}

    def begin_run(self, run_dir: str | None) -> None:
        """Record the files in the folders that a run may write.

        Args:
            run_dir: the folder of its checkpoints; None if a subclass chooses it only when saving. Files older than the
                run then count as files of earlier runs.
        """
        self._oldest = time.time_ns() - _COARSE if run_dir is None else 0
        folders = [] if run_dir is None else Path(run_dir).glob(f"{names.PREFIX_CHECKPOINT_DIR}-*")
        self._known = {folder / name: stamp for folder in folders for name, stamp in _stamps(folder).items()}

    def copy_to(self, checkpoint: CheckpointFolder) -> None:
        """Copy the script's new files from the final folder to the staging folder, where the Trainer has no such file.

        Does nothing outside a run. Links are copied as links; the manifest does not check them.
        """
        if self._oldest is None:
            return
        of_trainer = _stamps(checkpoint.staging)
        for name, stamp in _stamps(checkpoint.path).items():
            is_new = stamp != self._known.get(checkpoint.path / name) and stamp[0] >= self._oldest
            if is_new and name not in of_trainer:
                target = checkpoint.staging / name
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(checkpoint.path / name, target)
        # If the step is saved again, files that the Trainer has written now do not count as the script's.
        self._known |= {checkpoint.path / name: stamp for name, stamp in of_trainer.items()}


def _stamps(folder: Path) -> dict[Path, _Stamp]:
    """The files in a folder, by relative path; nothing for a missing folder."""
    own = {folder / names.MANIFEST_NAME, folder / f"_{names.MANIFEST_NAME}"}
    paths = [path for path in folder.rglob("*") if (path.is_file() or path.is_symlink()) and path not in own]
    return {path.relative_to(folder): (path.lstat().st_ctime_ns, path.lstat().st_size) for path in paths}


def _link(source: Path, target: Path) -> None:
    """Hard-link `target` to `source`, which may be large; copy it where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)


#: Makes an executor with one thread, which starts with the first task.
_make_thread = functools.partial(ThreadPoolExecutor, max_workers=1, thread_name_prefix="checkpoint")


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints atomically. If storage fails, the checkpoint is skipped and training continues.

    Args:
        in_background: training waits only for the copy to CPU memory. The buffers are kept for the next checkpoint,
            so they take as much memory as a checkpoint. Another process writes large checkpoints.
        stop_on_error: raise `CheckpointNotWritten` instead of skipping a checkpoint that cannot be written.
        to_cpu: moves a state to the CPU where writing needs it.

    Attributes:
        added: finds the files that the script itself has written into checkpoint folders.
        failed: whether the last checkpoint could not be written.
    """

    in_background: bool = False
    stop_on_error: bool = False
    to_cpu: Callable[[Any], Any] = lambda state: state
    added: ScriptFiles = field(default_factory=ScriptFiles)
    failed: bool = False
    _filled: CheckpointInProgress | None = None
    _pending: CheckpointInProgress | None = None
    _uses_other_thread: bool = False
    _part: Future[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=_make_thread)
    _copies: files.HostCopies = field(default_factory=files.HostCopies)
    _process: WriterProcess | None = None

    def __post_init__(self) -> None:
        if self.in_background and writer_process.IS_AVAILABLE:
            self._copies = copies = SharedCopies()
            self._process = WriterProcess(copies)

    @contextlib.contextmanager
    def checkpoint(self, path: str, *, then: Callable[[], None], if_failed: Callable[[], None]) -> Iterator[str | None]:
        """Write a checkpoint. Yields the folder to fill, or None if the storage failed.

        Args:
            path: its folder.
            then: called once the checkpoint is complete, for instance to delete older ones.
            if_failed: called in the caller's thread if the storage fails.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when this or the previous checkpoint could not be written.
        """
        self._begin()
        current = CheckpointInProgress(CheckpointFolder(path), then, if_failed)
        self.failed = False
        with self._reporting(path, if_failed), current.discard_partial_on_error():
            current.folder.begin()
        if self.failed:
            yield None
            return
        with self._reporting(path, if_failed):
            with current.discard_partial_on_error():
                self._filled = current
                try:
                    yield str(current.folder.staging)
                except BaseException:
                    self.wait_for_part()
                    raise
                finally:
                    self._filled = None
                    # Otherwise the other thread would go on writing into a folder that is discarded.
                    wait(current.futures)
                for future in current.futures:
                    future.result()
            if self.in_background:
                self._pack(current)
                current.published = self._thread.submit(self._publish, current)
                self._pending = current
            else:
                self._publish(current)

    def _publish(self, current: CheckpointInProgress) -> None:
        """Run the deferred writes, rename the folder, and call `then`."""
        with current.discard_partial_on_error():
            if self._part is not None:
                # All processes finish their parts together.
                self._part.result()
            self._write_deferred(current)
            self.added.copy_to(current.folder)
            current.folder.publish(current.written)
        try:
            current.then()
        except OSError as error:
            logger.warning("Older checkpoints could not be deleted: %s", error)

    def _pack(self, current: CheckpointInProgress) -> None:
        """Pack a large checkpoint's writes for the writer process, or leave them to a thread."""
        if self._process is None or self._copies.size < _WORTH_A_PROCESS:
            return
        try:
            current.packed = [self._process.pack(each.portable(), each.values) for each in current.writes]
        # An object of the script may raise anything.
        except Exception as error:
            self._keep_to_thread(error)

    def _write_deferred(self, current: CheckpointInProgress) -> None:
        if current.packed and self._process is not None:
            try:
                current.written.update(self._process.run(current.packed, current.folder.staging))
                return
            except CannotUnpack as error:
                self._keep_to_thread(error)
        for each in current.writes:
            each.write(each.values)

    def _keep_to_thread(self, error: Exception) -> None:
        logger.info("A thread now writes checkpoints: the writer process failed: %s: %s", type(error).__name__, error)
        if self._process is not None:
            self._process.close()
        self._process = None

    @property
    def defers_writes(self) -> bool:
        """Whether writes happen later, and therefore need a copy."""
        return self.in_background and self._filled is not None

    def call_after(self, announce: Callable[[], None]) -> None:
        """Call `announce` once the last checkpoint is complete: now, or in `poll` or `wait`.

        A failed checkpoint is never announced.
        """
        if self._pending is not None:
            self._pending.announcements.append(announce)
        elif not self.failed:
            announce()

    def save(self, value: Any, path: str) -> None:
        """Write `value` with `torch.save`, now or with the current checkpoint."""
        # An override may rewrite a file that is written now, so its checksum is computed later.
        written = self._filled.written if self._filled and (self.defers_writes or self._uses_other_thread) else {}

        def write(values: Any) -> None:
            if (entry := files.save(values, path)) is not None:
                written[path] = entry

        self.call(write, value, portable=lambda: functools.partial(files.save, path=path))

    def call(
        self,
        write: Callable[[Any], None],
        values: Any,
        *,
        portable: Callable[[], Callable[[Any], Any]] | None = None,
    ) -> None:
        """Call `write(values)` now, or with the current checkpoint on a CPU copy of the values.

        Args:
            write: the function.
            values: what it writes.
            portable: makes a picklable function that does the same, for another process; default `write`.
        """
        values = self.to_cpu(values)
        if self._filled is not None and self.in_background:
            self._filled.writes.append(DeferredWrite(write, self._copies.copy(values), portable or (lambda: write)))
        elif self._filled is not None and self._uses_other_thread:
            self._filled.futures.append(self._thread.submit(write, values))
        else:
            write(values)

    def write_part(self, write: Callable[[Any], None], values: Any) -> None:
        """Write this process's part with `write(values)`, now or in the background.

        Every process calls it for each checkpoint, in a block of `checkpoint` or `report_part_errors`.
        """
        if self.in_background:
            self._part = start_in_thread(functools.partial(write, self._copies.copy(values)))
        else:
            write(values)

    def wait_for_part(self) -> None:
        """Wait until this process's part is written. All processes get the same errors; rank 0 reports them."""
        if self._part is not None:
            wait([self._part])

    def _begin(self) -> None:
        self.wait()
        self._part = None
        self._copies.begin()

    @contextlib.contextmanager
    def in_other_thread(self) -> Iterator[None]:
        """Run the writes of the block in another thread. The checkpoint waits for them at the end.

        Until then their values must not change; devices must have finished computing them.
        """
        self._uses_other_thread = True
        try:
            yield
        finally:
            self._uses_other_thread = False

    def report_part_errors(self, path: str) -> contextlib.AbstractContextManager[None]:
        """A context in which ranks other than 0 write into the checkpoint.

        It reports storage errors as `checkpoint` does.
        """
        self._begin()
        self.failed = False
        return self._reporting(path, lambda: None)

    def poll(self) -> None:
        """Announce a checkpoint that was finished in the background."""
        if self._pending is not None and self._pending.published is not None and self._pending.published.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and announce it.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when it could not be written.
        """
        self.wait_for_part()
        pending, self._pending = self._pending, None
        if pending is None or pending.published is None:
            return
        self.failed = False
        with self._reporting(str(pending.folder.path), pending.if_failed):
            pending.published.result()
        if not self.failed:
            for announce in pending.announcements:
                announce()

    def close_ignoring_errors(self) -> None:
        """`close` after another error. Only log an error here, so that it does not replace the first."""
        try:
            self.close()
        except Exception:
            logger.exception("Writing the current checkpoint failed too.")

    def close(self) -> None:
        """Wait, and release the thread and the copies."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._process is not None:
                self._process.close()
            self._copies.close()
            self._thread, self._copies = _make_thread(), files.HostCopies()
            self.__post_init__()

    @contextlib.contextmanager
    def _reporting(self, path: str, if_failed: Callable[[], None]) -> Iterator[None]:
        """Skip the checkpoint after a storage error in the block; with `stop_on_error`, raise."""
        try:
            yield
        except Exception as error:
            if not is_storage_error(error, os.path.dirname(path)):
                raise
            self.failed = True
            reason = error.strerror if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS else str(error)
            if_failed()
            message = f"{path} could not be written ({reason}); its partial files were removed."
            if self.stop_on_error:
                raise CheckpointNotWritten(message) from error
            logger.error("%s Training continues, and the next checkpoint is saved as scheduled.", message)
