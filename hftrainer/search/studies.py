"""Storages of studies, and the counts of their trials over all processes and restarts."""

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
#: The process that trains it: host, process id, start time.
OWNER = "process"
#: The reason of a failure. A failed trial counts.
FAILED = "failed"
#: The reason of an interruption. The trial does not count, and another trial replaces it.
INTERRUPTED = "interrupted"
#: The number of the interrupted trial with the same hyperparameters.
RETRY_OF = "again"

#: A running trial without an owner counts as interrupted after this time.
_TIME_TO_SET_OWNER = timedelta(seconds=10)
#: Seconds before each further attempt to open a database.
_RETRY_DELAYS = (0.1, 0.5, 2.0)


def open_storage(storage: Any, journal: str | None = None) -> Any:
    """Open a storage in any form that `create_study` accepts.

    If several processes open a new database at the same time, one creates its tables and the others fail, so we retry.

    Args:
        storage: the storage.
        journal: if processes need to share the storage, a file to use if `storage` is None.

    Raises:
        InvalidArgument: if a string is not a database URL.
        UnsupportedArgument: if processes need to share the storage, but it is in memory.
    """
    from optuna.storages import get_storage
    from sqlalchemy.exc import ArgumentError, DBAPIError

    if journal is not None:
        if storage is None:
            return open_journal(journal)
        url = storage if isinstance(storage, str) else ""
        is_in_memory = url.startswith("sqlite") and (url.endswith("://") or ":memory:" in url)
        if is_in_memory or type(storage).__name__ == "InMemoryStorage":
            raise UnsupportedArgument(
                f"n_jobs: storage={storage!r} is in memory, so processes cannot share it. Omit storage to use a file."
            )
    for delay in _RETRY_DELAYS:
        try:
            return get_storage(storage)
        except ArgumentError:
            raise InvalidArgument(
                f"storage={storage!r} is not a database URL: use one such as 'sqlite:///search.db'."
            ) from None
        except DBAPIError as error:
            logger.info("The storage could not be opened. Trying again in %g s: %s", delay, error)
        time.sleep(delay)
    return get_storage(storage)


def open_journal(path: str) -> Any:
    """Open a journal file, a storage that several processes can share."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return JournalStorage(JournalFileBackend(path))


class TrialCount:
    """Counts the trials of a study over all processes and restarts.

    Args:
        study: a study, whose trials other processes may train too.
        n_trials: the target number of trials; None for no limit.
    """

    def __init__(self, study: Study, n_trials: int | None) -> None:
        self.study = study
        self.n_trials = n_trials
        self._retry_marked_trials()

    def count_remaining_trials(self) -> int | None:
        """The number of trials that no process has started; None for no limit.

        Waits until the owner of each running trial is known, before it returns 0.
        """
        while True:
            has_unknown_owner = self._fail_interrupted_trials()
            if self.n_trials is None:
                return None
            remaining_trials = max(0, self.n_trials - len(self._trials()))
            if remaining_trials or not has_unknown_owner:
                return remaining_trials
            time.sleep(0.1)

    def is_surplus(self, number: int) -> bool:
        """Whether a trial exceeds the limit, because other processes started the last trials at the same time."""
        return self.n_trials is not None and sum(trial.number < number for trial in self._trials()) >= self.n_trials

    def _trials(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if _counts_as_trial(trial)]

    def _fail_interrupted_trials(self) -> bool:
        """Fail the running trials whose process has ended.

        Returns:
            Whether the owner of a running trial is still unknown.
        """
        from optuna.trial import TrialState

        has_unknown_owner = False
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get(OWNER)
            assert trial.datetime_start is not None
            if owner is None and datetime.now() - trial.datetime_start <= _TIME_TO_SET_OWNER:
                has_unknown_owner = True
            elif owner is None or has_ended(owner):
                self._interrupt(trial, f"its process ({owner or 'unknown'}) has ended")
        return has_unknown_owner

    def _retry_marked_trials(self) -> None:
        """Retry trials that a process marked as interrupted before it was killed."""
        trials = self.study.get_trials(deepcopy=False)
        retried_numbers = {trial.user_attrs.get(RETRY_OF) for trial in trials}
        for trial in trials:
            is_marked = trial.state.name == "FAIL" and INTERRUPTED in trial.user_attrs and trial.params
            if is_marked and trial.number not in retried_numbers:
                enqueue_retry(self.study, trial.number)

    def _interrupt(self, trial: FrozenTrial, reason: str) -> None:
        """Mark a trial as interrupted and retry it, unless another process already did so."""
        from optuna import exceptions
        from optuna.trial import TrialState

        # Optuna 4.3 introduced a subclass of RuntimeError.
        finished_error = getattr(exceptions, "UpdateFinishedTrialError", RuntimeError)
        try:
            self.study._storage.set_trial_user_attr(trial._trial_id, INTERRUPTED, reason)
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (finished_error, ValueError):
            return
        enqueue_retry(self.study, trial.number)


def enqueue_retry(study: Study, number: int) -> None:
    """Enqueue a trial with the hyperparameters of an interrupted trial.

    A retry that was interrupted during training is not retried, since its hyperparameters may be the cause.
    """
    trial = study.get_trials(deepcopy=False)[number]
    params = trial.params or trial.system_attrs.get("fixed_params")
    if params and not (trial.params and RETRY_OF in trial.user_attrs):
        study.enqueue_trial(params, user_attrs={RETRY_OF: trial.user_attrs.get(RETRY_OF, number)})


def _counts_as_trial(trial: FrozenTrial) -> bool:
    # Optuna's heartbeat fails trials of ended processes, without a reason.
    if trial.state.name == "FAIL":
        return FAILED in trial.user_attrs
    return trial.state.name != "WAITING"
