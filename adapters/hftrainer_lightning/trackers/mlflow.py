"""MLflow, written to as transformers does."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, MLFlowLogger

from hftrainer.parallel.config_files import env_flag
from hftrainer_lightning.trackers.tracker import LogFolder, Tracker, arguments_of, config_of, to_number

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

#: Characters that MLflow's servers do not accept in a metric's name.
_NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_\-. :/]")


class MLflow(Tracker):
    """An MLflow run, with the log line's own names. An active run is reused, and stays active.

    `mlflow` itself reads MLFLOW_TRACKING_URI and MLFLOW_RUN_ID, and decides where to write without them.
    """

    def __init__(self, args: BaseArguments, folder: LogFolder) -> None:
        super().__init__(args, folder)
        self._begun: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether this tracker started the run."""
        return self._begun is not None

    def open(self) -> Logger:
        """Use the active run, or start one."""
        import mlflow

        nested, experiment = env_flag("MLFLOW_NESTED_RUN"), os.environ.get("MLFLOW_EXPERIMENT_NAME")
        run = mlflow.active_run()
        if run is None or nested or os.environ.get("MLFLOW_RUN_ID"):
            if experiment:
                mlflow.set_experiment(experiment)
            run = mlflow.start_run(run_name=self.args.run_name, nested=nested)
            self._begun = run.info.run_id
        return MLFlowLogger(tracking_uri=mlflow.get_tracking_uri(), run_id=run.info.run_id)

    def start_trial(self, name: str | None) -> None:
        """Start a new run for the trial, unless the user's run is active."""
        self._logger = None
        super().start_trial(name)

    def begin(self, model: Any, state: TrainerState) -> None:
        """Begin training; reopens a run that an earlier training ended."""
        super().begin(model, state)
        import mlflow

        if self._begun is not None and mlflow.active_run() is None:
            mlflow.start_run(run_id=self._begun)

    def describe(self, model: Any, state: TrainerState) -> None:
        """Write the parameters that MLflow can hold, and the tags of MLFLOW_TAGS."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        values = {**config_of(model), **arguments_of(self.args)}
        if env_flag("MLFLOW_FLATTEN_PARAMS"):
            values = _flattened(values)
        for name in [name for name, value in values.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH]:
            del values[name]
            logger.warning(
                "MLflow does not get the parameter %s, which is longer than %d characters; of a dict, "
                "MLFLOW_FLATTEN_PARAMS=1 writes each entry.",
                name,
                MAX_PARAM_VAL_LENGTH,
            )
        most = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        items = list(values.items())[: int(most) if most.isdigit() else None]
        client, run_id = self.logger.experiment, self.logger.run_id
        for first in range(0, len(items), MAX_PARAMS_TAGS_PER_BATCH):
            batch = items[first : first + MAX_PARAMS_TAGS_PER_BATCH]
            client.log_batch(run_id, params=[Param(name, str(value)) for name, value in batch])
        if tags := os.environ.get("MLFLOW_TAGS"):
            client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in json.loads(tags).items()])

    def write(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        """Write the numbers, with the characters replaced that MLflow does not allow in names."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = self.numbers({name: to_number(value) for name, value in logs.items()})
        metrics = [Metric(_NOT_IN_NAMES.sub("_", name), v, now, state.global_step) for name, v in numbers.items()]
        self.logger.experiment.log_batch(self.logger.run_id, metrics=metrics)

    def saved(self, checkpoint: str, state: TrainerState) -> None:
        """Log the checkpoint as a model."""
        import mlflow

        mlflow.pyfunc.log_model(
            name=os.path.basename(checkpoint),
            artifacts={"model_path": checkpoint},
            python_model=mlflow.pyfunc.PythonModel(),
        )

    def end(self, model: Any, state: TrainerState, save_model: Callable[[str], None]) -> None:
        """End the run, unless the user started it; MLflow still accepts later values."""
        import mlflow

        if self._begun is not None and mlflow.active_run() is not None:
            mlflow.end_run()


def _flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of nested dicts, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flattened(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat
