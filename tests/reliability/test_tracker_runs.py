"""A run that is killed and resumed is one run in each tracker, with each step once."""

import csv
import itertools
import shutil
import signal

import pytest

import hftrainer
from hftrainer.errors import InvalidSetup
from tests.support import tracking
from tests.support.jobs import Job, final_log
from tests.support.tracking import make_tracked_trainer, scalars
from tests.support.wandb_server import WandbServer

wandb, mlflow = pytest.importorskip("wandb"), pytest.importorskip("mlflow")
#: A checkpoint at every fourth step: some kills come before the next one, or while steps are written again.
KILLS = [6, 11, 9, 15, 16]
STEPS = list(range(1, 19))


def read_table(folder):
    """The rows of the one table in a folder."""
    (table,) = folder.rglob("metrics.csv")
    return list(csv.DictReader(table.read_text().splitlines()))


def steps_of(table, name="train/loss"):
    return [int(row["step"]) for row in table if row.get(name)]


def test_run_killed_five_times_has_one_run_with_each_step_once(tmp_path, processes):
    """The numbers are those of the log, and of a run that was never killed."""
    folder, database, server = tmp_path / "run", tracking.mlflow_database(tmp_path / "mlflow.db"), WandbServer()
    settings = {"save_steps": 4, "logging_steps": 1, "num_train_epochs": 1}
    reported = {**settings, "report_to": ["tensorboard", "csv", "mlflow", "wandb"]}
    with server.serving() as address:
        variables = {**address, "WANDB_DIR": str(tmp_path), "MLFLOW_TRACKING_URI": database}
        for step in KILLS:
            job = Job(folder, variables, dies_at=step, **reported)
            job.process.join()
            assert job.process.exitcode == -signal.SIGKILL, job.output.read_text()
        Job(folder, variables, **reported).finish()
    Job(tmp_path / "whole", **settings).finish()
    lines = final_log(tmp_path / "whole")
    assert final_log(folder) == lines
    losses = [line["loss"] for line in lines]

    table = read_table(folder)
    assert steps_of(table) == STEPS
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

    assert server.steps("train/loss") == STEPS
    (history,) = server.lines.values()
    assert [line["train/loss"] for line in history if "train/loss" in line] == losses
    assert [line["_step"] for line in history] == list(range(len(history)))


def train(tracker, resume=False, folder=None, **settings):
    """Train up to step 8; a resumed run goes on from step 4, in a tracker that holds later steps."""
    defaults = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
    trainer = make_tracked_trainer(
        "hftrainer", folder or tracker.folder, "plain", **{**tracker.settings, **defaults, **settings}
    )
    trainer.train(resume_from_checkpoint=f"{tracker.folder}/checkpoint-4" if resume else None)
    tracker.close()
    return trainer


def count_runs(tracker):
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
    monkeypatch.setattr("hftrainer.trackers.base_callbacks.time.strftime", lambda layout: str(next(numbers)))
    return request.param(tmp_path / "run", monkeypatch)


def test_resume_continues_the_run_unless_asked(tracker):
    train(tracker)
    train(tracker, resume=True)
    assert count_runs(tracker) == 1
    assert tracker.read().steps("train/loss") == [2, 4, 6, 8]
    train(tracker, resume=True, new_tracker_run=True)
    assert count_runs(tracker) == 2


def test_resume_in_another_folder_starts_a_new_run(tracker, tmp_path):
    """The run of the checkpoint keeps its later steps."""
    train(tracker)
    train(tracker, resume=True, folder=tmp_path / "branch")
    assert count_runs(tracker) == 2


def test_run_continues_only_in_the_same_logging_dir(tmp_path, monkeypatch):
    tracker = Table(tmp_path / "run", monkeypatch)
    for resume, logs, count in ((False, "one", 1), (True, "one", 1), (True, "two", 2)):
        train(tracker, resume, logging_dir=str(tracker.folder / logs))
        assert count_runs(tracker) == count
    assert [steps_of(read_table(tracker.folder / logs)) for logs in ("one", "two")] == [[2, 4, 6, 8], [6, 8]]


def test_finished_run_is_not_continued(tracker):
    train(tracker)
    for count in (2, 3):
        train(tracker, resume=True, max_steps=4)
        assert count_runs(tracker) == count


def test_rows_logged_before_a_save_are_kept_on_resume(tmp_path, monkeypatch):
    """Those logged after it are not in the checkpoint's log either."""

    class Logs(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log({"before": 1.0})

        def on_save(self, args, state, control, **kwargs):
            trainer.log({"after": 1.0})

    tracker = Table(tmp_path / "run", monkeypatch)
    for resume in (None, f"{tracker.folder}/checkpoint-4"):
        settings = {**tracker.settings, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "no"}
        trainer = make_tracked_trainer("hftrainer", tracker.folder, "plain", {"callbacks": [Logs]}, **settings)
        trainer.train(resume_from_checkpoint=resume)
    table = read_table(tracker.folder)
    for name, logged in {"before": list(range(1, 9)), "after": [8]}.items():
        assert steps_of(table, f"train/{name}") == logged
        assert [line["step"] for line in trainer.state.log_history if name in line] == logged


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ({}, "new runs: this release cannot read {'later': 1}"),
        ({"runs": []}, "new runs: this release cannot read {"),
        ({"runs": {"csv": {"folder": "a"}}}, "a new run starts: this release cannot read it"),
        ({"runs": {"csv": {"folder": "a", "version": "x", "rows": "1"}}}, "this release cannot read it"),
    ],
)
def test_run_ids_of_a_later_release_start_a_new_run(tmp_path, monkeypatch, caplog, saved, why):
    tracker = Table(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(
        "hftrainer.training.checkpoints.progress_collection.ids_of_open_runs",
        lambda callbacks, place: {**saved, "place": place.name} if saved else {"later": 1},
    )
    train(tracker)
    train(tracker, resume=True)
    assert why in caplog.text
    assert count_runs(tracker) == 2


def test_missing_run_is_replaced_by_a_new_one(tracker, caplog):
    train(tracker)
    if isinstance(tracker, tracking.MLflow):
        mlflow.delete_run(mlflow.search_runs(output_format="list")[0].info.run_id)
    else:
        shutil.rmtree(tracker.folder / "runs")
    train(tracker, resume=True)
    assert "the checkpoint's run, " in caplog.text and "cannot continue, so a new run starts" in caplog.text
    assert count_runs(tracker) == 1
    assert tracker.read().steps("train/loss") == [6, 8]


def test_mlflow_keeps_earlier_values_beside_new_ones(tmp_path, monkeypatch):
    """MLflow cannot delete values; another seed gives different ones."""
    tracker = tracking.MLflow(tmp_path / "run", monkeypatch)
    train(tracker)
    train(tracker, resume=True, seed=7)
    assert sorted(tracker.read().steps("train/loss")) == [2, 4, 6, 6, 8, 8]


class Online(tracking.WandB):
    """W&B with a server."""

    def variables(self):
        return {"WANDB_DIR": str(self.folder)}


@pytest.fixture
def empty_wandb(tmp_path, monkeypatch):
    """A server of W&B, and the tracker that writes to it."""
    server = WandbServer()
    with server.serving() as address:
        for name, value in address.items():
            monkeypatch.setenv(name, value)
        yield server, Online(tmp_path / "run", monkeypatch)


@pytest.fixture
def wandb_with_a_run(empty_wandb):
    """The server and its tracker, after a run of eight steps."""
    server, tracker = empty_wandb
    train(tracker)
    assert server.steps("train/loss") == [2, 4, 6, 8]
    return server, tracker


def test_wandb_run_is_rewound_to_the_checkpoint(wandb_with_a_run):
    server, tracker = wandb_with_a_run
    train(tracker, resume=True)
    assert server.steps("train/loss") == [2, 4, 6, 8]
    train(tracker, resume=True, new_tracker_run=True)
    assert len(server.lines) == 2


def test_wandb_run_that_cannot_be_rewound_has_steps_twice(wandb_with_a_run, caplog):
    server, tracker = wandb_with_a_run
    server.rewinds = False
    train(tracker, resume=True)
    assert server.steps("train/loss") == [2, 4, 6, 8, 6, 8]
    assert [each["resumed_from_step"] for each in server.configurations.values()] == [4]
    assert "to step 4, so it has later steps twice" in caplog.text


def test_wandb_run_without_a_line_at_the_checkpoint_begins_again(empty_wandb):
    """It keeps its name."""
    server, tracker = empty_wandb
    for resume in (False, True):
        train(tracker, resume, run_name="mine", logging_steps=5)
    (names,) = server.names.values()
    assert [name for name in names if name] == ["mine", "mine"]  # of both processes


def test_wandb_lines_lost_by_the_server_are_sent_again(wandb_with_a_run):
    """The client had not sent them when its process was killed."""
    server, tracker = wandb_with_a_run
    (lines,) = server.lines.values()
    del lines[1:]
    train(tracker, resume=True)
    assert server.steps("train/loss") == [2, 4, 6, 8]


@pytest.mark.parametrize("chosen", [False, True])
def test_missing_wandb_run_is_replaced_by_a_new_one(wandb_with_a_run, caplog, monkeypatch, chosen):
    server, tracker = wandb_with_a_run
    server.lines.clear()
    if chosen:
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
    train(tracker, resume=True)
    assert server.steps("train/loss") == [6, 8]
    assert ("cannot continue, so a new run starts" in caplog.text) == (not chosen)
    assert ("mine" in server.lines) == chosen


@pytest.mark.parametrize("adds", [False, True])
def test_wandb_run_with_lines_of_the_script_is_left_as_it_is(tmp_path, monkeypatch, caplog, adds):
    """Offline, W&B reads no earlier file: a run with lines that the Trainer does not know is left as it is."""

    class Adds(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            wandb.log({"mine": state.global_step})
            state.log_history.extend([{"mine": 1}] * adds)  # without a step; then there are as many as in W&B

    tracker = tracking.WandB(tmp_path / "run", monkeypatch)
    train(tracker, trainer={"callbacks": [Adds]})
    train(tracker, resume=True)
    assert "it has 0 of 6 lines" in caplog.text
    names = {path.stem for path in tracker.folder.rglob("*.wandb")}
    assert len(names) == 2


def test_comet_without_a_key_is_one_error(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml")
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    tracker = tracking.Comet(tmp_path / "run", monkeypatch)
    monkeypatch.delenv("COMET_START_ONLINE")
    with pytest.raises(InvalidSetup, match=r"^report_to='comet_ml': .*COMET_API_KEY, or COMET_MODE=offline\."):
        train(tracker)


@pytest.mark.parametrize("is_there", [True, False])
def test_comet_experiment_is_continued_by_its_key(tmp_path, monkeypatch, caplog, is_there):
    """Offline experiments count as online ones here, since there is no server."""
    comet = pytest.importorskip("comet_ml")
    start, asked = comet.start, []

    def start_here(mode=None, experiment_key=None, **kwargs):
        asked.append((mode, experiment_key))
        if mode == "get" and not is_there:
            raise comet.exceptions.ExperimentNotFound("no such experiment")
        return start(**kwargs)

    tracker = tracking.Comet(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(comet, "start", start_here)
    train(tracker)  # offline
    train(tracker, resume=True)
    assert {mode for mode, _ in asked} == {None}
    monkeypatch.setattr(comet, "OfflineExperiment", type("Other", (), {}))
    key = train(tracker).loggers[0].version
    train(tracker, resume=True)
    assert [each for each in asked if each[0]] == [("get", key)]
    assert ("cannot continue, so a new run starts: no such experiment" in caplog.text) == (not is_there)
