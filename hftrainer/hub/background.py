"""The background thread of uploads: one upload at a time, in order, and the process can exit while one hangs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import thread as pools
from typing import Any

#: Seconds that a run which is interrupted or has failed waits for a running upload.
_GRACE = 20.0


class PushInProgress:
    """A group of uploads, as `Trainer.push_in_progress`.

    Args:
        jobs: one future for each commit.
    """

    def __init__(self, jobs: Sequence[Future[Any]] = ()) -> None:
        self.jobs = list(jobs)

    def is_done(self) -> bool:
        """Whether all uploads have finished, successfully or not."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait until all uploads have finished."""
        futures.wait(self.jobs)

    def cancel(self) -> None:
        """Cancel the uploads that have not started."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


class UploadThread:
    """Runs functions one after another in the background.

    `HfApi.run_as_future` does the same, but Python waits at exit for its thread, even if an upload hangs.

    Attributes:
        abandoned: whether `abandon` was called and no function has been submitted since.
        hurry: set while somebody who has little time waits, so that a running function stops its retries.
    """

    def __init__(self) -> None:
        self.abandoned = False
        self.hurry = threading.Event()
        self._last: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a function is running or queued."""
        return self._last is not None and self._last.is_alive()

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Run `act` after everything that was submitted before."""
        future: Future[Any] = Future()
        previous, self.abandoned = self._last, False

        def run() -> None:
            if previous is not None and previous.ident is not None:  # None if Ctrl-C came before it was started
                previous.join()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)

        self._last = threading.Thread(target=run, name="hub-upload", daemon=True)
        self._last.start()
        return future

    @contextlib.contextmanager
    def abandoned_by_interrupt(self) -> Iterator[None]:
        """Abandon the functions when Ctrl-C arrives in the block, even while a thread is started."""
        try:
            yield
        except KeyboardInterrupt:
            self.abandon()
            raise

    def wait(self, is_urgent: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all functions have finished.

        Args:
            is_urgent: once it returns True, the wait ends after `_GRACE` seconds.

        Returns:
            Whether all have finished.
        """
        deadline = None
        while self._last is not None and self._last.is_alive():
            self._last.join(0.2)
            if deadline is None and is_urgent():
                deadline = time.monotonic() + _GRACE
                self.hurry.set()
            if deadline is not None and time.monotonic() > deadline:
                return False
        self.hurry.clear()
        return True

    def abandon(self) -> None:
        """Let the process exit without waiting. Functions that are submitted later still run in order."""
        self.hurry.set()
        self.abandoned = True
        # Python also waits for the client's thread pools. Theirs are daemons because ours, which started them, is one.
        with pools._global_shutdown_lock:  # a pool starts and lists a thread under this lock
            for thread in [thread for thread in list(pools._threads_queues) if thread.daemon]:
                del pools._threads_queues[thread]  # type: ignore[attr-defined]


def call_at_exit(method: Callable[[], None]) -> None:
    """Call a method when Python exits, unless its object has been deleted.

    `atexit` would be too late: by then Python has shut down the client's thread pools.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    threading._register_atexit(call)  # type: ignore[attr-defined]
