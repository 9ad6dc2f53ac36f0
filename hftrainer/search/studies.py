"""Which trials of a study count, whoever runs them, and which were cut off by the end of their process."""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument
from hftrainer.parallel.process_identity import is_gone

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

#: User attribute of a trial → what it says.
OWNER = "process"  # who trains it: host, process id, and when that process began
FAILED = "failed"  # why it failed by itself; it counts as one of the trials asked for
INTERRUPTED = "interrupted"  # why it was cut off; another one takes its place
AGAIN = "again"  # the trial that was cut off and had the same hyperparameters
#: After which a running trial whose process has not said who it is counts as cut off.
_TO_SAY_SO = timedelta(seconds=10)


#: Seconds after which a database is opened again.
_UNTIL_OTHERS_HAVE_MADE_IT = (0.1, 0.5, 2.0)


def open_storage(given: Any) -> Any:
    """A storage of Optuna from what `create_study` takes as `storage`.

    Of several processes that begin with a new database at once, all but one fail to make its tables; a moment later
    they are there.
    """
    from optuna.storages import get_storage
    from sqlalchemy.exc import ArgumentError, DBAPIError

    for pause in _UNTIL_OTHERS_HAVE_MADE_IT:
        try:
            return get_storage(given)
        except ArgumentError:
            raise InvalidArgument(
                f"storage={given!r} is no address of a database: give one such as 'sqlite:///search.db'."
            ) from None
        except DBAPIError as error:
            logger.info("The storage could not be opened, and is tried again in %g s: %s", pause, error)
        time.sleep(pause)
    return get_storage(given)


class TrialCount:
    """Counts the trials of a study up to the number that was asked for, over all processes and restarts.

    Args:
        study: which others may be working on.
        wanted: trials in all; None for no end.
    """

    def __init__(self, study: Study, wanted: int | None) -> None:
        self.study = study
        self.wanted = wanted
        self._try_what_was_marked()

    def left(self) -> int | None:
        """Trials that nobody has begun yet; None for no end.

        When there are none, waits for processes that have begun one and have not said who they are.
        """
        while True:
            unclear = self._mark_interrupted()
            if self.wanted is None:
                return None
            left = self.wanted - len(self._counted())
            if left > 0 or not unclear:
                return max(left, 0)
            time.sleep(0.1)

    def is_surplus(self, number: int) -> bool:
        """Whether others have begun the last trials at the same moment as this one."""
        return self.wanted is not None and sum(trial.number < number for trial in self._counted()) >= self.wanted

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _counted(self) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if _counts(trial)]

    def _mark_interrupted(self) -> bool:
        """Fail the running trials whose process is gone; whether there are any of which that is not clear yet."""
        unclear = False
        for trial in self._trials():
            if trial.state.name != "RUNNING":
                continue
            owner = trial.user_attrs.get(OWNER)
            if owner is None:
                assert trial.datetime_start is not None
                late = datetime.now() - trial.datetime_start > _TO_SAY_SO
                unclear |= not late
            if is_gone(owner) if owner is not None else late:
                self._interrupt(trial, f"its process ({owner or 'unknown'}) has ended")
        return unclear

    def _try_what_was_marked(self) -> None:
        """Try again the trials of which a process has said that they were cut off, and was killed before it did so."""
        trials = self._trials()
        tried = {trial.user_attrs.get(AGAIN) for trial in trials}
        for trial in trials:
            marked = trial.state.name == "FAIL" and INTERRUPTED in trial.user_attrs and trial.params
            if marked and trial.number not in tried:
                try_again(self.study, trial.number)

    def _interrupt(self, trial: FrozenTrial, reason: str) -> None:
        """Mark a trial as cut off, unless another process has done so at the same moment."""
        from optuna import exceptions
        from optuna.trial import TrialState

        # Optuna has a name of its own for this RuntimeError since v4.3.
        already_finished = getattr(exceptions, "UpdateFinishedTrialError", RuntimeError)
        try:
            self.study._storage.set_trial_user_attr(trial._trial_id, INTERRUPTED, reason)
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (already_finished, ValueError):
            return
        try_again(self.study, trial.number)


def try_again(study: Study, number: int) -> None:
    """Let the next trial have the hyperparameters of one that was cut off.

    Once, for it may be to blame itself; not when it had not begun to train.
    """
    trial = study.get_trials(deepcopy=False)[number]
    chosen = trial.params or trial.system_attrs.get("fixed_params")
    if chosen and not (trial.params and AGAIN in trial.user_attrs):
        study.enqueue_trial(chosen, user_attrs={AGAIN: trial.user_attrs.get(AGAIN, number)})


def _counts(trial: FrozenTrial) -> bool:
    if trial.state.name == "FAIL":  # without a reason of its own: Optuna has found that its process is gone
        return FAILED in trial.user_attrs
    return trial.state.name != "WAITING"
