"""A trial that several processes train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SharedTrial:
    """A trial of Optuna in several processes: the main process calls its methods and broadcasts the results.

    All processes must call the same methods in the same order. Reading `number` and `params` needs no communication.

    Args:
        trial: Optuna's trial in the main process; None in the others.
        number: the trial's number in the study.
        from_main: calls a function in the main process, and returns its result, or raises its error, in every process.

    Attributes:
        params: the suggested values by name.
    """

    def __init__(self, trial: Any, number: int, from_main: Callable[[Callable[[], Any]], Any]) -> None:
        self._trial = trial
        self._from_main = from_main
        self.number = number
        self.params: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of Optuna's trial."""
        from optuna import Trial

        if name.startswith("_") or not callable(getattr(Trial, name, None)):
            raise AttributeError(f"A trial in several processes has number, params and methods, but not {name!r}.")

        def call(*args: Any, **kwargs: Any) -> Any:
            result, self.params = self._from_main(
                lambda: (getattr(self._trial, name)(*args, **kwargs), self._trial.params)
            )
            return result

        return call
