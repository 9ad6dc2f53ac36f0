"""Uploads in the background, one after the other, which never stop or slow a run; what became of them is said."""

from __future__ import annotations

import itertools
import logging
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

from hftrainer.checkpointing import names
from hftrainer.errors import HubError
from hftrainer.hub.failures import reason, with_retries
from hftrainer.hub.pictures import Parcel, Pictures, model_files
from hftrainer.hub.references import LAST_CHECKPOINT
from hftrainer.hub.repository import IGNORED, Repository
from hftrainer.trainer_callback import TrainerState

logger = logging.getLogger(__name__)

#: Seconds to wait before each further attempt of one upload; the client waits by itself before that.
_WAITS = (2.0, 8.0, 30.0)
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
        """Call off those that have not begun."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


@dataclass(frozen=True)
class _Missing:
    parcel: Parcel
    why: str


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
        self._missing: dict[str, _Missing] = {}  # of each place in the repository, the newest that is not there
        self._arrived: dict[str, str] = {}  # of each place, the message of the last commit
        self._said = ""
        self._hurry = threading.Event()
        _wait_before_exit(weakref.ref(self))

    # ---- Saves -------------------------------------------------------------------------------------------------

    def parcels(self, checkpoint: str, strategy: str, *, by_steps: bool) -> list[Parcel]:
        """The commits that a strategy makes of a checkpoint.

        Args:
            checkpoint: the folder.
            strategy: a `hub_strategy` other than 'end'.
            by_steps: whether messages count steps, and not epochs.
        """
        state = TrainerState.load_from_json(os.path.join(checkpoint, names.TRAINER_STATE_NAME))
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
            self._miss(parcel, _BEHIND)

    def push(self, parcels: Sequence[Parcel]) -> list[Future[Any]]:
        """Upload these in the background, after those under way."""
        jobs = []
        for parcel in parcels:
            self._miss(parcel, "its upload had not ended")
            try:
                picture = self._pictures.take(parcel)
            except OSError as error:
                self._miss(parcel, reason_of_storage(error))
                logger.warning("%s cannot be made ready for its upload: %s", parcel.checkpoint, error)
            else:
                jobs.append(self.submit(_Job(self, parcel, picture)))
        return jobs

    def upload(self, parcel: Parcel, picture: str) -> Any:
        """Make the commit of a parcel, and note what became of it."""
        repository = self.repository
        try:
            done = self._retried(lambda: repository.upload(picture, parcel.message, path_in_repo=parcel.path_in_repo))
        except Exception as error:
            why = reason(error, repository.token)
            self._miss(parcel, why)
            logger.warning(
                "%r was not uploaded to %s, and is tried again at the end: %s", parcel.message, repository.id, why
            )
            raise HubError(why) from None
        finally:
            self._pictures.discard(picture)
        self._note(parcel)
        return done

    def _retried(self, act: Callable[[], Any]) -> Any:
        return with_retries(act, _WAITS, pause=lambda seconds: not self._hurry.wait(seconds))

    def _miss(self, parcel: Parcel, why: str) -> None:
        known = self._missing.get(parcel.path_in_repo)
        if known is None or known.parcel.number <= parcel.number:
            self._missing[parcel.path_in_repo] = _Missing(parcel, why)

    def _note(self, parcel: Parcel) -> None:
        self._arrived[parcel.path_in_repo] = parcel.message
        known = self._missing.get(parcel.path_in_repo)
        if known is not None and known.parcel.number <= parcel.number:
            del self._missing[parcel.path_in_repo]

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
        repository = replace(own, token=token or own.token, revision=revision or own.revision)
        parcel = self._parcel(folder, "", message)

        def act() -> Any:
            try:
                done = self._retried(lambda: repository.upload(folder, message, ignore=IGNORED))
            except Exception as error:
                command = repository.command(folder, "", without=IGNORED)
                failure = (
                    f"push_to_hub to {repository.id!r}: {reason(error, repository.token)}. The model is in {folder}, "
                    f"and this uploads it: {command}"
                )
                if not blocking:
                    logger.error("%s", failure)
                raise HubError(failure) from None
            self._note(parcel)
            return done

        future = self.submit(act)
        if not blocking:
            return future
        try:
            return future.result()
        except KeyboardInterrupt:
            self.finish(hurried=lambda: True)
            raise

    # ---- The thread --------------------------------------------------------------------------------------------

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Call `act` in the background, after all that was submitted before."""
        future: Future[Any] = Future()
        before = self._last

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
        """Wait until all uploads have ended; False when they have not, some time after `hurried` has become true."""
        until = None
        while self._last is not None and self._last.is_alive():
            self._last.join(0.2)
            if until is None and hurried():
                until = time.monotonic() + _GRACE
                self._hurry.set()
            if until is not None and time.monotonic() > until:
                return False
        self._hurry.clear()
        return True

    def finish(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait, try again what has not arrived, oldest first, and say what is up and what is missing.

        Args:
            hurried: whether there is little time left.
        """
        if self._last is not None and self._last.is_alive():
            logger.info("Waiting for the uploads to %s.", self.repository.id)
        ended = self.wait(hurried)
        if ended and not hurried():
            parcels = sorted((missing.parcel for missing in self._missing.values()), key=lambda parcel: parcel.number)
            self.push([parcel for parcel in parcels if os.path.isdir(parcel.checkpoint)])
            ended = self.wait(hurried)
        if not ended:
            self._last = None
            _abandon_pools()
        self._report()

    def _report(self) -> None:
        up = "".join(f"\n  {_place(place)}: {message!r}" for place, message in self._arrived.items())
        if not self._missing:
            if up:
                logger.info("Uploaded to %s:%s", self.repository.id, up)
            self._arrived.clear()
            return
        missing = "".join(f"\n  {self._describe(entry)}" for entry in self._missing.values())
        if missing != self._said:
            logger.error("Not uploaded to %s:%s\nUploaded:%s", self.repository.id, missing, up or " nothing")
        self._said = missing

    def _describe(self, entry: _Missing) -> str:
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
        return self.uploads.upload(self.parcel, self.picture)


def reason_of_storage(error: OSError) -> str:
    """Why a picture could not be made, as the end of a sentence."""
    return f"the storage has failed ({error.strerror or error})"


def _place(path_in_repo: str) -> str:
    return path_in_repo or "the model"


def _wait_before_exit(reference: weakref.ref[Uploads]) -> None:
    """Let a script that ends with `push_to_hub(blocking=False)` wait for it.

    The client's pools of threads take no work once Python has begun to end, so this has to come before they know.
    """

    def wait() -> None:
        uploads = reference()
        if uploads is not None:
            uploads.wait()

    threading._register_atexit(wait)  # type: ignore[attr-defined]


def _abandon_pools() -> None:
    """Let Python end while an upload hangs: it would wait for the client's pools, whose threads began as ours did."""
    for thread in [thread for thread in list(pools._threads_queues) if thread.daemon]:
        del pools._threads_queues[thread]  # type: ignore[attr-defined]
