"""A run that is killed and resumed is one run in each tracker, with each step once."""

import csv
import itertools
import os
import signal

import pytest

from tests.support import tracking
from tests.support.jobs import Forked, log
from tests.support.tracking import make_trainer, scalars
from tests.support.wandb_server import Runs

wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
#: A checkpoint at every fourth step: some kills come before the next one, or while steps are written again.
KILLS = [6, 11, 9, 15, 16]
STEPS = list(range(1, 19))


def rows(folder):
    """The rows of the one table in a folder."""
    (table,) = folder.rglob("metrics.csv")
    return list(csv.DictReader(table.read_text().splitlines()))


def steps(table, name="train/loss"):
    return [int(row["step"]) for row in table if row.get(name)]


def test_five_kills(tmp_path, monkeypatch, processes):
    """Each tracker has one run with the numbers of the log, which a run that was never killed has too."""
    folder, database = tmp_path / "run", tracking.mlflow_database(tmp_path / "mlflow.db")
    variables = {"MLFLOW_TRACKING_URI": database, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    settings = {"save_steps": 4, "logging_steps": 1, "num_train_epochs": 1}
    reported = {**settings, "report_to": ["tensorboard", "csv", "mlflow", "wandb"]}
    for step in KILLS:
        job = Forked(folder, variables, dies_at=step, **reported)
        job.process.join()
        assert job.process.exitcode == -signal.SIGKILL, job.output.read_text()
    Forked(folder, variables, **reported).finish()
    Forked(tmp_path / "whole", **settings).finish()
    lines = log(tmp_path / "whole")
    assert log(folder) == lines
    losses = [line["loss"] for line in lines]

    table = rows(folder)
    assert steps(table) == STEPS
    assert [float(row["train/loss"]) for row in table[:-1]] == losses
    (events,) = {path.parent for path in folder.rglob("events*")}
    curves = scalars(events)
    assert curves["train/loss"] == [(step, pytest.approx(loss)) for step, loss in zip(STEPS, losses, strict=True)]
    assert [step for step, _ in curves["train/train_loss"]] == STEPS[-1:]

    client = mlflow.MlflowClient(database)
    (run,) = client.search_runs(["0"])
    history = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda each: each.step)
    assert [(each.step, each.value) for each in history] == list(zip(STEPS, losses, strict=True))
    assert run.info.status == "FINISHED"
    assert run.data.tags["hftrainer.resumed_from_step"] == "4, 8, 8, 12, 12"

    server = Runs()
    with server.serving() as address:
        for segment in sorted(tmp_path.glob("wandb/offline-run-*")):
            done = processes.run("-m", "wandb", "sync", segment, env={**os.environ, **address}, merge=True)
            assert done.returncode == 0, done.stderr
    assert server.steps("train/loss") == STEPS
    (history,) = server.lines.values()
    assert [line["train/loss"] for line in history if "train/loss" in line] == losses
    assert [line["_step"] for line in history] == list(range(len(history)))


def train(tracker, resume=False, folder=None, **settings):
    """Train up to step 8; a resumed run goes on from step 4 with what a new process would have."""
    defaults = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    trainer = make_trainer("hftrainer", folder or tracker.folder, "plain", **{**tracker.settings, **defaults, **settings})
    trainer.train(resume_from_checkpoint=f"{tracker.folder}/checkpoint-4" if resume else None)
    tracker.close()
    return trainer


def runs(tracker):
    """How many runs a tracker has."""
    if isinstance(tracker, tracking.MLflow):
        return len(mlflow.search_runs())
    name = "metrics.csv" if type(tracker) is Table else "events*"
    return len({path.parent for path in tracker.folder.parent.rglob(name)})


class Table(tracking.CSV):
    settings = {"report_to": "csv"}


class Events(tracking.TensorBoard):
    def variables(self):
        return {}


KINDS = [Table, Events, tracking.MLflow]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def tracker(request, tmp_path, monkeypatch):
    numbers = itertools.count()  # names of folders otherwise change every second
    monkeypatch.setattr("hftrainer.reporting.tracking.time.strftime", lambda layout: str(next(numbers)))
    return request.param(tmp_path / "run", monkeypatch)


def test_one_run_and_new_runs_by_the_argument(tracker):
    train(tracker)
    train(tracker, resume=True)
    assert runs(tracker) == 1
    assert tracker.read().steps("train/loss") == [2, 4, 6, 8]
    train(tracker, resume=True, new_tracker_run=True)
    assert runs(tracker) == 2


def test_a_checkpoint_of_another_folder(tracker, tmp_path):
    """The run that it belongs to keeps its later steps."""
    train(tracker)
    train(tracker, resume=True, folder=tmp_path / "branch")
    assert runs(tracker) == 2
