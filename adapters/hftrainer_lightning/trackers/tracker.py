"""Trackers: what the Trainer writes to a Lightning logger, and when, with the names and texts of transformers."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

#: Metrics of a run's last log line: one number for the whole run, not a curve.
SUMMARY_METRICS = frozenset(
    {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
)


def renamed(logs: Mapping[str, Any]) -> dict[str, Any]:
    """A log line with the trackers' names: `eval_loss` → `eval/loss`, `test_loss` → `test/loss`, others `train/…`."""
    return {_renamed(name): value for name, value in logs.items()}


def _renamed(name: str) -> str:
    stage, _, rest = name.partition("_")
    return f"{stage}/{rest}" if stage in ("eval", "test") and "_" in name else f"train/{name}"


def config_of(model: Any) -> dict[str, Any]:
    """The model's configuration as a dict; empty when it has none."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def adapters_of(model: Any) -> dict[str, Any]:
    """The configurations of PEFT's adapters under 'peft_config'; empty for other models."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping):
        return {}
    return {"peft_config": {name: config.to_dict() for name, config in adapters.items()}}


def arguments_of(args: BaseArguments) -> dict[str, Any]:
    """The arguments as values that every tracker can write: a subclass's fields may hold any object."""
    values: dict[str, Any] = json.loads(args.to_json_string())
    return values


def to_number(value: Any) -> Any:
    """The number in a tensor of one element; any other value is returned as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


class LogFolder:
    """The folder for trackers that write files; the same for all trackers of a run.

    Args:
        args: the run's arguments.
    """

    def __init__(self, args: BaseArguments) -> None:
        self.args = args
        self._paths: dict[str | None, str] = {}

    def path(self, trial: str | None) -> str:
        """The folder of a run, or of a hyperparameter trial by its name."""
        if trial not in self._paths:
            self._paths[trial] = self._new(trial)
        return self._paths[trial]

    def _new(self, trial: str | None) -> str:
        now = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        default = os.path.join(str(self.args.output_dir), "runs", now)
        if trial is not None:
            return os.path.join(default, trial)
        given = getattr(self.args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
        return os.path.expanduser(given) if given else default


class Tracker:
    """Writes the Trainer's events to one Lightning logger. Subclasses use their tracker's names.

    The logger is made when it is first needed, because making some loggers starts a run.

    Args:
        args: the run's arguments.
        folder: where to write files.
        given: the user's own logger.
    """

    #: Whether an evaluation without training writes the hyperparameters too.
    describes_evaluations = True

    def __init__(self, args: BaseArguments, folder: LogFolder, given: Logger | None = None) -> None:
        self.args = args
        self.folder = folder
        self._given = self._logger = given
        self.described = False
        self._dropped: set[str] = set()
        self.trial: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_logger": self._given}  # an open run belongs to this process

    @property
    def opened(self) -> Any:
        """The Lightning logger, if it is open."""
        return self._logger

    @property
    def logger(self) -> Any:
        """The Lightning logger."""
        if self._logger is None:
            self._logger = self.open()
        return self._logger

    def open(self) -> Logger:
        """Make the logger."""
        raise NotImplementedError(f"{type(self).__name__} must make its logger")

    def start_trial(self, name: str | None) -> None:
        """Start a new run for a hyperparameter trial."""
        if self._logger is not None and self._given is None:
            self._logger.finalize("success")
        self._logger = self._given
        self.described = False
        self.trial = name

    def begin(self, model: Any, state: TrainerState) -> None:
        """Begin a training run."""
        self.describe_once(model, state)

    def describe_once(self, model: Any, state: TrainerState) -> None:
        """Write the hyperparameters, unless they were written before."""
        if not self.described:
            self.described = True
            self.describe(model, state)

    def describe(self, model: Any, state: TrainerState) -> None:
        """Write the hyperparameters: the arguments, and the model's configuration."""
        self.logger.log_hyperparams({**config_of(model), **arguments_of(self.args)})

    def log(self, logs: Mapping[str, Any], model: Any, state: TrainerState) -> None:
        """Write a log line."""
        if self.describes_evaluations:
            self.describe_once(model, state)
        self.write(logs, state)

    def write(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        """Write the numbers of a log line."""
        self.logger.log_metrics(self.numbers(renamed(logs)), step=state.global_step)
        self.logger.save()

    def predicted(self, metrics: Mapping[str, Any], model: Any, state: TrainerState) -> None:
        """Write the metrics of a prediction; as in transformers, only W&B and Comet do."""

    def saved(self, checkpoint: str, state: TrainerState) -> None:
        """Upload a checkpoint, if the tracker's settings ask for it."""

    def end(self, model: Any, state: TrainerState, save_model: Callable[[str], None]) -> None:
        """End a training run; later events, such as an evaluation, are still written."""
        self.logger.finalize("success")

    def numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that are numbers; the others are left out, with one warning for each name."""
        return {name: value for name, value in values.items() if self.is_number(name, value)}

    def is_number(self, name: str, value: Any) -> bool:
        """Whether a value can be written."""
        if not isinstance(value, (int, float)) and name not in self._dropped:
            self._dropped.add(name)
            logger.warning("%s=%r (%s) is not a number: it is not sent to trackers.", name, value, type(value).__name__)
        return isinstance(value, (int, float))


def _no_writer(**kwargs: Any) -> None:
    """The writer before the callback has set one."""


class _LateWriter:
    """A placeholder until something is written: Lightning asks for a writer before training begins.

    Args:
        make: makes the writer.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def flush(self) -> None:
        """Nothing: nothing is written yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


class _WriterLogger(TensorBoardLogger):
    """Writes with the callback's `tb_writer`, which is made when something is first written.

    Args:
        writer: returns the writer; with `make=False` None if there is none yet.
        folder: where it writes.
    """

    def __init__(self, writer: Callable[..., Any], folder: str) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False)
        self._writer = writer

    @property
    def experiment(self) -> Any:
        """The writer."""
        there = self._writer(make=False)
        return there if there is not None else _LateWriter(self._writer)


class TensorBoard(Tracker):
    """Event files: the arguments and the configuration as texts, log values as scalars or texts."""

    describes_evaluations = False

    def __init__(self, args: BaseArguments, folder: LogFolder, given: Logger | None = None) -> None:
        super().__init__(args, folder, given)
        #: The folder, if it differs from that of the other trackers.
        self.directory: str | None = None
        #: Makes the writer, or returns the script's.
        self.make_writer: Callable[..., Any] = _no_writer

    def path(self) -> str:
        """The folder."""
        return self.folder.path(self.trial) if self.directory is None else self.directory

    def open(self) -> Logger:
        """Write directly to the folder, without the scalar that Lightning adds for its hyperparameter table."""
        return _WriterLogger(lambda **how: self.make_writer(**how), self.path())

    def describe(self, model: Any, state: TrainerState) -> None:
        """Write the arguments and the configuration as JSON."""
        self.logger.hparams.update(self.args.to_sanitized_dict())
        self.logger.experiment.add_text("args", self.args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            try:
                text = config.to_json_string()
            except TypeError:  # the script has put objects into it
                text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=repr)
            self.logger.experiment.add_text("model_config", text)

    def write(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        """Write the line, and flush the file."""
        writer = self.logger.experiment
        for name, value in renamed(logs).items():
            if isinstance(value, str):
                writer.add_text(name, value, state.global_step)
            elif self.is_number(name, value):
                writer.add_scalar(name, value, state.global_step)
        writer.flush()


class CSV(Tracker):
    """A table of all log lines, `csv/version_N/metrics.csv`; each Trainer has its own N."""

    def open(self) -> Logger:
        """Write next to TensorBoard's files."""
        return CSVLogger(self.folder.path(self.trial), name="csv")


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
    make: type[Tracker] = getattr(importlib.import_module(f"hftrainer_lightning.trackers.{module}"), kind)
    return make(args, LogFolder(args) if folder is None else folder)


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


class CallbackMetricsLogger(Logger):
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
        values = {name: to_number(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "epoch"}
        for name in values.keys() - numbers.keys() - {"epoch"}:
            logger.warning("%s=%r is not a number: it is left out of the log line.", name, values[name])
        self._receive(numbers)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the hyperparameters are in `training_args.bin`."""
