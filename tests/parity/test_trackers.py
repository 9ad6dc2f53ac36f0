"""What both libraries leave with W&B, MLflow and Comet, all of them offline."""

import json
import zipfile

import pytest

from tests.support.parity import LIBRARIES
from tests.support.tracking import make_trainer, mlflow_database, wandb_items, wandb_records, without_times

#: Arguments that transformers fills in by the machine, and the folder of each run.
DIFFERENT = {"accelerator_config", "dataloader_pin_memory", "output_dir"}


def run(library, folder, report_to, **settings):
    trainer = make_trainer(library, folder, report_to=report_to, run_name="a-run", **settings)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    return trainer


# ---- W&B ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(monkeypatch):
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield module
    close(module)


def close(wandb):
    """Close the run, and forget the environment, which W&B reads once."""
    wandb.finish()
    wandb.teardown()


def wandb_of(library, folder, wandb, monkeypatch, **settings):
    """The records of one run, by kind."""
    folder.mkdir()
    monkeypatch.setenv("WANDB_DIR", str(folder))
    run(library, folder, "wandb", **settings)
    close(wandb)
    found = {}
    for record in wandb_records(folder):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def test_wandb(tmp_path, wandb, monkeypatch):
    found = {library: wandb_of(library, tmp_path / library, wandb, monkeypatch) for library in LIBRARIES}
    ours, theirs = ([wandb_items(line.item) for line in found[library]["history"]] for library in reversed(LIBRARIES))
    assert ours == theirs
    assert [line["train/global_step"] for line in ours] == [2, 3, 4, 6, 6, 8, 8, 8, 8, 8]
    ours, theirs = (
        {name: value for each in found[library]["summary"] for name, value in wandb_items(each.update).items()}
        for library in reversed(LIBRARIES)
    )
    assert ours == theirs
    assert "train_runtime" in ours
    assert "train/train_runtime" not in ours
    ours, theirs = (
        {name: value for each in found[library]["config"] for name, value in wandb_items(each.update).items()}
        for library in reversed(LIBRARIES)
    )
    known = theirs.keys() & ours.keys()
    assert len(known) > 130
    assert {name: ours[name] for name in known - DIFFERENT} == {name: theirs[name] for name in known - DIFFERENT}
    assert ours["model/num_parameters"] == theirs["model/num_parameters"]
    for library in LIBRARIES:
        begun = found[library]["run"][0]
        assert (begun.display_name, begun.project) == ("a-run", "huggingface")
        axes = {(metric.name or metric.glob_name, metric.step_metric) for metric in found[library]["metric"]}
        assert ("*", "train/global_step") in axes


@pytest.mark.parametrize("uploads", ["end", "checkpoint"])
def test_wandb_uploads(tmp_path, wandb, monkeypatch, uploads):
    """Artifacts have transformers' names, aliases and metadata, and hold the files of the model."""
    monkeypatch.setenv("WANDB_LOG_MODEL", uploads)
    artifacts = {}
    for library in LIBRARIES:
        settings = {"save_strategy": "steps", "save_steps": 4}
        records = wandb_of(library, tmp_path / library, wandb, monkeypatch, **settings)
        artifacts[library] = [
            (each.name, each.type, sorted(each.aliases), sorted(json.loads(each.metadata)), _files(each))
            for each in records["artifact"]
        ]
    ours, theirs = artifacts["hftrainer"], artifacts["transformers"]
    assert [each[:4] for each in ours] == [each[:4] for each in theirs]
    assert ours[-1][2] == ["final_model", "latest"]
    assert {"model.safetensors", "config.json", "model_architecture.txt"} <= ours[-1][4] <= theirs[-1][4] | ours[-1][4]
    assert len(ours) == {"end": 2, "checkpoint": 4}[uploads]


def _files(artifact):
    return {entry.path for entry in artifact.manifest.contents}


def test_wandb_run_of_the_user(tmp_path, wandb, monkeypatch):
    """It is used, and stays open."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    mine = wandb.init(project="mine", name="opened before")
    trainer = run("hftrainer", tmp_path, "wandb", model="plain")
    assert wandb.run is mine
    assert trainer.loggers[0].experiment is mine
    assert mine.summary["train/global_step"] == 8
    assert mine.config["per_device_train_batch_size"] == 4


def test_wandb_watches(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    trainer = make_trainer("hftrainer", tmp_path, "plain", report_to="wandb", max_steps=101, eval_strategy="no")
    trainer.train()
    assert any(name.startswith("gradients/") for name in dict(wandb.run.summary))


# ---- MLflow -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    module = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    return module


def history(entries):
    """Step and value of each entry."""
    return [(entry.step, without_times(entry.key, entry.value)) for entry in entries]


def without_repetitions(metrics):
    """MLflow keeps one of several equal entries of the same millisecond."""
    return {name: list(dict.fromkeys(entries)) for name, entries in metrics.items()}


def mlflow_run(mlflow, number=0):
    """Parameters, tags, metrics with their steps, and status of a run; the oldest is number 0."""
    client = mlflow.MlflowClient()
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(ids, order_by=["attributes.start_time ASC"])[number]
    metrics = {name: history(client.get_metric_history(found.info.run_id, name)) for name in found.data.metrics}
    tags = {name: value for name, value in found.data.tags.items() if not name.startswith("mlflow.source")}
    return found.data.params, tags, metrics, found.info


def test_mlflow(tmp_path, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TAGS", '{"release": "1"}')
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tiny")
    found = {}
    for library in LIBRARIES:
        mlflow.set_tracking_uri(mlflow_database(tmp_path / f"{library}.db"))
        trainer = make_trainer(library, tmp_path / library, report_to="mlflow", run_name="a-run")
        trainer.train()
        found[library] = mlflow_run(mlflow)
    (ours, our_tags, our_metrics, info), (theirs, their_tags, their_metrics, _) = (
        found[library] for library in reversed(LIBRARIES)
    )
    assert without_repetitions(our_metrics) == without_repetitions(their_metrics)
    assert [step for step, _ in our_metrics["eval_loss"]] == [3, 6, 8]
    assert "train_runtime" in our_metrics
    assert our_tags == their_tags
    assert our_tags["release"] == "1"
    known = ours.keys() & theirs.keys() - DIFFERENT
    assert len(known) > 100
    assert {name: ours[name] for name in known} == {name: theirs[name] for name in known}
    assert (info.run_name, info.status) == ("a-run", "FINISHED")


def test_mlflow_after_training(tmp_path, mlflow):
    """Later evaluations and trainings go to the same run, where transformers would begin runs without a name."""
    mlflow_database(tmp_path / "mlflow.db")  # where MLflow writes unless it is told otherwise
    trainer = run("hftrainer", tmp_path / "run", "mlflow", model="plain")
    trainer.train()
    _, _, metrics, info = mlflow_run(mlflow)
    assert [step for step, _ in metrics["eval_loss"]] == [3, 6, 8, 8, 3, 6, 8]
    assert info.status == "FINISHED"
    assert len(mlflow.search_runs()) == 1


def test_mlflow_run_of_the_user(tmp_path, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "1")
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "7")
    mlflow.set_tracking_uri(mlflow_database(tmp_path / "runs.db"))
    with mlflow.start_run(run_name="mine") as mine:
        trainer = make_trainer("hftrainer", tmp_path / "run", "plain", report_to="mlflow")
        trainer.train()
        trainer.log({"odd(name)": 1.0})
        assert mlflow.active_run().info.run_id == mine.info.run_id
        params, _, metrics, info = mlflow_run(mlflow)
    assert len(params) == 7
    assert metrics["odd_name_"] == [(8, 1.0)]
    assert (info.run_name, info.status) == ("mine", "RUNNING")


def test_mlflow_run_by_its_id_and_nested(tmp_path, mlflow, monkeypatch):
    mlflow.set_tracking_uri(mlflow_database(tmp_path / "runs.db"))
    with mlflow.start_run() as before:
        pass
    monkeypatch.setenv("MLFLOW_RUN_ID", before.info.run_id)
    make_trainer("hftrainer", tmp_path / "a", "plain", report_to="mlflow").train()
    assert len(mlflow.search_runs()) == 1
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
    with mlflow.start_run(run_name="parent") as parent:
        make_trainer("hftrainer", tmp_path / "b", "plain", report_to="mlflow", run_name="child").train()
        assert mlflow.active_run().info.run_id == parent.info.run_id
    _, tags, _, info = mlflow_run(mlflow, number=2)
    assert info.run_name == "child"
    assert tags["mlflow.parentRunId"] == parent.info.run_id


# ---- Comet --------------------------------------------------------------------------------------------------------


def test_comet(tmp_path, monkeypatch):
    """The messages of an offline experiment."""
    comet = pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    found = {}
    for library in LIBRARIES:
        monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / library / "comet"))
        run(library, tmp_path / library, "comet_ml")
        comet.get_running_experiment().end()
        found[library] = comet_messages(tmp_path / library / "comet")
    (ours, our_parameters), (theirs, their_parameters) = found["hftrainer"], found["transformers"]
    assert ours == theirs
    assert ours["train/loss"][0][:2] == (2, 0.2)
    assert "test/loss" in ours
    assert our_parameters["args|learning_rate"] == their_parameters["args|learning_rate"]
    assert our_parameters["config|hidden_size"] == their_parameters["config|hidden_size"]


def comet_messages(folder):
    (file,) = folder.glob("*.zip")
    metrics, parameters = {}, {}
    with zipfile.ZipFile(file) as archive:
        lines = archive.read("messages.json").decode().splitlines()
    for message in map(json.loads, lines):
        payload = message["payload"]
        if metric := payload.get("metric"):
            name = metric["metricName"]
            if name.startswith("sys."):  # of the machine
                continue
            value = without_times(name, metric["metricValue"])
            metrics.setdefault(name, []).append((metric["step"], metric["epoch"], value))
        elif param := payload.get("param"):
            parameters[param["paramName"]] = param["paramValue"]
    return metrics, parameters
