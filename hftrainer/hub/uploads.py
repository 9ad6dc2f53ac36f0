"""Uploads to a repository in the background. A failed upload is retried at the end; it never stops training."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names
from hftrainer.errors import HubError
from hftrainer.hub.failures import reason
from hftrainer.hub.repository import IGNORED, Repository
from hftrainer.hub.snapshots import Commit, UploadSnapshots, model_files

logger = logging.getLogger(__name__)

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


class Uploads:
    """The uploads of a Trainer, one at a time, in daemon threads: `HfApi.run_as_future` would keep Python from exiting.

    Of the commits that have failed or were skipped, it keeps the newest for each path in the repository, with a
    snapshot of the newest model and of the newest checkpoint. More snapshots would occupy the disk space of checkpoints
    that `save_total_limit` has deleted.

    Args:
        repository: the target.
        snapshots: creates the folders to upload.
    """

    def __init__(self, repository: Repository, snapshots: UploadSnapshots) -> None:
        self.repository = repository
        self._snapshots = snapshots
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._queued: dict[int, Commit] = {}  # by number
        self._missing: dict[str, Commit] = {}  # by path in the repository
        self._uploaded: dict[str, str] = {}  # path in the repository → the message of the last commit there
        self._last_thread: threading.Thread | None = None
        self._stopped_waiting = False  # whether a wait ended while uploads were still running
        self._last_report = ""
        atexit.register(self.at_exit)

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def commits_for(self, checkpoint: str, strategy: str, *, by_steps: bool) -> list[Commit]:
        """The commits that a strategy makes for a checkpoint; none if the checkpoint has been deleted.

        Args:
            checkpoint: the folder.
            strategy: a `hub_strategy` other than 'end'.
            by_steps: whether commit messages name the step rather than the epoch.
        """
        try:
            state = TrainerState.load_from_json(os.path.join(checkpoint, names.TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is not uploaded: it cannot be read any more (%s).", checkpoint, error)
            return []
        progress = f"step {state.global_step}" if by_steps else f"epoch {int(state.epoch or 0)}"
        message = f"Training in progress, {progress}"
        found = [Commit(next(self._numbers), checkpoint, "", message)]
        if strategy in ("checkpoint", "all_checkpoints"):
            path_in_repo = names.LAST_CHECKPOINT if strategy == "checkpoint" else os.path.basename(checkpoint)
            found.append(Commit(next(self._numbers), checkpoint, path_in_repo, f"{message}, checkpoint"))
        return found

    def skip(self, commits: Sequence[Commit]) -> None:
        """Do not upload these now; `finish` uploads the newest for each path."""
        for commit in filter(self._create_snapshot, commits):
            self._note_missing(commit, "another upload was running; hub_always_push=True queues uploads instead")

    def push(self, commits: Sequence[Commit]) -> list[Future[Any]]:
        """Upload commits in the background, after those already queued."""
        jobs = []
        for commit in filter(self._create_snapshot, commits):
            self._queued[commit.number] = commit
            job = self._submit(functools.partial(self._upload, commit))
            job.add_done_callback(functools.partial(self._leave_queue, commit))
            jobs.append(job)
        return jobs

    def _submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Run `act` in a thread, after everything that was submitted before."""
        future: Future[Any] = Future()
        previous = self._last_thread

        def run() -> None:
            if previous is not None:
                previous.join()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)

        self._stopped_waiting = False
        thread = threading.Thread(target=run, name="hub-upload", daemon=True)
        thread.start()
        self._last_thread = thread
        return future

    def _create_snapshot(self, commit: Commit) -> bool:
        """Create the snapshot of a commit; on any failure, log a warning and return False."""
        try:
            commit.snapshot = self._snapshots.create(commit)
        except Exception as error:  # the processing class may raise anything
            why = f"it could not be prepared ({type(error).__name__}: {error})"
            if isinstance(error, OSError):
                why = f"storage failed ({error.strerror or error})"
            self._note_missing(commit, why)
            logger.warning("The upload of %s cannot be prepared: %s", commit.checkpoint, error)
        return commit.snapshot is not None

    def _upload(self, commit: Commit) -> Any:
        """Make a commit and note the result."""
        repository = self.repository
        assert commit.snapshot is not None
        try:
            done = repository.upload(commit.snapshot, commit.message, path_in_repo=commit.path_in_repo)
        except Exception as error:
            why = reason(error, repository.token)
            self._note_missing(commit, why)
            logger.warning("Uploading %r to %s failed, and is retried at the end: %s", commit.message, repository, why)
            raise HubError(why) from None
        self._note_uploaded(commit)
        return done

    def _leave_queue(self, commit: Commit, job: Future[Any]) -> None:
        del self._queued[commit.number]
        if job.cancelled():
            self._discard_snapshot(commit)

    def _note_missing(self, commit: Commit, why: str) -> None:
        """Keep a commit for another attempt, unless a newer one to the same path is missing."""
        commit.reason = why
        with self._lock:
            known = self._missing.setdefault(commit.path_in_repo, commit)
            if known is not commit:
                older, newer = sorted((known, commit), key=lambda each: each.number)
                self._discard_snapshot(older)
                self._missing[commit.path_in_repo] = newer
            same_kind = [each for path, each in self._missing.items() if bool(path) == bool(commit.path_in_repo)]
            for each in sorted(same_kind, key=lambda each: each.number)[:-1]:
                self._discard_snapshot(each)

    def _note_uploaded(self, commit: Commit) -> None:
        """Record an upload. Older missing commits to the same path are no longer needed."""
        with self._lock:
            self._uploaded[commit.path_in_repo] = commit.message
            self._discard_snapshot(commit)
            known = self._missing.get(commit.path_in_repo)
            if known is not None and known.number <= commit.number:
                self._discard_snapshot(self._missing.pop(commit.path_in_repo))

    def _discard_snapshot(self, commit: Commit) -> None:
        if commit.snapshot is not None:
            self._snapshots.delete(commit.snapshot)
            commit.snapshot = None

    # ---- The whole output folder -------------------------------------------------------------------------------

    def push_folder(self, folder: str, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload an output folder without its checkpoints, after those already queued.

        Args:
            folder: the output folder.
            message: the commit message.
            blocking: whether to wait for the upload.
            token: used instead of the repository's token.
            revision: used instead of the repository's branch.

        Returns:
            A `CommitInfo`, or a future of it.

        Raises:
            HubError: if the upload fails. The future raises it, and it is logged.
        """
        changed = {"token": token, "revision": revision or None}
        target = replace(self.repository, **{name: value for name, value in changed.items() if value is not None})
        commit = Commit(next(self._numbers), folder, "", message)
        future = self._submit(functools.partial(self._upload_folder, target, commit, blocking=blocking))
        if not blocking:
            return future
        self._wait()
        return future.result()

    def _upload_folder(self, target: Repository, commit: Commit, *, blocking: bool) -> Any:
        folder = commit.checkpoint
        try:
            done = target.upload(folder, commit.message, ignore=IGNORED, show_progress=blocking)
        except Exception as error:
            failure = (
                f"push_to_hub to {target.id!r}: {reason(error, target.token)}. The model is in {folder}. "
                f"To upload it: {target.command(folder, '', exclude=IGNORED)}"
            )
            if not blocking:
                logger.error("%s", failure)
            raise HubError(failure) from None
        if (target.revision or "main") == (self.repository.revision or "main"):
            self._note_uploaded(commit)
        if self._missing:
            self._retry_missing()
            self._report()
        return done

    # ---- The end of a run --------------------------------------------------------------------------------------

    def finish(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait for all uploads, retry the failed ones, and log the outcome of each.

        Args:
            is_urgent: whether the process is about to be killed.
        """
        try:
            if self._wait(is_urgent) and self._missing and not is_urgent():
                self._submit(self._retry_missing)
                self._wait(is_urgent)
        finally:
            self._report()

    @property
    def _is_busy(self) -> bool:
        return self._last_thread is not None and self._last_thread.is_alive()

    def _wait(self, is_urgent: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all uploads have finished. After a wait that was cut short, return at once until a new upload.

        Args:
            is_urgent: once it returns True, the wait ends after `_GRACE` seconds.

        Returns:
            Whether all have finished.
        """
        # If Ctrl-C ends the loop, nothing waits again for the same uploads.
        has_stopped, self._stopped_waiting = self._stopped_waiting, True
        deadline = None
        if self._is_busy and not has_stopped:
            logger.info("Waiting for the uploads to %s.", self.repository)
        while self._is_busy:
            if deadline is None and is_urgent():
                deadline = time.monotonic() + _GRACE
            if has_stopped or (deadline is not None and time.monotonic() > deadline):
                return False
            self._last_thread.join(0.2)  # type: ignore[union-attr]
        self._stopped_waiting = False
        return True

    def _retry_missing(self) -> None:
        """Upload what is missing, oldest first, until an upload fails."""
        for commit in sorted(self._missing.values(), key=lambda commit: commit.number):
            if commit.snapshot is None and not (os.path.isdir(commit.checkpoint) and self._create_snapshot(commit)):
                continue
            try:
                self._upload(commit)
            except HubError:
                return

    def at_exit(self) -> None:
        """Wait for all uploads, unless a wait was interrupted, and delete all snapshots."""
        try:
            if self._is_busy:
                self._wait()
                self._report()
        finally:
            self._snapshots.delete_all()

    def _report(self) -> None:
        """Log what is uploaded and what is not, unless that has been logged already."""
        uploaded = "".join(f"\n  {path or 'the model'}: {message!r}" for path, message in self._uploaded.items())
        with self._lock:
            missing = {**self._missing, **{commit.path_in_repo: commit for commit in list(self._queued.values())}}
        if not missing:
            if uploaded:
                logger.info("Uploaded to %s:%s", self.repository, uploaded)
            self._uploaded.clear()
            return
        in_order = sorted(missing.values(), key=lambda commit: commit.number)
        failed = "".join(f"\n  {self._describe(commit)}" for commit in in_order)
        if failed != self._last_report:
            logger.error("Not uploaded to %s:%s\nUploaded:%s", self.repository, failed, uploaded or " nothing")
        self._last_report = failed

    def _describe(self, commit: Commit) -> str:
        """A missing commit in a report, with the command line that uploads it."""
        begin = f"{commit.path_in_repo or 'the model'}, {commit.message!r}: {commit.reason}."
        if not os.path.isdir(commit.checkpoint):
            return f"{begin} {commit.checkpoint} no longer exists."
        include = () if commit.path_in_repo else tuple(model_files(commit.checkpoint))
        command = self.repository.command(commit.checkpoint, commit.path_in_repo, include=include)
        return f"{begin} To upload it: {command}"
