"""What a trial of a hyperparameter search has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrainer.errors import InvalidArgument


def hyperparameters(trial: Any) -> Mapping[str, Any]:
    """What a trial has chosen.

    Raises:
        InvalidArgument: for something that is neither a trial nor a mapping.
    """
    chosen = trial if isinstance(trial, Mapping) else getattr(trial, "params", None)
    if not isinstance(chosen, Mapping):
        raise InvalidArgument(f"trial={trial!r}: give a trial of Optuna, or a dict of hyperparameters.")
    return chosen
