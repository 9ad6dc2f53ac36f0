"""Uploads to a repository in the background. A failed upload is logged and retried; it never stops training."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names
from hftrainer.errors import HubError
from hftrainer.hub.background import UploadThread, call_at_exit
from hftrainer.hub.failures import is_transient, reason, with_retries
from hftrainer.hub.pending import PendingCommit, PendingUpload, PendingUploads
from hftrainer.hub.references import LAST_CHECKPOINT
from hftrainer.hub.repository import IGNORED, Repository
from hftrainer.hub.snapshots import UploadSnapshots, model_files

logger = logging.getLogger(__name__)

#: Seconds to wait before each retry of an upload, besides the client's own retries.
_WAITS = (2.0, 8.0, 30.0)
#: Seconds at the end of a run during which failed uploads are retried. A running upload may take longer.
_PATIENCE = 60.0
_SKIPPED = "another upload was running; hub_always_push=True queues uploads instead"
_UNFINISHED = "its upload had not finished"


class Uploads:
    """The uploads of a Trainer.

    Args:
        repository: the target.
        snapshots: creates the folders to upload.
    """

    def __init__(self, repository: Repository, snapshots: UploadSnapshots) -> None:
        self.repository = repository
        self._snapshots = snapshots
        self._pending = PendingUploads(snapshots.delete)
        self._thread = UploadThread()
        self._numbers = itertools.count()
        self._outage: str | None = None  # why the Hub could not be reached in the last attempt; None if it could
        self._deadline = math.inf  # on the clock time.monotonic(): no retry begins after it
        self._last_report = ""
        call_at_exit(self.at_exit)

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def commits_for(self, checkpoint: str, strategy: str, *, by_steps: bool) -> list[PendingCommit]:
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
        found = [self._new_commit(checkpoint, "", message)]
        if strategy in ("checkpoint", "all_checkpoints"):
            path_in_repo = LAST_CHECKPOINT if strategy == "checkpoint" else os.path.basename(checkpoint)
            found.append(self._new_commit(checkpoint, path_in_repo, f"{message}, checkpoint"))
        return found

    def _new_commit(self, folder: str, path_in_repo: str, message: str) -> PendingCommit:
        return PendingCommit(next(self._numbers), folder, path_in_repo, message)

    def skip(self, commits: Sequence[PendingCommit]) -> None:
        """Do not upload these now; `finish` uploads the newest for each path."""
        for commit in commits:
            snapshot = self._create_snapshot(commit)
            if snapshot is not None:
                self._pending.add(PendingUpload(commit, _SKIPPED, snapshot))

    def push(self, commits: Sequence[PendingCommit]) -> list[Future[Any]]:
        """Upload these in the background, after the uploads that are queued."""
        jobs = []
        for commit in commits:
            snapshot = self._create_snapshot(commit)
            if snapshot is None:
                continue
            self._pending.add(PendingUpload(commit, _UNFINISHED, snapshot, queued=True))
            job = self._thread.submit(functools.partial(self._upload_queued, commit, snapshot))
            job.add_done_callback(functools.partial(self._remove_if_cancelled, commit, snapshot))
            jobs.append(job)
        return jobs

    def _create_snapshot(self, commit: PendingCommit) -> str | None:
        """The snapshot of a commit; on any failure, log a warning and return None."""
        try:
            return self._snapshots.create(commit)
        except Exception as error:  # the processing class may raise anything
            self._pending.add(PendingUpload(commit, _reason_of_storage(error)))
            logger.warning("The upload of %s cannot be prepared: %s", commit.checkpoint, error)
            return None

    def _upload_queued(self, commit: PendingCommit, snapshot: str) -> Any:
        """Upload, unless the run has ended and the Hub cannot be reached: every attempt of the client takes a while."""
        if self._outage is not None and self._deadline < math.inf:
            self._pending.add(PendingUpload(commit, self._outage, snapshot))
            raise HubError(self._outage)
        return self._upload(commit, snapshot)

    def _remove_if_cancelled(self, commit: PendingCommit, snapshot: str, job: Future[Any]) -> None:
        if job.cancelled():
            self._pending.remove(commit, snapshot)

    def _upload(self, commit: PendingCommit, snapshot: str) -> Any:
        """Make a commit and record the result. After a failure the snapshot is kept for another attempt."""
        repository = self.repository
        try:
            done = self._with_retries(
                lambda: repository.upload(snapshot, commit.message, path_in_repo=commit.path_in_repo)
            )
        except Exception as error:
            why = reason(error, repository.token)
            self._pending.add(PendingUpload(commit, why, snapshot))
            logger.warning("Uploading %r to %s failed, and is retried at the end: %s", commit.message, repository, why)
            raise HubError(why) from None
        self._pending.mark_uploaded(commit, snapshot)
        return done

    def _with_retries(self, act: Callable[[], Any]) -> Any:
        """Call `act` and retry it; without retries if the Hub could not be reached the last time."""
        try:
            done = with_retries(act, () if self._outage is not None else _WAITS, pause=self._pause)
        except Exception as error:
            self._outage = reason(error, self.repository.token) if is_transient(error) else None
            raise
        self._outage = None
        return done

    def _pause(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._deadline and not self._thread.hurry.wait(seconds)

    # ---- The whole output folder -------------------------------------------------------------------------------

    def push_folder(self, folder: str, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload an output folder without its checkpoints, after the uploads that are queued.

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
        own = self.repository
        target = replace(own, token=own.token if token is None else token, revision=revision or own.revision)
        commit = self._new_commit(folder, "", message)
        with self._thread.abandoned_by_interrupt():
            future = self._thread.submit(functools.partial(self._upload_folder, target, commit, blocking=blocking))
            self._thread.submit(self._retry_pending_unless_down)
            if not blocking:
                return future
            self._thread.wait()
            return future.result()

    def _upload_folder(self, target: Repository, commit: PendingCommit, *, blocking: bool) -> Any:
        folder = commit.checkpoint
        try:
            done = self._with_retries(
                lambda: target.upload(folder, commit.message, ignore=IGNORED, show_progress=blocking)
            )
        except Exception as error:
            failure = (
                f"push_to_hub to {target.id!r}: {reason(error, target.token)}. The model is in {folder}. "
                f"To upload it: {target.command(folder, '', without=IGNORED)}"
            )
            if not blocking:
                logger.error("%s", failure)
            raise HubError(failure) from None
        if target.has_branch_of(self.repository):
            self._pending.mark_uploaded(commit)
        return done

    def _retry_pending_unless_down(self) -> None:
        if self._pending and self._outage is None:
            self._retry_pending()
            self._report()

    # ---- The end of a run --------------------------------------------------------------------------------------

    def finish(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Wait for all uploads, retry what has failed, and log what is uploaded and what is not.

        Args:
            is_urgent: whether the process is about to be killed.
        """
        self._deadline = time.monotonic() + _PATIENCE
        try:
            if not self._thread.abandoned:
                with self._thread.abandoned_by_interrupt():
                    self._wait_and_retry(is_urgent)
        finally:
            self._deadline = math.inf
            self._report()

    def _wait_and_retry(self, is_urgent: Callable[[], bool]) -> None:
        if self._thread.is_busy:
            logger.info("Waiting for the uploads to %s.", self.repository)
        finished = self._thread.wait(is_urgent)
        if finished and self._pending and not is_urgent():
            self._thread.submit(self._retry_pending)
            finished = self._thread.wait(is_urgent)
        if not finished:
            self._thread.abandon()

    def _retry_pending(self) -> None:
        """Retry pending uploads, oldest first, until the Hub cannot be reached."""
        for entry in self._pending.oldest_first():
            can_retry = entry.snapshot is not None or os.path.isdir(entry.commit.checkpoint)
            snapshot = (entry.snapshot or self._create_snapshot(entry.commit)) if can_retry else None
            if snapshot is None:
                continue
            try:
                self._upload(entry.commit, snapshot)
            except HubError:
                if self._outage is not None:
                    return

    def at_exit(self) -> None:
        """Wait for all uploads unless they were abandoned, and delete all snapshots."""
        try:
            if not self._thread.abandoned:
                with self._thread.abandoned_by_interrupt():
                    self._thread.wait()
        finally:
            self._snapshots.delete_all()
            if self._thread.abandoned:
                self._thread.abandon()  # thread pools that the client has started since

    def _report(self) -> None:
        """Log what is uploaded and what is not, unless that has been logged already."""
        uploaded = "".join(f"\n  {_where(path)}: {message!r}" for path, message in self._pending.uploaded().items())
        entries = self._pending.oldest_first()
        if not entries:
            if uploaded:
                logger.info("Uploaded to %s:%s", self.repository, uploaded)
            self._pending.clear_uploaded()
            return
        failed = "".join(f"\n  {self._describe(entry)}" for entry in entries)
        if failed != self._last_report:
            logger.error("Not uploaded to %s:%s\nUploaded:%s", self.repository, failed, uploaded or " nothing")
        self._last_report = failed

    def _describe(self, entry: PendingUpload) -> str:
        """A pending upload in a report, with the command line that uploads it."""
        commit = entry.commit
        begin = f"{_where(commit.path_in_repo)}, {commit.message!r}: {entry.why}."
        if not os.path.isdir(commit.checkpoint):
            return f"{begin} {commit.checkpoint} no longer exists."
        only = () if commit.path_in_repo else tuple(model_files(commit.checkpoint))
        return f"{begin} To upload it: {self.repository.command(commit.checkpoint, commit.path_in_repo, only=only)}"


def _reason_of_storage(error: Exception) -> str:
    """Why a snapshot could not be created, as the end of a sentence."""
    if isinstance(error, OSError):
        return f"storage failed ({error.strerror or error})"
    return f"it could not be prepared ({type(error).__name__}: {error})"


def _where(path_in_repo: str) -> str:
    return path_in_repo or "the model"
