"""What a search needs of the library that chooses the hyperparameters."""

from __future__ import annotations

import abc
import difflib
import importlib.util
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hftrainer.errors import InvalidArgument, UnknownArgument

if TYPE_CHECKING:
    from hftrainer.trainer_utils import BestRun
    from hftrainer.training.trainer_api import TrainerApi


class SearchBackend(abc.ABC):
    """One search with one library.

    Attributes:
        name: what `backend` calls it, which is also the module that must be importable.
        install: what to install for it.
        directions: 'minimize' or 'maximize' for each objective.
    """

    name: ClassVar[str]
    install: ClassVar[str]
    directions: list[str]

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(cls.name) is not None

    @staticmethod
    @abc.abstractmethod
    def default_hp_space(trial: Any) -> dict[str, Any]:
        """What is searched when no `hp_space` is given."""

    @abc.abstractmethod
    def run(self, trainer: TrainerApi, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Run the search.

        Args:
            trainer: trains the trials.
            n_trials: how many.
            direction: 'minimize' or 'maximize', or a list of these for several objectives.
            kwargs: further keywords of the library.
        """

    @abc.abstractmethod
    def hyperparameters(self, trainer: TrainerApi, trial: Any) -> Any:
        """The arguments that a trial changes."""

    @abc.abstractmethod
    def run_id(self, trial: Any) -> str:
        """What the folder `run-xxx` of a trial is called by."""

    @abc.abstractmethod
    def report(self, trainer: TrainerApi, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Tell the library about an evaluation, which may end the trial.

        Args:
            trainer: in the trial.
            trial: the trial.
            step: optimizer steps done.
            objective: a number, or one for each direction.
            metrics: of the evaluation.
        """

    def space(self, trainer: TrainerApi) -> Any:
        """What `hp_space` describes for a library that chooses by itself.

        Raises:
            InvalidArgument: when it is written for a trial.
        """
        try:
            return trainer.hp_space(None)
        except (AttributeError, TypeError) as error:
            if "NoneType" not in str(error):
                raise
            raise InvalidArgument(
                f"hp_space asks a trial, as with Optuna ({error}), and backend={self.name!r} calls it with None: it "
                "must return a description of the space."
            ) from error

    def after_saving(self, trainer: TrainerApi) -> None:  # noqa: B027 - most libraries need nothing then
        """Called in a trial whenever what was due has been logged, evaluated and saved."""

    def checked(self, objective: Any) -> Any:
        """What `compute_objective` has returned.

        Raises:
            InvalidArgument: if it is not one number for each direction.
        """
        values = objective if isinstance(objective, Sequence) else [objective]
        try:
            read = [float(value) for value in values]
        except (TypeError, ValueError):
            read = []
        if len(read) != len(self.directions):
            wanted = "a number" if len(self.directions) == 1 else f"{len(self.directions)} numbers, as direction has"
            raise InvalidArgument(f"compute_objective returned {objective!r}: it must return {wanted}.")
        return values[0] if len(self.directions) == 1 else objective


def read_directions(direction: Any) -> list[str]:
    """The directions, as a list of 'minimize' and 'maximize'.

    Raises:
        InvalidArgument: for anything else.
    """
    given = list(direction) if isinstance(direction, (list, tuple)) else [direction]
    names = [str(getattr(each, "name", each)).lower() for each in given]
    if not names or any(name not in ("minimize", "maximize") for name in names):
        raise InvalidArgument(f"direction={direction!r}: give 'minimize' or 'maximize', or a list of these.")
    return names


def check_keywords(library: str, given: Collection[str], known: Collection[str], ours: Mapping[str, str]) -> None:
    """Refuse keywords that a library does not know.

    Args:
        library: whose they are.
        given: the keywords.
        known: the library's.
        ours: keywords of the library that the search sets itself → what they are called here.

    Raises:
        UnknownArgument: with the nearest name.
    """
    allowed = {*known, *ours.values()} - set(ours)
    for name in [name for name in given if name not in allowed]:
        near = [ours[name]] if name in ours else difflib.get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownArgument(f"hyperparameter_search with {library} takes no {name!r}{hint}")


def check_end(n_trials: Any, seconds: Any, seconds_name: str) -> None:
    """Refuse a number of trials that is none, or no end.

    Args:
        n_trials: trials; None for no end but `seconds`.
        seconds: after which the search ends, or None.
        seconds_name: what they are called.

    Raises:
        InvalidArgument: for these.
    """
    if n_trials is None and seconds is None:
        raise InvalidArgument(f"n_trials=None never ends: give a number, or {seconds_name} in seconds.")
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
        raise InvalidArgument(f"{seconds_name}={seconds!r}: give a number of seconds above 0.")
    if n_trials is not None and (not isinstance(n_trials, numbers.Integral) or n_trials < 1):
        raise InvalidArgument(f"n_trials={n_trials!r}: give a whole number of at least 1.")


def why_none(states: Sequence[str], reasons: Iterable[str]) -> str:
    """What to say when no trial has been completed.

    Args:
        states: of each trial.
        reasons: why they failed; the last three different ones are told.
    """
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none was run"
    told = "".join(f"\n- {reason}" for reason in list(dict.fromkeys(reasons))[-3:])
    return f"No trial was completed ({counted}), so there is no best one: narrow hp_space or mend what failed.{told}"
