"""Lightning's loggers: THE TABLE of those that `report_to` names, those that users pass, and one for want of any."""

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
    """What writes to one of `TRACKERS`.

    Args:
        name: of the tracker.
        args: of the run.
        folder: where the trackers of a Trainer write files; default one of its own.
    """
    module, _, kind = TRACKERS[name].partition(".")
    folder = LogFolder(args) if folder is None else folder
    return getattr(importlib.import_module(f"hftrainer_lightning.trackers.{module}"), kind)(args, folder)


def make_trackers(
    names: Iterable[str], loggers: Iterable[Logger], args: BaseArguments, folder: LogFolder
) -> list[Tracker]:
    """What the Trainer writes to, besides what has a callback of its own.

    Args:
        names: of `TRACKERS`.
        loggers: further loggers, which the user made.
        args: of the run.
        folder: where they write files.
    """
    own = [make_tracker(name, args, folder) for name in names]
    return [*own, *(Tracker(args, folder, given) for given in loggers)]


class CallbackValues(Logger):
    """Hands on what Lightning's callbacks log when there is no logger, without which some of them refuse to run.

    Args:
        receive: takes the numbers by name.
        folder: where callbacks that ask a logger for a folder write.
    """

    def __init__(self, receive: Callable[[Mapping[str, float]], None], folder: str) -> None:
        super().__init__()
        self._receive = receive
        self._folder = folder

    @property
    def name(self) -> str:
        """Nothing, so that no folder is made of it."""
        return ""

    @property
    def version(self) -> str:
        """Nothing, so that no folder is made of it."""
        return ""

    @property
    def save_dir(self) -> str:
        """The output folder."""
        return self._folder

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand on the numbers; the epoch that Lightning adds is in every log line already."""
        values = {
            name: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for name, v in metrics.items()
        }
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "epoch"}
        for name in values.keys() - numbers.keys() - {"epoch"}:
            logger.warning("%s=%r is no number: the log line does not get it.", name, values[name])
        self._receive(numbers)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the hyperparameters are in `training_args.bin`."""
