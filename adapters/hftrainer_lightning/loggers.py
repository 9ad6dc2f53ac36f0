"""Lightning's loggers for our trackers, and a fallback logger for Lightning's callbacks."""

from __future__ import annotations

import csv
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.loggers import (
    CometLogger as CometLogger,
    CSVLogger as CSVLogger,
    Logger,
    MLFlowLogger as MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

logger = logging.getLogger(__name__)

#: The x-axis of W&B's curves.
STEP = "train/global_step"


def is_lightning_logger(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning logger, as an instance or as a class."""
    return issubclass(candidate, Logger) if isinstance(candidate, type) else isinstance(candidate, Logger)


def count_rows(table: CSVLogger) -> int:
    """Number of rows in a table, including those that are not written yet."""
    writer = table.experiment
    if not os.path.isfile(writer.metrics_file_path):
        return len(writer.metrics)
    with open(writer.metrics_file_path, encoding="utf-8", newline="") as file:
        return sum(1 for _ in csv.DictReader(file)) + len(writer.metrics)


class ResumedCSVLogger(CSVLogger):
    """Continues an earlier run's table after its first rows. Lightning's logger would delete the table.

    Args:
        folder: see `CSVLogger`.
        name: see `CSVLogger`.
        version: the number of the earlier table.
        rows: number of rows to keep.
    """

    def __init__(self, folder: str, name: str, version: int, rows: int) -> None:
        super().__init__(folder, name=name, version=version)
        self._rows = rows

    @functools.cached_property
    def experiment(self) -> Any:
        """The writer that continues the table."""
        # Lightning's writer deletes the files in its folder: start it in another one, so that a kill loses no rows.
        staging_folder = os.path.join(self.log_dir, "rewinding")
        writer = ExperimentWriter(staging_folder)
        table = os.path.join(self.log_dir, writer.NAME_METRICS_FILE)
        if os.path.isfile(table):
            with open(table, encoding="utf-8", newline="") as file:
                for row in itertools.islice(csv.DictReader(file), self._rows):
                    # A kill may have truncated the last row.
                    if None not in row.values():
                        step = int(row.pop("step"))
                        metrics: dict[str, Any] = {name: value for name, value in row.items() if value}
                        writer.log_metrics(metrics, step)
            writer.save()
            if os.path.isfile(writer.metrics_file_path):
                os.replace(writer.metrics_file_path, table)
            else:
                os.remove(table)
        writer.log_dir = self.log_dir
        writer.metrics_file_path = table
        shutil.rmtree(staging_folder)
        return writer

    def finalize(self, status: str) -> None:
        """Write the metrics that were logged since the last row."""
        self.save()


class TrainStepLogger(WandbLogger):
    """Uses the Trainer's steps as the x-axis. Lightning's logger names its axis differently.

    Args:
        run: the W&B run.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(experiment=run)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write the metrics at a step of the Trainer."""
        self.experiment.log(dict(metrics) if step is None else {**metrics, STEP: step})


class _LazyWriter:
    """Creates the writer at its first use. Lightning requests a writer before training starts.

    Args:
        create_writer: creates the writer.
    """

    def __init__(self, create_writer: Callable[[], Any]) -> None:
        self._create_writer = create_writer

    def flush(self) -> None:
        """Do nothing: nothing has been written yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._create_writer(), name)


class WriterLogger(TensorBoardLogger):
    """Writes with the callback's `tb_writer`, which is created at the first write.

    It omits the scalar that Lightning writes for its table of hyperparameters.

    Args:
        get_writer: returns the writer; with `create=False`, None if it has not been created yet.
        folder: the folder for the files.
    """

    def __init__(self, get_writer: Callable[..., Any], folder: str) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False)
        self._get_writer = get_writer

    @property
    def experiment(self) -> Any:
        """The callback's writer, or a stand-in that creates it at its first use."""
        writer = self._get_writer(create=False)
        return writer if writer is not None else _LazyWriter(self._get_writer)


class CallbackMetricsLogger(Logger):
    """Receives the metrics that Lightning's callbacks log. Some callbacks refuse to run without a logger.

    Args:
        log_values: called with the metrics (name → number).
        folder: for callbacks that write to their logger's folder.
    """

    #: Empty, since callbacks would turn the names into folders.
    name = version = save_dir = ""

    def __init__(self, log_values: Callable[[Mapping[str, float]], None], folder: str) -> None:
        super().__init__()
        self._log_values = log_values
        self.save_dir = folder

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass on the numbers, except the epoch that Lightning adds: every log line has it."""
        numbers = {}
        for name, value in metrics.items():
            number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if not isinstance(number, (int, float)):
                logger.warning("%s=%r is not a number: it is left out of the log line.", name, value)
            elif name != "epoch":
                numbers[name] = number
        self._log_values(numbers)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the hyperparameters are in `training_args.bin`."""
