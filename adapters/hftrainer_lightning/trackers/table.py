"""Lightning's loggers: THE TABLE of those that `report_to` names, the users' own, and a substitute."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import Logger

from hftrainer_lightning.trackers.tracker import LogFolder, Tracker

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

logger = logging.getLogger(__name__)

#: Name in `report_to` → the class that writes to it.
TRACKERS = {
    "comet_ml": "comet.Comet",
    "csv": "tracker.CSV",
    "mlflow": "mlflow.MLflow",
    "tensorboard": "tracker.TensorBoard",
    "wandb": "wandb.Wandb",
}


def is_lightning_logger(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning logger, as an instance or as a class."""
    return issubclass(candidate, Logger) if isinstance(candidate, type) else isinstance(candidate, Logger)


def make_tracker(name: str, args: BaseArguments, folder: LogFolder | None = None) -> Tracker:
    """The tracker for a name in `TRACKERS`.

    Args:
        name: its name.
        args: the run's arguments.
        folder: where the trackers of a Trainer write files; default a new one.
    """
    module, _, kind = TRACKERS[name].partition(".")
    folder = LogFolder(args) if folder is None else folder
    return getattr(importlib.import_module(f"hftrainer_lightning.trackers.{module}"), kind)(args, folder)


def make_trackers(
    names: Iterable[str], loggers: Iterable[Logger], args: BaseArguments, folder: LogFolder
) -> list[Tracker]:
    """The trackers that do not have a callback class of their own.

    Args:
        names: names in `TRACKERS`.
        loggers: the user's own loggers.
        args: the run's arguments.
        folder: where they write files.
    """
    own = [make_tracker(name, args, folder) for name in names]
    return [*own, *(Tracker(args, folder, given) for given in loggers)]


class CallbackValues(Logger):
    """Receives what Lightning's callbacks log when there is no logger; some callbacks refuse to run without one.

    Args:
        receive: called with the numbers by name.
        folder: for callbacks that write to their logger's folder.
    """

    def __init__(self, receive: Callable[[Mapping[str, float]], None], folder: str) -> None:
        super().__init__()
        self._receive = receive
        self._folder = folder

    @property
    def name(self) -> str:
        """Empty, so that it does not become a folder."""
        return ""

    @property
    def version(self) -> str:
        """Empty, so that it does not become a folder."""
        return ""

    @property
    def save_dir(self) -> str:
        """The output folder."""
        return self._folder

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass on the numbers, without the epoch that Lightning adds: every log line has it already."""
        values = {
            name: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for name, v in metrics.items()
        }
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "epoch"}
        for name in values.keys() - numbers.keys() - {"epoch"}:
            logger.warning("%s=%r is not a number: it is left out of the log line.", name, values[name])
        self._receive(numbers)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the hyperparameters are in `training_args.bin`."""
