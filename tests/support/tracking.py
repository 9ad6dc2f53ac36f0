"""Runs with trackers, by either library, and what the trackers hold afterwards. None of them reaches a server."""

import csv
import functools
import importlib
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger, Logger

from tests.support.known_differences import MEASURED
from tests.support.small_models import MODELS


def make_tracked_trainer(library: str, folder: Path, model: str = "bert", trainer: Any = None, **settings: Any) -> Any:
    """A Trainer of `library` with a small run: log lines at every second step, evaluations at every third of eight."""
    package = importlib.import_module(library)
    make_model, make_data = MODELS[model]
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 2, "eval_strategy": "steps"}
    defaults |= {"eval_steps": 3, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = package.TrainingArguments(str(folder), **{**defaults, **settings})
    data = make_data()
    return package.Trainer(make_model(), args, train_dataset=data, eval_dataset=data[:9], **(trainer or {}))


def evaluate_with_trackers(folder: Path) -> int:
    """Evaluate in one of several ranks; the number of its loggers."""
    from lightning.pytorch.callbacks import LearningRateMonitor

    trainer_kwargs = {"callbacks": [LearningRateMonitor()]}
    trainer = make_tracked_trainer("hftrainer", folder, "plain", trainer_kwargs, report_to=["tensorboard", "csv"])
    trainer.evaluate()
    return len(trainer.loggers)


def without_times(name: str, value: Any) -> Any:
    """The value, unless it is a measured time, of which only the name counts."""
    return "measured" if name.replace("/", "_").endswith(MEASURED) else value


@dataclass
class TrackedRuns:
    """What a tracker holds of all runs.

    Attributes:
        curves: name → step and value of each entry; the names are those of TensorBoard.
        hyperparameters: a mapping for each time that they were written.
        details: what else both libraries must leave, by the tracker's own words.
    """

    curves: dict[str, list[tuple]] = field(default_factory=dict)
    hyperparameters: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, step: Any, value: Any) -> None:
        self.curves.setdefault(name, []).append((step, without_times(name, value)))

    def steps(self, name: str) -> list[Any]:
        return [step for step, _ in self.curves[name]]


class CSV:
    """The base of all: what a Trainer is given so that it writes, and what was written."""

    package = ""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.variables().items():
            monkeypatch.setenv(name, value)

    def variables(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """End the run that either library leaves open."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"report_to": "csv", "logging_dir": str(self.folder / "logs")}

    def read(self) -> TrackedRuns:
        found = TrackedRuns()
        (file,) = self.folder.rglob("metrics.csv")
        for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
            for name in filter(row.get, row):
                found.add(name, int(row["step"]), float(row[name]))
        found.hyperparameters = [yaml.safe_load(file.with_name("hparams.yaml").read_text())]
        return found


class CustomCSVLogger(CSV):
    @property
    def settings(self):
        return {"trainer": {"loggers": [CSVLogger(self.folder / "logs", name="mine", version=0)]}}


class Recorder(Logger):
    """A user's own logger: it writes down what it is given."""

    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.written, self.status = TrackedRuns(), []

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.written.add(name, step, value)

    def log_hyperparams(self, params, *args, **kwargs):
        self.written.hyperparameters.append(params)

    def finalize(self, status):
        self.status.append(status)


class CustomLogger(CSV):
    @property
    def settings(self):
        self.recorder = Recorder()
        return {"trainer": {"loggers": [self.recorder]}}

    def read(self):
        return self.recorder.written


class TensorBoard(CSV):
    package = "tensorboard"
    settings = {"report_to": "tensorboard"}

    def variables(self):
        return {"TENSORBOARD_LOGGING_DIR": str(self.folder / "logs")}

    def read(self):
        """Folders of event files one after another, of which `details` has the tags."""
        found = TrackedRuns(details={"scalars": [], "texts": []})
        for folder in sorted({path.parent for path in self.folder.rglob("events*")}):
            curves, written = scalars(folder), texts(folder)
            for name, entries in curves.items():
                found.curves.setdefault(name, []).extend(entries)
            found.hyperparameters += [json.loads(text) for _, text in written.pop("args/text_summary", [])]
            found.details["scalars"].append(sorted(curves))
            found.details["texts"].append(written)
        return found


class WandB(CSV):
    package = "wandb"
    settings = {"report_to": "wandb", "run_name": "a-run"}

    def variables(self):
        return {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(self.folder)}

    def read(self):
        """The one run, which this closes. The numbers of a whole run are in the summary, at the last step."""
        self.close()
        found, parts = TrackedRuns(), {}
        for record in wandb_records(self.folder):
            kind = record.WhichOneof("record_type")
            parts.setdefault(kind, []).append(getattr(record, kind))
        lines = [wandb_items(part.item) for part in parts.get("history", [])]
        for line in lines:
            for name, value in line.items():
                found.add(name, line.get("train/global_step"), value)
        configurations = [wandb_items(part.update) for part in parts.get("config", [])]
        found.hyperparameters = [each for each in configurations if "learning_rate" in each]
        summaries = [wandb_items(part.update) for part in parts.get("summary", [])]
        for summary in summaries:
            for name, value in summary.items():
                if name.startswith("train_"):
                    found.add(f"train/{name}", lines[-1]["train/global_step"], value)
        found.details = {
            "lines": lines,
            "configuration": {name: value for each in configurations for name, value in each.items()},
            "summary": {name: value for each in summaries for name, value in each.items()},
            "run": [(run.project, run.display_name) for run in parts.get("run", [])[:1]],
            "axes": {(metric.name or metric.glob_name, metric.step_metric) for metric in parts.get("metric", [])},
            "artifacts": parts.get("artifact", []),
        }
        return found

    def close(self):
        """Forget the environment too, which W&B reads once."""
        wandb = importlib.import_module("wandb")
        wandb.finish()
        wandb.teardown()


class MLflow(CSV):
    package = "mlflow"
    settings = {"report_to": "mlflow", "run_name": "a-run"}

    def variables(self):
        if "mlflow" in sys.modules:
            forget_mlflow()
        return {"MLFLOW_TRACKING_URI": mlflow_database(self.folder / "mlflow.db")}

    def read(self):
        """All runs, the oldest first."""
        mlflow = importlib.import_module("mlflow")
        mlflow.flush_async_logging()
        client = mlflow.MlflowClient()
        found = TrackedRuns(details={"runs": [], "tags": []})
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(experiments, order_by=["attributes.start_time ASC"]):
            for name in run.data.metrics:
                stage, _, rest = name.partition("_")
                history = client.get_metric_history(run.info.run_id, name)
                if name == "epoch":  # lines of one step share it: MLflow keeps one of those of a millisecond
                    history = {entry.step: entry for entry in history}.values()
                for entry in history:
                    found.add(f"eval/{rest}" if stage == "eval" else f"train/{name}", entry.step, entry.value)
            found.hyperparameters.append(run.data.params)
            found.details["runs"].append((run.info.run_name, run.info.status))
            tags = {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.source")}
            found.details["tags"].append(tags)
        return found

    def close(self):
        importlib.import_module("mlflow").end_run()


class Comet(CSV):
    package = "comet_ml"
    settings = {"report_to": "comet_ml", "run_name": "a-run"}

    def variables(self):
        return {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": str(self.folder / "comet")}

    def read(self):
        """The messages of the one experiment, which this ends."""
        self.close()
        found, parameters = TrackedRuns(details={"epochs": {}}), {}
        (file,) = self.folder.glob("comet/*.zip")
        with zipfile.ZipFile(file) as archive:
            messages = [json.loads(line)["payload"] for line in archive.read("messages.json").decode().splitlines()]
        for message in messages:
            if metric := message.get("metric"):
                name = metric["metricName"]
                if not name.startswith("sys."):  # of the machine
                    found.add(name, metric["step"], metric["metricValue"])
                    found.details["epochs"].setdefault(name, []).append(metric["epoch"])
            elif param := message.get("param"):
                parameters[param["paramName"].removeprefix("args|")] = param["paramValue"]
        found.hyperparameters = [parameters]
        return found

    def close(self):
        if experiment := importlib.import_module("comet_ml").get_running_experiment():
            experiment.end()


def scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    return _entries(folder, "scalars", lambda tag, event: without_times(tag, event.value))


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    return _entries(folder, "tensors", lambda tag, event: event.tensor_proto.string_val[0].decode())


def _entries(folder: Path, kind: str, to_value: Callable[[str, Any], Any]) -> dict[str, list[tuple[int, Any]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    read = getattr(accumulator, kind.capitalize())
    return {
        # TensorBoard reads files that were begun in the same second in the order of their names.
        tag: [(event.step, to_value(tag, event)) for event in sorted(read(tag), key=lambda event: event.wall_time)]
        for tag in accumulator.Tags()[kind]
    }


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one offline run of W&B in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = []
    for data in _chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def _chunks(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The chunks of W&B's file, which is written as LevelDB writes its log, behind a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # too little room for a header: the block is padded
            position += block - position % block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_items(items: Any) -> dict[str, Any]:
    """Names and values of a record of W&B, without those that it adds itself."""
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {name: without_times(name, value) for name, value in values.items() if not name.startswith("_")}


@functools.cache
def _mlflow_tables() -> bytes:
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "empty.db")
        engine = create_sqlalchemy_engine(f"sqlite:///{file}")
        _initialize_tables(engine)
        engine.dispose()
        return file.read_bytes()


def mlflow_database(file: Path) -> str:
    """Write a database without runs: MLflow takes a second to make its tables. Returns its address."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_mlflow_tables())
    return f"sqlite:///{file}"


def forget_mlflow() -> None:
    mlflow = sys.modules["mlflow"]
    mlflow.set_tracking_uri(None)
    mlflow.tracking.fluent._active_experiment_id = None
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # set by set_experiment
