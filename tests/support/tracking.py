"""Runs with trackers, by either library, and what their files hold afterwards."""

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.differences import MEASURED
from tests.support.tiny import MODELS


def make_trainer(library: str, folder: Path, model: str = "bert", trainer: Any = None, **settings: Any) -> Any:
    """A Trainer of `library` with a small run: log lines at every second step, evaluations at every third of eight."""
    package = importlib.import_module(library)
    make_model, make_data = MODELS[model]
    defaults = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = package.TrainingArguments(str(folder), **{**defaults, **settings})
    data = make_data()
    return package.Trainer(make_model(), args, train_dataset=data, eval_dataset=data[:9], **(trainer or {}))


def without_times(name: str, value: Any) -> Any:
    """The value, unless it is a measured time, of which only the name counts."""
    return "measured" if name.replace("/", "_").endswith(MEASURED) else value


def scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Steps and values by tag in the event files of a folder."""
    events = _events(folder)
    return {
        tag: [(event.step, without_times(tag, event.value)) for event in sorted(events.Scalars(tag), key=_when)]
        for tag in events.Tags()["scalars"]
    }


def _when(event: Any) -> float:
    """TensorBoard reads files that were begun in the same second in the order of their names."""
    return event.wall_time


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Steps and texts by tag."""
    events = _events(folder)
    return {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


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


# ---- MLflow -------------------------------------------------------------------------------------------------------


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
    """Leave no database or experiment for the next test."""
    mlflow = sys.modules["mlflow"]
    mlflow.set_tracking_uri(None)
    mlflow.tracking.fluent._active_experiment_id = None
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # set by set_experiment
