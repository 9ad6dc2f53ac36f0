"""A queue of background uploads. A failed one is retried at the end, and never stops training."""

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
from hftrainer.checkpointing import layout
from hftrainer.errors import HubError
from hftrainer.hub.failures import hub_reason
from hftrainer.hub.repository import IGNORE_PATTERNS, Repository
from hftrainer.hub.snapshots import PendingCommit, UploadSnapshots, model_files

logger = logging.getLogger(__name__)

#: Seconds that an interrupted or failed run waits for a running upload.
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


class UploadQueue:
    """Uploads the checkpoints and folders of a Trainer, one at a time, in daemon threads.

    `HfApi.run_as_future` would keep Python from exiting. For each path in the repository, we keep
    the newest commit that failed or was skipped, with one snapshot of a model and one of a checkpoint. More snapshots
    would occupy the disk space of checkpoints that `save_total_limit` has deleted.

    Args:
        repository: the target.
        snapshots: creates the folders to upload.
    """

    def __init__(self, repository: Repository, snapshots: UploadSnapshots) -> None:
        self.repository = repository
        self._snapshots = snapshots
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Number → commit.
        self._queued_commits: dict[int, PendingCommit] = {}
        #: Path in the repository → commit.
        self._missing_commits: dict[str, PendingCommit] = {}
        #: Path in the repository → message of its last commit.
        self._uploaded_messages: dict[str, str] = {}
        self._last_thread: threading.Thread | None = None
        #: Whether a wait ended while uploads were still running.
        self._has_stopped_waiting = False
        self._last_report = ""
        atexit.register(self.finish_at_exit)

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def make_commits(self, checkpoint: str, strategy: str, *, names_step: bool) -> list[PendingCommit]:
        """The commits that a strategy makes for a checkpoint; empty for a deleted checkpoint.

        Args:
            checkpoint: the folder.
            strategy: a `hub_strategy` other than 'end'.
            names_step: whether commit messages name the step rather than the epoch.
        """
        try:
            state = TrainerState.load_from_json(os.path.join(checkpoint, layout.TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is not uploaded: it can no longer be read (%s).", checkpoint, error)
            return []
        progress = f"step {state.global_step}" if names_step else f"epoch {int(state.epoch or 0)}"
        message = f"Training in progress, {progress}"
        commits = [PendingCommit(next(self._numbers), checkpoint, "", message)]
        if strategy in ("checkpoint", "all_checkpoints"):
            path_in_repo = layout.LAST_CHECKPOINT if strategy == "checkpoint" else os.path.basename(checkpoint)
            commits.append(PendingCommit(next(self._numbers), checkpoint, path_in_repo, f"{message}, checkpoint"))
        return commits

    def postpone(self, commits: Sequence[PendingCommit]) -> None:
        """Leave commits for later. `drain` uploads the newest for each path."""
        reason = "another upload was running; hub_always_push=True queues uploads instead"
        for commit in filter(self._make_snapshot, commits):
            self._record_missing_commit(commit, reason)

    def push(self, commits: Sequence[PendingCommit]) -> list[Future[Any]]:
        """Upload commits in the background, after those already queued."""
        jobs = []
        for commit in filter(self._make_snapshot, commits):
            self._queued_commits[commit.number] = commit
            job = self._submit(functools.partial(self._upload, commit))
            job.add_done_callback(functools.partial(self._leave_queue, commit))
            jobs.append(job)
        return jobs

    def _submit(self, operation: Callable[[], Any]) -> Future[Any]:
        """Run `operation` in a thread, after all previous submissions."""
        future: Future[Any] = Future()
        previous = self._last_thread

        def run() -> None:
            if previous is not None:
                previous.join()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)

        self._has_stopped_waiting = False
        thread = threading.Thread(target=run, name="hub-upload", daemon=True)
        thread.start()
        self._last_thread = thread
        return future

    def _make_snapshot(self, commit: PendingCommit) -> bool:
        """Create the snapshot of a commit. After an error, log a warning and return False."""
        try:
            commit.snapshot = self._snapshots.create(commit)
        # The processing class may raise anything.
        except Exception as error:
            problem = f"it could not be prepared ({type(error).__name__}: {error})"
            if isinstance(error, OSError):
                problem = f"storage failed ({error.strerror or error})"
            self._record_missing_commit(commit, problem)
            logger.warning("The upload of %s cannot be prepared: %s", commit.checkpoint, error)
        return commit.snapshot is not None

    def _upload(self, commit: PendingCommit) -> Any:
        """Make a commit, and record the result."""
        repository = self.repository
        assert commit.snapshot is not None
        try:
            commit_info = repository.upload(commit.snapshot, commit.message, path_in_repo=commit.path_in_repo)
        except Exception as error:
            problem = hub_reason(error, repository.token)
            self._record_missing_commit(commit, problem)
            logger.warning(
                "Uploading %r to %s failed and will be retried at the end: %s", commit.message, repository, problem
            )
            raise HubError(problem) from None
        self._record_upload(commit)
        return commit_info

    def _leave_queue(self, commit: PendingCommit, job: Future[Any]) -> None:
        del self._queued_commits[commit.number]
        if job.cancelled():
            self._discard_snapshot(commit)

    def _record_missing_commit(self, commit: PendingCommit, problem: str) -> None:
        """Keep a commit for another attempt, unless we already keep a newer one for its path."""
        commit.reason = problem
        with self._lock:
            other = self._missing_commits.setdefault(commit.path_in_repo, commit)
            if other is not commit:
                older, newer = sorted((other, commit), key=lambda commit: commit.number)
                self._discard_snapshot(older)
                self._missing_commits[commit.path_in_repo] = newer
            has_path = bool(commit.path_in_repo)
            similar_commits = [missing for path, missing in self._missing_commits.items() if bool(path) == has_path]
            for outdated in sorted(similar_commits, key=lambda outdated: outdated.number)[:-1]:
                self._discard_snapshot(outdated)

    def _record_upload(self, commit: PendingCommit) -> None:
        """Record an upload. Older missing commits to the same path are no longer needed."""
        with self._lock:
            self._uploaded_messages[commit.path_in_repo] = commit.message
            self._discard_snapshot(commit)
            missing_commit = self._missing_commits.get(commit.path_in_repo)
            if missing_commit is not None and missing_commit.number <= commit.number:
                self._discard_snapshot(self._missing_commits.pop(commit.path_in_repo))

    def _discard_snapshot(self, commit: PendingCommit) -> None:
        if commit.snapshot is not None:
            self._snapshots.delete(commit.snapshot)
            commit.snapshot = None

    # ---- The output folder -------------------------------------------------------------------------------------

    def push_folder(self, folder: str, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload an output folder without its checkpoints, after the queued uploads.

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
        overrides = {"token": token, "revision": revision or None}
        target = replace(self.repository, **{name: value for name, value in overrides.items() if value is not None})
        commit = PendingCommit(next(self._numbers), folder, "", message)
        future = self._submit(functools.partial(self._upload_folder, target, commit, blocking=blocking))
        if not blocking:
            return future
        self._wait()
        return future.result()

    def _upload_folder(self, target: Repository, commit: PendingCommit, *, blocking: bool) -> Any:
        folder = commit.checkpoint
        try:
            commit_info = target.upload(folder, commit.message, ignore_patterns=IGNORE_PATTERNS, show_progress=blocking)
        except Exception as error:
            failure = (
                f"push_to_hub to {target.id!r}: {hub_reason(error, target.token)}. The model is in {folder}. "
                f"To upload it: {target.command(folder, '', exclude=IGNORE_PATTERNS)}"
            )
            if not blocking:
                logger.error("%s", failure)
            raise HubError(failure) from None
        if (target.revision or "main") == (self.repository.revision or "main"):
            self._record_upload(commit)
        if self._missing_commits:
            self._retry_missing_commits()
            self._report()
        return commit_info

    # ---- The end of a run --------------------------------------------------------------------------------------

    def drain(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait for all uploads, retry the failed ones, and log the outcome of each.

        Args:
            is_urgent: whether the process is about to be killed.
        """
        try:
            if self._wait(is_urgent) and self._missing_commits and not is_urgent():
                self._submit(self._retry_missing_commits)
                self._wait(is_urgent)
        finally:
            self._report()

    @property
    def _is_busy(self) -> bool:
        return self._last_thread is not None and self._last_thread.is_alive()

    def _wait(self, is_urgent: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all uploads have finished.

        After an interrupted wait, return at once until a new upload is submitted.

        Args:
            is_urgent: once it returns True, the wait ends after `_GRACE` seconds.

        Returns:
            Whether all uploads have finished.
        """
        # If Ctrl-C ends the loop, nothing waits again for the same uploads.
        has_stopped, self._has_stopped_waiting = self._has_stopped_waiting, True
        deadline = None
        if self._is_busy and not has_stopped:
            logger.info("Waiting for the uploads to %s.", self.repository)
        while self._is_busy:
            if deadline is None and is_urgent():
                deadline = time.monotonic() + _GRACE
            if has_stopped or (deadline is not None and time.monotonic() > deadline):
                return False
            self._last_thread.join(0.2)  # type: ignore[union-attr]
        self._has_stopped_waiting = False
        return True

    def _retry_missing_commits(self) -> None:
        """Upload the missing commits, oldest first, until an upload fails."""
        for commit in sorted(self._missing_commits.values(), key=lambda commit: commit.number):
            if commit.snapshot is None and not (os.path.isdir(commit.checkpoint) and self._make_snapshot(commit)):
                continue
            try:
                self._upload(commit)
            except HubError:
                return

    def finish_at_exit(self) -> None:
        """Wait for all uploads, unless a wait was interrupted, and delete all snapshots."""
        try:
            if self._is_busy:
                self._wait()
                self._report()
        finally:
            self._snapshots.delete_all()

    def _report(self) -> None:
        """Log which commits are uploaded and which are not, unless already logged."""
        uploaded = "".join(f"\n  {path or 'the model'}: {text!r}" for path, text in self._uploaded_messages.items())
        with self._lock:
            queued_commits = {commit.path_in_repo: commit for commit in list(self._queued_commits.values())}
            missing_commits = self._missing_commits | queued_commits
        if not missing_commits:
            if uploaded:
                logger.info("Uploaded to %s:%s", self.repository, uploaded)
            self._uploaded_messages.clear()
            return
        commits = sorted(missing_commits.values(), key=lambda commit: commit.number)
        report = "".join(f"\n  {self._describe(commit)}" for commit in commits)
        if report != self._last_report:
            logger.error("Not uploaded to %s:%s\nUploaded:%s", self.repository, report, uploaded or " nothing")
        self._last_report = report

    def _describe(self, commit: PendingCommit) -> str:
        """A report on a missing commit, with the command line that uploads it."""
        beginning = f"{commit.path_in_repo or 'the model'}, {commit.message!r}: {commit.reason}."
        if not os.path.isdir(commit.checkpoint):
            return f"{beginning} {commit.checkpoint} no longer exists."
        include = () if commit.path_in_repo else tuple(model_files(commit.checkpoint))
        command = self.repository.command(commit.checkpoint, commit.path_in_repo, include=include)
        return f"{beginning} To upload it: {command}"
