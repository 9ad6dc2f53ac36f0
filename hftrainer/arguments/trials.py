"""The hyperparameters of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrainer.errors import InvalidArgument


def hyperparameters(trial: Any) -> Mapping[str, Any]:
    """The hyperparameters that a trial of a search has chosen.

    Raises:
        InvalidArgument: if `trial` is neither a trial nor a mapping.
    """
    chosen = trial if isinstance(trial, Mapping) else getattr(trial, "params", None)
    if not isinstance(chosen, Mapping):
        raise InvalidArgument(f"trial={trial!r}: give a trial of Optuna, or a dict of hyperparameters.")
    return chosen
