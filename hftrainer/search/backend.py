"""What a search needs of the library that chooses the hyperparameters."""

from __future__ import annotations

import abc
import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.trainer_utils import BestRun


class SearchBackend(abc.ABC):
    """One search with one library.

    Attributes:
        name: what `backend` calls it, which is also the module that must be importable.
        install: what to install for it.
    """

    name: ClassVar[str]
    install: ClassVar[str]

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(cls.name) is not None

    @staticmethod
    @abc.abstractmethod
    def default_hp_space(trial: Any) -> dict[str, Any]:
        """What is searched when no `hp_space` is given."""

    @abc.abstractmethod
    def run(self, trainer: Trainer, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Run the search.

        Args:
            trainer: trains the trials.
            n_trials: how many.
            direction: 'minimize' or 'maximize', or a list of these for several objectives.
            kwargs: further keywords of the library.
        """

    @abc.abstractmethod
    def hyperparameters(self, trainer: Trainer, trial: Any) -> Any:
        """The arguments that a trial changes."""

    @abc.abstractmethod
    def run_id(self, trial: Any) -> str:
        """What the folder `run-xxx` of a trial is called by."""

    @abc.abstractmethod
    def checked(self, objective: Any) -> Any:
        """What `compute_objective` has returned, if the library can use it.

        Raises:
            InvalidArgument: if it cannot.
        """

    @abc.abstractmethod
    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any) -> None:
        """Tell the library about an evaluation, which may end the trial.

        Args:
            trainer: in the trial.
            trial: the trial.
            step: optimizer steps done.
            objective: a number, or one for each direction.
        """
