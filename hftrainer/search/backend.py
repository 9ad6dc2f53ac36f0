"""The base class of search backends, and their shared checks."""

from __future__ import annotations

import abc
import importlib.util
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hftrainer.errors import InvalidArgument, MetricNotFound, UnknownArgument, suggest

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.trainer import Trainer
    from hftrainer.trainer_utils import BestRun


class TrialFailed(Exception):
    """A trial failed, and the search continues. This exception drops the traceback, so that the model can be freed."""


class SearchBackend(abc.ABC):
    """A search with one library.

    Attributes:
        name: its name in `backend`, which is also the name of the library's module.
        install: the argument of `pip install` for the library.
        directions: 'minimize' or 'maximize' for each objective.
        parts: the parts of the Trainer.
    """

    name: ClassVar[str]
    install: ClassVar[str]
    directions: list[str]

    #: Whether `train_and_evaluate` also reports the evaluation that follows training if training has none.
    reports_last_evaluation: ClassVar[bool] = True

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(cls.name) is not None

    @staticmethod
    @abc.abstractmethod
    def default_hp_space(trial: Any) -> dict[str, Any]:
        """The default search space, used if `hp_space` is None."""

    @abc.abstractmethod
    def run(self, trainer: Trainer, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Run the search.

        Args:
            trainer: trains the trials.
            n_trials: number of trials.
            direction: 'minimize' or 'maximize', or a list of these for several objectives.
            kwargs: other keyword arguments of the library.
        """

    def hyperparameters(self, trainer: Trainer, trial: Any) -> Any:
        """A trial's training arguments (name → value); here the trial, from which the library draws them."""
        return trial

    @abc.abstractmethod
    def run_id(self, trial: Any) -> str:
        """The id of a trial; its folder is `run-{id}`."""

    @abc.abstractmethod
    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Report an evaluation to the library, which may stop the trial.

        Args:
            trainer: trains the trial.
            trial: the trial.
            step: optimizer steps done.
            objective: a number, or one number per direction.
            metrics: the metrics of the evaluation.
        """

    def train_and_evaluate(self, trainer: Trainer, trial: Any, *, checkpoint: str | None = None) -> Any:
        """Train a trial, and return its last objective. Without an evaluation, evaluate after training.

        Args:
            trainer: trains the trial.
            trial: the trial.
            checkpoint: folder of a checkpoint to resume from. If training then does not evaluate, the result is None,
                since the trial has already reported its evaluations.
        """
        trainer.objective = None
        trainer.train(resume_from_checkpoint=checkpoint, trial=trial)
        if trainer.objective is None and checkpoint is None:
            metrics = trainer.evaluate()
            trainer.objective = self.compute_trial_objective(trainer, metrics)
            if self.reports_last_evaluation:
                self.report(trainer, trial, trainer.state.global_step, trainer.objective, metrics)
        return trainer.objective

    def space(self, trainer: Trainer) -> Any:
        """The search space from `hp_space`, for a library that draws the samples.

        Raises:
            InvalidArgument: if `hp_space` needs a trial of Optuna.
        """
        try:
            return trainer.hp_space(None)
        except (AttributeError, TypeError) as error:
            if "NoneType" not in str(error):
                raise
            raise InvalidArgument(
                f"hp_space uses its trial as with Optuna ({error}), but backend={self.name!r} calls it with None. It "
                "must return a description of the search space."
            ) from error

    def send_pending_report(self, trainer: Trainer) -> None:  # noqa: B027 - only some libraries need it
        """Send a delayed report. Called after each step of a trial, after its logs, evaluation and checkpoint."""

    def compute_trial_objective(self, trainer: Trainer, metrics: Mapping[str, Any]) -> Any:
        """The objective of an evaluation, from `compute_objective`; a number if there is one direction.

        Raises:
            InvalidArgument: if it is not one number per direction.
            MetricNotFound: if `compute_objective` reads a metric that the evaluation did not return.
        """
        try:
            objective = trainer.compute_objective(dict(metrics))
        except KeyError as error:
            if not error.args or error.args[0] in metrics:
                raise
            raise MetricNotFound(
                f"compute_objective reads {error.args[0]!r}, but evaluation returns only "
                f"{', '.join(metrics) or 'an empty dict'}."
            ) from error
        values = objective if isinstance(objective, Sequence) else [objective]
        try:
            count = len([float(value) for value in values])
        except (TypeError, ValueError):
            count = 0
        expected = len(self.directions)
        if count != expected:
            expectation = "a number" if expected == 1 else f"{expected} numbers, one per direction"
            raise InvalidArgument(f"compute_objective returned {objective!r}: it must return {expectation}.")
        return values[0] if expected == 1 else objective


def read_directions(direction: Any) -> list[str]:
    """The directions as a list of 'minimize' and 'maximize'.

    Raises:
        InvalidArgument: for any other value.
    """
    directions = list(direction) if isinstance(direction, (list, tuple)) else [direction]
    names = [str(getattr(direction, "name", direction)).lower() for direction in directions]
    if not names or any(name not in ("minimize", "maximize") for name in names):
        raise InvalidArgument(f"direction={direction!r}: use 'minimize' or 'maximize', or a list of these.")
    return names


def check_keywords(library: str, names: Collection[str], known_names: Collection[str], ours: Mapping[str, str]) -> None:
    """Check that a library knows all keyword arguments of a search.

    Args:
        library: the library's name for the error.
        names: names of the keyword arguments.
        known_names: names of the library's keyword arguments.
        ours: keyword arguments that the search sets → their names in `hyperparameter_search`.

    Raises:
        UnknownArgument: for an unknown name, with the most similar known name.
    """
    allowed = {*known_names, *ours.values()} - set(ours)
    for name in [name for name in names if name not in allowed]:
        hint = f"; did you mean {ours[name]!r}?" if name in ours else suggest(name, allowed)
        raise UnknownArgument(f"hyperparameter_search with {library} has no argument {name!r}{hint}")


def check_limits(n_trials: Any, seconds: Any, seconds_name: str) -> None:
    """Check the limits of a search.

    Args:
        n_trials: number of trials; None for no limit.
        seconds: time limit of the search; None for no limit.
        seconds_name: name of the argument `seconds`.

    Raises:
        InvalidArgument: if a limit is invalid, or both are None.
    """
    if n_trials is None and seconds is None:
        raise InvalidArgument(f"n_trials=None: the search would never end. Set n_trials, or {seconds_name} in seconds.")
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
        raise InvalidArgument(f"{seconds_name}={seconds!r} must be a number of seconds above 0.")
    if n_trials is not None and (not isinstance(n_trials, numbers.Integral) or n_trials < 1):
        raise InvalidArgument(f"n_trials={n_trials!r} must be a positive integer.")


def no_trial_message(states: Sequence[str], reasons: Iterable[str]) -> str:
    """The error message if no trial was completed.

    Args:
        states: the state of each trial.
        reasons: the reasons of failed trials. The message contains the last three different reasons.
    """
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trial was started"
    lines = "".join(f"\n- {reason}" for reason in list(dict.fromkeys(reasons))[-3:])
    return f"No trial was completed ({counts}), so there is no best trial. Narrow hp_space or fix the errors.{lines}"
