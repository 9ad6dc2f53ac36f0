"""Writes checkpoints one after the other: synchronously, or in the background from copies in CPU memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hftrainer.checkpointing import staging, streamed
from hftrainer.checkpointing.added import AddedFiles
from hftrainer.errors import CheckpointNotWritten

logger = logging.getLogger(__name__)

#: A disk with fewer free bytes counts as full.
_FULL_BELOW = 1 << 18


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
    # torch's own writer reports it only in the message.
    return isinstance(error, RuntimeError) and any(
        part in str(error) for part in ("PytorchStreamWriter failed", "inline_container", "unexpected pos")
    )


@contextlib.contextmanager
def _discarding_partial(path: str) -> Iterator[None]:
    """Remove a partially written checkpoint after an error in the block.

    Raises:
        OSError: if the disk is full, but torch or safetensors raised another error for it.
    """
    try:
        yield
    except BaseException as error:
        folder = staging.staging_folder(path)
        full = folder.is_dir() and shutil.disk_usage(folder).free < _FULL_BELOW
        staging.discard(path)
        if full and not isinstance(error, OSError) and is_storage_error(error, os.path.dirname(path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


class CheckpointWriter:
    """Writes checkpoints whole or not at all. If storage fails, the checkpoint is skipped and training continues.

    Args:
        in_background: training waits only for the copy to CPU memory. The buffers are kept for the next checkpoint,
            so they take as much memory as a checkpoint.
        stop_on_error: raise `CheckpointNotWritten` when one cannot be written, instead of skipping it.
        to_cpu: moves a state to the CPU where writing needs it.

    Attributes:
        added: finds files in checkpoint folders that the script has written itself.
        failed: whether the last checkpoint could not be written.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        stop_on_error: bool = False,
        to_cpu: Callable[[Any], Any] = lambda state: state,
    ) -> None:
        self.in_background = in_background
        self.stop_on_error = stop_on_error
        self._to_cpu = to_cpu
        self.added = AddedFiles()
        self.failed = False
        self._jobs: list[Callable[[], None]] | None = None
        self._in_other_thread = False
        self._meanwhile: list[Future[None]] = []
        self._pending: Future[None] | None = None
        self._path = ""
        self._announcements: list[Callable[[], None]] = []
        self._if_failed: Callable[[], None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stager: Any = None

    @contextlib.contextmanager
    def checkpoint(self, path: str, *, then: Callable[[], None], if_failed: Callable[[], None]) -> Iterator[str | None]:
        """Write a checkpoint; yields the folder to fill, or None if the storage has no room for one.

        Args:
            path: its folder.
            then: called when it is complete, for instance to delete older ones; in the background too.
            if_failed: called in the caller's thread if the storage fails.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when this or the previous checkpoint could not be written.
        """
        self.wait()
        self.failed, self._if_failed = False, if_failed
        folder = staging.staging_folder(path)
        with self._reporting(path), _discarding_partial(path):
            staging.begin(folder)
        if self.failed:
            yield None
            return
        with self._reporting(path):
            with _discarding_partial(path), self._collecting() as jobs:
                yield str(folder)
            if self.in_background:
                self._path = path
                self._pending = self._executor.submit(self._finish, path, jobs, then)
            else:
                self._finish(path, jobs, then)

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the writes in the block, if they are for the background; wait for those of the other thread."""
        jobs: list[Callable[[], None]] = []
        self._jobs = jobs if self.in_background else None
        try:
            yield jobs
        finally:
            self._jobs = None
            written, self._meanwhile = self._meanwhile, []
            wait(written)
        for each in written:
            each.result()

    def _finish(self, path: str, jobs: list[Callable[[], None]], then: Callable[[], None]) -> None:
        """Do the collected writes, rename the folder, and call `then`."""
        with _discarding_partial(path):
            for job in jobs:
                job()
            self.added.take(Path(path), staging.staging_folder(path))
            staging.publish(path)
        try:
            then()
        except OSError as error:
            logger.warning("Older checkpoints could not be deleted: %s", error)

    @property
    def collects(self) -> bool:
        """Whether writes are collected for later, and so need a copy."""
        return self._jobs is not None

    def when_done(self, announce: Callable[[], None]) -> None:
        """Call `announce` once the last checkpoint is complete, now or in a `poll` or `wait`; never if it failed."""
        if self._pending is not None:
            self._announcements.append(announce)
        elif not self.failed:
            announce()

    def save(self, value: Any, path: str) -> None:
        """Write `value` with `torch.save`, now or with the current checkpoint."""
        self.call(lambda values: streamed.save(values, path), value)

    def call(self, write: Callable[[Any], None], values: Any) -> None:
        """Call `write(values)`: now, or with the current checkpoint, on a copy of the values in CPU memory."""
        values = self._to_cpu(values)
        if self._jobs is not None:
            copied = self._copied(values)
            self._jobs.append(lambda: write(copied))
        elif self._in_other_thread:
            self._meanwhile.append(self._executor.submit(write, values))
        else:
            write(values)

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """While a checkpoint is filled: leave the writes in the block to another thread, which is awaited at the end.

        Their values must not change until then, and devices must have computed them.
        """
        self._in_other_thread = True
        try:
            yield
        finally:
            self._in_other_thread = False

    def taking_part(self, path: str) -> contextlib.AbstractContextManager[None]:
        """A context for other processes' writes into the current checkpoint; reports storage errors in the same way."""
        self.failed, self._if_failed = False, None
        return self._reporting(path)

    def poll(self) -> None:
        """Announce a checkpoint that was finished in the background."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and announce it.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        announcements, self._announcements = self._announcements, []
        self.failed = False
        with self._reporting(self._path):
            pending.result()
        if not self.failed:
            for announce in announcements:
                announce()

    def wait_ignoring_errors(self) -> None:
        """Wait after another error; an error here is only logged, so that it does not replace the other one."""
        try:
            self.wait()
        except Exception:
            logger.exception("Writing the current checkpoint failed too.")

    def close(self) -> None:
        """Wait, and release the thread and the copies."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = self._stager = None

    @contextlib.contextmanager
    def _reporting(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_storage_error(error, os.path.dirname(path)):
                raise
            self.failed = True
            reason = error.strerror if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS else str(error)
            if self._if_failed is not None:
                self._if_failed()
            message = f"{path} could not be written ({reason}); its partial files were removed."
            if self.stop_on_error:
                raise CheckpointNotWritten(message) from error
            logger.error("%s Training continues; the next checkpoint will be attempted when due.", message)

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread

    def _copied(self, values: Any) -> Any:
        """The values with their tensors in CPU memory, in buffers that the next checkpoint reuses."""
        if self._stager is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=pinned,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=pinned,
                )
            )
        return self._stager.stage({"values": values})["values"]
