"""A trial that several processes train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SharedTrial:
    """Stands for a trial of Optuna in each process: what is asked of it, the main process asks and tells the others.

    All processes must ask the same in the same order; `number` and `params` are known without asking.

    Args:
        trial: Optuna's, in the main process; None in the others.
        number: its number in the study.
        from_main: calls a function in the main process, and returns in every process what it returns.

    Attributes:
        params: what has been suggested, by name.
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
            raise AttributeError(f"A trial of several processes has no {name!r}, only number, params and methods.")

        def ask(*args: Any, **kwargs: Any) -> Any:
            answer, self.params = self._from_main(
                lambda: (getattr(self._trial, name)(*args, **kwargs), self._trial.params)
            )
            return answer

        return ask
