"""Uploads in the background, one after the other, which never stop or slow a run; what became of them is said."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import thread as pools
from dataclasses import dataclass, replace
from typing import Any

from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names
from hftrainer.errors import HubError
from hftrainer.hub.failures import is_passing, reason, with_retries
from hftrainer.hub.missing import Missing, MissingParcels
from hftrainer.hub.pictures import Parcel, Pictures, model_files
from hftrainer.hub.references import LAST_CHECKPOINT
from hftrainer.hub.repository import IGNORED, Repository

logger = logging.getLogger(__name__)

#: Seconds to wait before each further attempt of one upload; the client waits by itself before that.
_WAITS = (2.0, 8.0, 30.0)
#: Seconds for which the end of a run goes on trying while the Hub fails; an upload that proceeds may last.
_PATIENCE = 60.0
#: Seconds that a run which is told to stop, or has failed, waits for an upload under way.
_GRACE = 20.0
_BEHIND = "another upload was under way; hub_always_push=True lines them up"


class PushInProgress:
    """The uploads that were started together, or added since.

    Args:
        jobs: a future for each commit.
    """

    def __init__(self, jobs: Sequence[Future[Any]] = ()) -> None:
        self.jobs = list(jobs)

    def is_done(self) -> bool:
        """Whether all have ended, well or not."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait until all have ended."""
        futures.wait(self.jobs)

    def cancel(self) -> None:
        """Call off those that have not begun, for good."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


class Uploads:
    """Uploads saves to a repository.

    Args:
        repository: where to.
        pictures: makes the folders to upload.
    """

    def __init__(self, repository: Repository, pictures: Pictures) -> None:
        self.repository = repository
        self._pictures = pictures
        self._count = itertools.count()
        self._last: threading.Thread | None = None
        self._missing = MissingParcels(pictures.discard)
        self._down: str | None = None  # what was wrong with the network or the Hub, while nothing has arrived since
        self._until = math.inf  # when to stop waiting for it
        self._said = ""
        self._hurry = threading.Event()
        self._abandoned = False
        _at_exit(weakref.ref(self))

    # ---- Saves -------------------------------------------------------------------------------------------------

    def parcels(self, checkpoint: str, strategy: str, *, by_steps: bool) -> list[Parcel]:
        """The commits that a strategy makes of a checkpoint; none when it is no longer there.

        Args:
            checkpoint: the folder.
            strategy: a `hub_strategy` other than 'end'.
            by_steps: whether messages count steps, and not epochs.
        """
        try:
            state = TrainerState.load_from_json(os.path.join(checkpoint, names.TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is not uploaded: it can no longer be read (%s).", checkpoint, error)
            return []
        place = f"step {state.global_step}" if by_steps else f"epoch {int(state.epoch or 0)}"
        found = [self._parcel(checkpoint, "", f"Training in progress, {place}")]
        if strategy in ("checkpoint", "all_checkpoints"):
            path_in_repo = LAST_CHECKPOINT if strategy == "checkpoint" else os.path.basename(checkpoint)
            found.append(self._parcel(checkpoint, path_in_repo, f"{found[0].message}, checkpoint"))
        return found

    def _parcel(self, checkpoint: str, path_in_repo: str, message: str) -> Parcel:
        return Parcel(next(self._count), checkpoint, path_in_repo, message)

    def skip(self, parcels: Sequence[Parcel]) -> None:
        """Leave these out for now; `finish` makes up for the newest to each place."""
        for parcel in parcels:
            picture = self._take(parcel)
            if picture is not None:
                self._missing.add(Missing(parcel, _BEHIND, picture))

    def push(self, parcels: Sequence[Parcel]) -> list[Future[Any]]:
        """Upload these in the background, after those under way."""
        jobs = []
        for parcel in parcels:
            picture = self._take(parcel)
            if picture is None:
                continue
            self._missing.add(Missing(parcel, "its upload had not ended", picture, waiting=True))
            job = _Job(self, parcel, picture)
            jobs.append(self.submit(job))
            jobs[-1].add_done_callback(job.drop_if_cancelled)
        return jobs

    def _take(self, parcel: Parcel) -> str | None:
        """The picture of a parcel; None, which is said, when it cannot be made, for whatever reason."""
        try:
            return self._pictures.take(parcel)
        except Exception as error:  # of the processing class too
            self._missing.add(Missing(parcel, reason_of_storage(error)))
            logger.warning("%s cannot be made ready for its upload: %s", parcel.checkpoint, error)
            return None

    def upload(self, parcel: Parcel, picture: str) -> Any:
        """Make the commit of a parcel, and note what became of it; a picture is kept for another attempt."""
        repository = self.repository
        try:
            done = self._retried(lambda: repository.upload(picture, parcel.message, path_in_repo=parcel.path_in_repo))
        except Exception as error:
            why = reason(error, repository.token)
            self._missing.add(Missing(parcel, why, picture))
            logger.warning(
                "%r was not uploaded to %s, and is tried again at the end: %s", parcel.message, repository, why
            )
            raise HubError(why) from None
        self._missing.arrive(parcel, picture)
        return done

    def upload_in_turn(self, parcel: Parcel, picture: str) -> Any:
        """Do so, unless the run has ended and the Hub cannot be had: each attempt of the client takes a while."""
        if self._down is not None and self._until < math.inf:
            self._missing.add(Missing(parcel, self._down, picture))
            raise HubError(self._down)
        return self.upload(parcel, picture)

    def drop(self, parcel: Parcel, picture: str) -> None:
        """Forget a parcel that was called off."""
        self._missing.drop(parcel, picture)

    def _make_up(self) -> None:
        """Try again what has not arrived, oldest first, while the Hub can be had."""
        for entry in self._missing.oldest_first():
            there = entry.picture is not None or os.path.isdir(entry.parcel.checkpoint)
            picture = (entry.picture or self._take(entry.parcel)) if there else None
            if picture is None:
                continue
            try:
                self.upload(entry.parcel, picture)
            except HubError:
                if self._down is not None:
                    return

    def _retried(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; tried once only as long as the last attempt has found no Hub."""
        try:
            done = with_retries(act, () if self._down is not None else _WAITS, pause=self._pause)
        except Exception as error:
            self._down = reason(error, self.repository.token) if is_passing(error) else None
            raise
        self._down = None
        return done

    def _pause(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._until and not self._hurry.wait(seconds)

    # ---- The whole output folder -------------------------------------------------------------------------------

    def push_folder(self, folder: str, message: str, *, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Upload an output folder as the model, after the uploads under way.

        Args:
            folder: all in it but the checkpoints.
            message: of the commit.
            blocking: wait for it.
            token: instead of the repository's.
            revision: likewise.

        Returns:
            A `CommitInfo`, or a future of it.

        Raises:
            HubError: when it fails; the future raises it, and it is said.
        """
        own = self.repository
        repository = replace(own, token=own.token if token is None else token, revision=revision or own.revision)
        parcel = self._parcel(folder, "", message)

        def act() -> Any:
            try:
                done = self._retried(lambda: repository.upload(folder, message, ignore=IGNORED, shown=blocking))
            except Exception as error:
                command = repository.command(folder, "", without=IGNORED)
                failure = (
                    f"push_to_hub to {repository.id!r}: {reason(error, repository.token)}. The model is in {folder}, "
                    f"and this uploads it: {command}"
                )
                if not blocking:
                    logger.error("%s", failure)
                raise HubError(failure) from None
            if repository.has_branch_of(own):
                self._missing.arrive(parcel)
            return done

        future = self.submit(act)
        self.submit(self._make_up_if_the_hub_is_there)
        if blocking:
            self.wait()
        return future.result() if blocking else future

    def _make_up_if_the_hub_is_there(self) -> None:
        if self._missing and self._down is None:
            self._make_up()
            self._report()

    # ---- The thread --------------------------------------------------------------------------------------------

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Call `act` in the background, after all that was submitted before."""
        future: Future[Any] = Future()
        before, self._abandoned = self._last, False

        def run() -> None:
            if before is not None:
                before.join()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)

        self._last = threading.Thread(target=run, name="hub-upload", daemon=True)
        self._last.start()
        return future

    def wait(self, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all uploads have ended; False when they have not, some time after `hurried` has become true.

        Ctrl-C ends it: they go on, and the process ends without them.
        """
        until = None
        try:
            while self._last is not None and self._last.is_alive():
                self._last.join(0.2)
                if until is None and hurried():
                    until = time.monotonic() + _GRACE
                    self._hurry.set()
                if until is not None and time.monotonic() > until:
                    return False
        except KeyboardInterrupt:
            self._abandon()
            raise
        self._hurry.clear()
        return True

    def _abandon(self) -> None:
        """Wait no more; what is uploaded later still comes after what is under way."""
        self._hurry.set()
        self._abandoned = True
        _abandon_pools()

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait, try again what has not arrived, oldest first, and say what is up and what is missing.

        Args:
            hurried: whether there is little time left.
        """
        self._until = time.monotonic() + _PATIENCE
        try:
            if not self._abandoned:
                self._wait_and_make_up(hurried)
        finally:
            self._until = math.inf
            self._report()

    def _wait_and_make_up(self, hurried: Callable[[], bool]) -> None:
        if self._last is not None and self._last.is_alive():
            logger.info("Waiting for the uploads to %s.", self.repository)
        ended = self.wait(hurried)
        if ended and self._missing and not hurried():
            self.submit(self._make_up)
            ended = self.wait(hurried)
        if not ended:
            self._abandon()

    def at_exit(self) -> None:
        """Wait, unless somebody has given that up, and leave nothing behind."""
        try:
            if not self._abandoned:
                self.wait()
        finally:
            self._pictures.discard_all()

    def _report(self) -> None:
        up = "".join(f"\n  {_place(place)}: {message!r}" for place, message in self._missing.arrived().items())
        entries = self._missing.oldest_first()
        if not entries:
            if up:
                logger.info("Uploaded to %s:%s", self.repository, up)
            self._missing.forget_arrived()
            return
        missing = "".join(f"\n  {self._describe(entry)}" for entry in entries)
        if missing != self._said:
            logger.error("Not uploaded to %s:%s\nUploaded:%s", self.repository, missing, up or " nothing")
        self._said = missing

    def _describe(self, entry: Missing) -> str:
        parcel = entry.parcel
        begin = f"{_place(parcel.path_in_repo)}, {parcel.message!r}: {entry.why}."
        if not os.path.isdir(parcel.checkpoint):
            return f"{begin} {parcel.checkpoint} is no longer there."
        only = () if parcel.path_in_repo else tuple(model_files(parcel.checkpoint))
        return f"{begin} To upload it: {self.repository.command(parcel.checkpoint, parcel.path_in_repo, only=only)}"


@dataclass(frozen=True)
class _Job:
    """The upload of one parcel; an object, so that nothing of a Trainer is kept for it."""

    uploads: Uploads
    parcel: Parcel
    picture: str

    def __call__(self) -> Any:
        return self.uploads.upload_in_turn(self.parcel, self.picture)

    def drop_if_cancelled(self, job: Future[Any]) -> None:
        """Forget the parcel once its upload was called off."""
        if job.cancelled():
            self.uploads.drop(self.parcel, self.picture)


def reason_of_storage(error: Exception) -> str:
    """Why a picture could not be made, as the end of a sentence."""
    if isinstance(error, OSError):
        return f"the storage has failed ({error.strerror or error})"
    return f"it could not be made ready ({type(error).__name__}: {error})"


def _place(path_in_repo: str) -> str:
    return path_in_repo or "the model"


def _at_exit(reference: weakref.ref[Uploads]) -> None:
    """Let a script that ends with `push_to_hub(blocking=False)` wait for it.

    The client's pools of threads take no work once Python has begun to end, so this has to come before they know.
    """

    def end() -> None:
        uploads = reference()
        if uploads is not None:
            uploads.at_exit()

    threading._register_atexit(end)  # type: ignore[attr-defined]


def _abandon_pools() -> None:
    """Let Python end while an upload hangs: it would wait for the client's pools, whose threads began as ours did."""
    for thread in [thread for thread in list(pools._threads_queues) if thread.daemon]:
        del pools._threads_queues[thread]  # type: ignore[attr-defined]
