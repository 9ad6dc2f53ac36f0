"""Which trials of a study count, whichever process trains them, and which ones were interrupted."""

from __future__ import annotations

import logging
import os
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.parallel.environment import has_ended

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

# User attributes of a trial. Stored studies contain them, so their values must not change.
OWNER = "process"  # the process that trains it: host, process id, start time
FAILED = "failed"  # why it failed; a failed trial counts
INTERRUPTED = "interrupted"  # why it was interrupted; it does not count, and another trial takes its place
RETRY_OF = "again"  # the number of the interrupted trial that has the same hyperparameters

#: A running trial without an owner counts as interrupted after this time.
_TIME_TO_SET_OWNER = timedelta(seconds=10)
#: Seconds before each further attempt to open a database.
_RETRY_DELAYS = (0.1, 0.5, 2.0)


def open_storage(given: Any, journal: str | None = None) -> Any:
    """Open a storage, given in any form that `create_study` accepts.

    When several processes open a new database at the same time, one creates its tables and the others fail. A moment
    later the tables exist.

    Args:
        given: the storage.
        journal: a file to use instead of None, if processes are to share the storage.

    Raises:
        InvalidArgument: if a string is not a database URL.
        UnsupportedArgument: if processes are to share the storage, and it is in memory.
    """
    from optuna.storages import get_storage
    from sqlalchemy.exc import ArgumentError, DBAPIError

    if journal is not None:
        if given is None:
            return open_journal(journal)
        url = given if isinstance(given, str) else ""
        in_memory = url.startswith("sqlite") and (url.endswith("://") or ":memory:" in url)
        if in_memory or type(given).__name__ == "InMemoryStorage":
            raise UnsupportedArgument(
                f"n_jobs: storage={given!r} is in memory, and processes cannot share it. Leave storage out to use a "
                "file."
            )
    for delay in _RETRY_DELAYS:
        try:
            return get_storage(given)
        except ArgumentError:
            raise InvalidArgument(
                f"storage={given!r} is not a database URL: give one such as 'sqlite:///search.db'."
            ) from None
        except DBAPIError as error:
            logger.info("The storage could not be opened. Trying again in %g s: %s", delay, error)
        time.sleep(delay)
    return get_storage(given)


def open_journal(path: str) -> Any:
    """Open a file as a storage that several processes can share."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return JournalStorage(JournalFileBackend(path))


class TrialCount:
    """Counts the trials of a study over all processes and restarts.

    Args:
        study: a study, which other processes may be working on.
        wanted: the number of trials that the study is to have; None for no limit.
    """

    def __init__(self, study: Study, wanted: int | None) -> None:
        self.study = study
        self.wanted = wanted
        self._retry_marked_trials()

    def remaining(self) -> int | None:
        """The number of trials that no process has started; None for no limit.

        Before it returns 0, it waits until the owner of each running trial is known.
        """
        while True:
            unknown_owner = self._mark_interrupted()
            if self.wanted is None:
                return None
            remaining = max(0, self.wanted - len(self._counted()))
            if remaining or not unknown_owner:
                return remaining
            time.sleep(0.1)

    def is_surplus(self, number: int) -> bool:
        """Whether a trial is one too many, because other processes started the last trials at the same time."""
        return self.wanted is not None and sum(trial.number < number for trial in self._counted()) >= self.wanted

    def _counted(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if _counts(trial)]

    def _mark_interrupted(self) -> bool:
        """Fail the running trials whose process has ended.

        Returns:
            Whether there is a running trial whose owner is not known yet.
        """
        from optuna.trial import TrialState

        unknown_owner = False
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get(OWNER)
            assert trial.datetime_start is not None
            if owner is None and datetime.now() - trial.datetime_start <= _TIME_TO_SET_OWNER:
                unknown_owner = True
            elif owner is None or has_ended(owner):
                self._interrupt(trial, f"its process ({owner or 'unknown'}) has ended")
        return unknown_owner

    def _retry_marked_trials(self) -> None:
        """Retry trials that a process marked as interrupted before it was killed."""
        trials = self.study.get_trials(deepcopy=False)
        retried = {trial.user_attrs.get(RETRY_OF) for trial in trials}
        for trial in trials:
            marked = trial.state.name == "FAIL" and INTERRUPTED in trial.user_attrs and trial.params
            if marked and trial.number not in retried:
                enqueue_retry(self.study, trial.number)

    def _interrupt(self, trial: FrozenTrial, reason: str) -> None:
        """Mark a trial as interrupted and retry it, unless another process has just done so."""
        from optuna import exceptions
        from optuna.trial import TrialState

        # Optuna 4.3 gave this RuntimeError a name.
        already_finished = getattr(exceptions, "UpdateFinishedTrialError", RuntimeError)
        try:
            self.study._storage.set_trial_user_attr(trial._trial_id, INTERRUPTED, reason)
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (already_finished, ValueError):
            return
        enqueue_retry(self.study, trial.number)


def enqueue_retry(study: Study, number: int) -> None:
    """Enqueue a trial with the hyperparameters of an interrupted one.

    A retry that was interrupted during training is not retried, since its hyperparameters may be the cause.
    """
    trial = study.get_trials(deepcopy=False)[number]
    params = trial.params or trial.system_attrs.get("fixed_params")
    if params and not (trial.params and RETRY_OF in trial.user_attrs):
        study.enqueue_trial(params, user_attrs={RETRY_OF: trial.user_attrs.get(RETRY_OF, number)})


def _counts(trial: FrozenTrial) -> bool:
    if trial.state.name == "FAIL":  # Optuna's heartbeat fails trials of processes that have ended, without a reason
        return FAILED in trial.user_attrs
    return trial.state.name != "WAITING"
