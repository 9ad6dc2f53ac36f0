"""What every logger does, those of `report_to` and those that users pass; and what is refused."""

import csv
import dataclasses
import importlib.machinery
import json
import subprocess
import sys
import types

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hftrainer import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments, install, uninstall
from hftrainer.errors import InvalidArgument, MissingPackage, UnsupportedArgument
from hftrainer.integrations import INTEGRATIONS, chosen
from hftrainer.reporting.tracker_callbacks import ReportingCallback
from tests.support import warm
from tests.support.launching import torchrun
from tests.support.releases import release_of
from tests.support.tiny import make_plain, plain_data
from tests.support.tracking import make_trainer, mlflow_database, scalars, texts, wandb_items, wandb_records


class Recorder(Logger):
    """A user's own logger: it writes down what it is told."""

    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.lines, self.hyperparameters, self.status = [], [], []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparameters.append(params)

    def finalize(self, status):
        self.status.append(status)

    def curves(self):
        found = {}
        for step, metrics in self.lines:
            for name, value in metrics.items():
                found.setdefault(name, []).append((step, value))
        return found


# ---- One suite for all --------------------------------------------------------------------------------------------
# A function for each: given a folder, the Trainer's settings, and what reads curves and hyperparameters afterwards.


def with_csv(folder, monkeypatch):
    def read():
        with open(folder / "logs" / "csv" / "version_0" / "metrics.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        curves = {name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in rows[0]}
        return curves, [yaml.safe_load((folder / "logs" / "csv" / "version_0" / "hparams.yaml").read_text())]

    return {"report_to": "csv", "logging_dir": str(folder / "logs")}, read


def with_tensorboard(folder, monkeypatch):
    def read():
        written = texts(folder / "logs")["args/text_summary"]
        return scalars(folder / "logs"), [json.loads(text) for _, text in written]

    return {"report_to": "tensorboard", "logging_dir": str(folder / "logs")}, read


def with_wandb(folder, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    folder.mkdir(exist_ok=True)

    def read():
        wandb.finish()
        wandb.teardown()
        curves, configs = {}, []
        for record in wandb_records(folder):
            if record.HasField("history"):
                line = wandb_items(record.history.item)
                for name, value in line.items():
                    curves.setdefault(name, []).append((line["train/global_step"], value))
            elif record.HasField("config") and "learning_rate" in (items := wandb_items(record.config.update)):
                configs.append(items)
            elif record.HasField("summary"):  # where the numbers of a whole run go
                for name, value in wandb_items(record.summary.update).items():
                    if name.startswith("train_"):
                        curves.setdefault(f"train/{name}", []).append((8, value))
        return curves, configs

    return {"report_to": "wandb"}, read


def with_mlflow(folder, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database(folder.with_suffix(".db")))

    def read():
        client = mlflow.MlflowClient()
        (run,) = client.search_runs(["0"])
        curves = {}
        for name in run.data.metrics:
            stage, _, rest = name.partition("_")
            known = f"eval/{rest}" if stage == "eval" else f"train/{name}"
            curves[known] = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        return curves, [run.data.params]

    return {"report_to": "mlflow"}, read


def with_a_users_own(folder, monkeypatch):
    recorder = Recorder()
    return {"trainer": {"loggers": [recorder]}}, lambda: (recorder.curves(), recorder.hyperparameters)


def with_a_users_csv(folder, monkeypatch):
    made = CSVLogger(folder / "logs", name="csv", version=0)
    return {"trainer": {"loggers": [made]}}, with_csv(folder, monkeypatch)[1]


KINDS = [with_csv, with_tensorboard, with_wandb, with_mlflow, with_a_users_own, with_a_users_csv]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_logger(tmp_path, monkeypatch, kind):
    """Lines at their steps, the last one too; evaluations after training; a second training; hyperparameters once."""
    pytest.importorskip(kind.__name__.removeprefix("with_")) if kind in (with_wandb, with_mlflow) else None
    folder = tmp_path / "run"
    settings, read = kind(folder, monkeypatch)
    trainer = make_trainer("hftrainer", folder, "plain", **settings)
    trainer.train()
    trainer.evaluate()
    once = kind is not with_tensorboard  # transformers writes these texts at each beginning
    trainer.train()
    curves, hyperparameters = read()
    assert [step for step, _ in curves["train/loss"]] == [2, 4, 6, 8, 2, 4, 6, 8]
    assert [step for step, _ in curves["eval/loss"]] == [3, 6, 8, 8, 3, 6, 8]
    in_summary = kind is with_wandb and release_of("wandb") < (0, 18)  # which keeps the last of the file's summaries
    assert [step for step, _ in curves["train/train_loss"]] == ([8] if in_summary else [8, 8])
    assert curves["train/train_loss"][-1][1] == pytest.approx(trainer.state.log_history[-1]["train_loss"])
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [value for _, value in curves["train/loss"][4:]] == pytest.approx(logged)
    assert len(hyperparameters) == 1 if once else {json.dumps(each) for each in hyperparameters}
    assert float(hyperparameters[0]["learning_rate"]) == 5e-5


# ---- With Lightning's callbacks -----------------------------------------------------------------------------------


class Logs(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("mine", float(trainer.global_step))

    def on_validation_epoch_end(self, trainer, pl_module):
        for each in trainer.loggers:
            each.log_metrics({"at evaluation": 1.0})


def test_values_of_callbacks_without_a_logger(tmp_path):
    """They are in the log lines, at the same steps; those of evaluations are not."""
    trainer = make_trainer("hftrainer", tmp_path, "plain", trainer={"callbacks": [LearningRateMonitor(), Logs()]})
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["lr-AdamW/pg1"] for line in lines] == [line["learning_rate"] for line in lines]
    assert [line.get("mine") for line in lines] == [None, 2.0, 4.0, 6.0]  # logged after the line of their step
    assert not [line for line in trainer.state.log_history if "at evaluation" in line]
    assert trainer.loggers == []
    assert trainer.lightning_trainer.loggers[0].save_dir == str(tmp_path)
    plain = make_trainer("hftrainer", tmp_path, "plain")
    plain.train()
    assert plain.lightning_trainer.loggers == []


def test_values_of_callbacks_with_loggers(tmp_path):
    recorder = Recorder()
    settings = {"report_to": "tensorboard", "logging_dir": str(tmp_path / "logs")}
    callbacks = [LearningRateMonitor(), Logs()]
    trainer = make_trainer(
        "hftrainer", tmp_path, "plain", trainer={"loggers": [recorder], "callbacks": callbacks}, **settings
    )
    trainer.train()
    curves = scalars(tmp_path / "logs")
    assert [step for step, _ in curves["lr-AdamW/pg1"]] == [1, 3, 5, 7]  # Lightning counts the steps that are done
    assert [value for _, value in curves["mine"]] == [2.0, 4.0, 6.0, 8.0]
    assert [value for _, value in recorder.curves()["mine"]] == [2.0, 4.0, 6.0, 8.0]
    assert not [line for line in trainer.state.log_history if "mine" in line]
    assert trainer.lightning_trainer.loggers == trainer.loggers == [trainer.loggers[0], recorder]


@pytest.mark.parametrize(("strategy", "steps"), [("no", []), ("epoch", [9, 19])])
def test_callbacks_log_as_often_as_the_trainer(tmp_path, strategy, steps):
    recorder = Recorder()
    given = {"loggers": [recorder], "callbacks": [LearningRateMonitor(logging_interval="step")]}
    settings = {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": strategy}
    make_trainer("hftrainer", tmp_path, "plain", trainer=given, **settings).train()
    assert [step for step, line in recorder.lines if "lr-AdamW/pg1" in line] == steps


def test_checkpoints_of_lightning_without_a_logger(tmp_path):
    """They are where they were: the stand-in for a logger makes no folders."""
    trainer = make_trainer("hftrainer", tmp_path, "plain", trainer={"callbacks": [ModelCheckpoint()]})
    trainer.train()
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))


# ---- Runs ---------------------------------------------------------------------------------------------------------


def test_finalized_once_and_after_the_last_line(tmp_path):
    recorder = Recorder()
    trainer = make_trainer("hftrainer", tmp_path, "plain", trainer={"loggers": [recorder]})
    trainer.evaluate()
    assert recorder.status == []
    trainer.add_callback(
        type("Notes", (Callback,), {"teardown": lambda *args, **kwargs: recorder.status.append("teardown")})
    )
    trainer.train()
    assert recorder.status == ["teardown", "success"]


def test_failed_training(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("mine")

    recorder = Recorder()
    given = {"loggers": [recorder], "callbacks": [Fails()]}
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer("hftrainer", tmp_path, "plain", trainer=given).train()
    assert recorder.status == ["failed"]


def test_nothing_is_begun_before_something_is_written(tmp_path):
    settings = {"report_to": ["tensorboard", "csv"], "logging_dir": str(tmp_path / "logs")}
    trainer = make_trainer("hftrainer", tmp_path, "plain", **settings)
    trainer.predict(trainer.eval_dataset)
    assert not (tmp_path / "logs").exists()
    trainer.evaluate()
    assert (tmp_path / "logs").exists()


def test_csv_keeps_earlier_runs(tmp_path):
    for _ in range(2):
        make_trainer("hftrainer", tmp_path, "plain", report_to="csv", logging_dir=str(tmp_path)).train()
    assert len(list(tmp_path.glob("csv/version_*/metrics.csv"))) == 2


def test_folders(tmp_path, monkeypatch):
    trainer = make_trainer("hftrainer", tmp_path, "plain", report_to=["tensorboard", "csv"])
    tensorboard, table = trainer.loggers
    assert isinstance(tensorboard, TensorBoardLogger)
    assert tensorboard.log_dir.startswith(str(tmp_path / "runs"))
    assert table.log_dir.startswith(tensorboard.log_dir)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "there"))
    (tensorboard,) = make_trainer("hftrainer", tmp_path, "plain", report_to="tensorboard").loggers
    assert tensorboard.log_dir.rstrip("/") == str(tmp_path / "there")


def test_trials_have_runs_of_their_own(tmp_path):
    """As `model_init` with a trial; their names are those in the state."""
    recorder = Recorder()
    trainer = make_trainer(
        "hftrainer", tmp_path, "plain", report_to="tensorboard", trainer={"loggers": [recorder]}, max_steps=2
    )
    for name in ("first", "second"):
        begin = trainer._init_training_state

        def named(*args, begin=begin, name=name):
            found = begin(*args)
            trainer.state.trial_name = name
            return found

        trainer._init_training_state = named
        trainer.train(trial={"seed": 1})
    for name in ("first", "second"):
        (folder,) = tmp_path.glob(f"runs/*/{name}")
        assert [step for step, _ in scalars(folder)["train/loss"]] == [2]
    assert len(recorder.hyperparameters) == 2


def test_secrets_are_not_written(tmp_path):
    recorder = Recorder()
    trainer = make_trainer("hftrainer", tmp_path, "plain", trainer={"loggers": [recorder]}, max_steps=2)
    trainer.args.hub_token = "hf_secret"
    trainer.train()
    assert recorder.hyperparameters[0]["hub_token"] == "<HUB_TOKEN>"


def test_two_processes_write_one_file(tmp_path):
    """The main process writes; Lightning's callbacks, which want a logger, run in both."""
    run = torchrun(
        tmp_path,
        f"""
from lightning.pytorch.callbacks import LearningRateMonitor
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import make_plain, plain_data
args = TrainingArguments({str(tmp_path / "run")!r}, report_to=["tensorboard", "csv"], disable_tqdm=True, use_cpu=True)
trainer = Trainer(make_plain(), args, eval_dataset=plain_data(), callbacks=[LearningRateMonitor()])
trainer.evaluate()
assert len(trainer.loggers) == (2 if trainer.is_world_process_zero() else 0)
""",
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    assert len(list(folder.glob("events*"))) == 1
    assert [step for step, _ in scalars(folder)["eval/loss"]] == [0]
    assert len(list(folder.glob("csv/version_*"))) == 1


# ---- What is chosen, and what is refused --------------------------------------------------------------------------


@pytest.fixture
def only(monkeypatch):
    """Make a set of packages look installed, and no other tracker's."""

    def install(*packages):
        real = importlib.util.find_spec
        known = {module for kind in INTEGRATIONS.values() for each in kind.modules for module in each.split("|")}
        known |= {"azureml", "azureml.core", "transformers"}

        def find(name, *args):
            if name not in known:
                return real(name, *args)
            return importlib.machinery.ModuleSpec(name, None) if name in packages else None

        monkeypatch.setattr("hftrainer.integrations.importlib.util.find_spec", find)

    return install


def test_all(only, monkeypatch):
    monkeypatch.delenv("DISABLE_MLFLOW_INTEGRATION", raising=False)
    only("wandb", "tensorboardX", "mlflow", "transformers", "codecarbon", "flytekit", "trackio")
    trackio = ["trackio"] if "trackio" in INTEGRATION_TO_CALLBACK else []
    assert chosen("all") == ["mlflow", "tensorboard", "wandb", "codecarbon", *trackio]
    assert chosen(["all"]) == chosen("all")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    assert chosen("all") == ["tensorboard", "codecarbon", *trackio]
    assert chosen("wandb") == []
    only("tensorboard", "trackio")  # without transformers
    assert chosen("all") == ["tensorboard"]
    assert chosen("none") == chosen([]) == chosen(None) == []


def test_all_is_what_transformers_finds():
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    assert chosen("all") == [name for name in get_available_reporting_integrations() if name != "neptune"]


def test_names(monkeypatch):
    assert INTEGRATION_TO_CALLBACK.keys() - {"neptune"} <= INTEGRATIONS.keys()
    assert chosen(["csv", "csv"]) == ["csv"]
    monkeypatch.setenv("COMET_MODE", "disabled")
    assert chosen("comet") == []
    monkeypatch.setenv("COMET_MODE", "sometimes")
    with pytest.raises(InvalidArgument, match=r"COMET_MODE='sometimes' must be one of 'get_or_create'"):
        chosen("comet")


@pytest.mark.newest_peer
def test_names_of_the_newest_transformers():
    assert INTEGRATIONS.keys() - {"csv"} == INTEGRATION_TO_CALLBACK.keys() - {"neptune"}


def test_trackers_that_the_installed_transformers_does_not_know(monkeypatch, only):
    """trackio and kubeflow came after v4.48."""
    for name in ("trackio", "kubeflow"):
        monkeypatch.delitem(INTEGRATION_TO_CALLBACK, name, raising=False)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    only("transformers", "trackio", "codecarbon")
    assert chosen("all") == ["codecarbon"]
    assert chosen("csv") == ["csv"]
    for name in ("trackio", "kubeflow"):
        with pytest.raises(MissingPackage, match=f"report_to='{name}' .* pip install --upgrade transformers"):
            chosen(name)


def test_refused(tmp_path, only):
    only()
    with pytest.raises(InvalidArgument, match=r"report_to='wanbd' is not a tracker: did you mean 'wandb'\? Known are"):
        make_trainer("hftrainer", tmp_path, "plain", report_to="wanbd")
    with pytest.raises(MissingPackage, match=r"report_to='comet_ml' needs .* pip install comet-ml"):
        make_trainer("hftrainer", tmp_path, "plain", report_to=["csv", "comet"])
    with pytest.raises(MissingPackage, match=r"'clearml', which uses .* pip install clearml transformers"):
        make_trainer("hftrainer", tmp_path, "plain", report_to="clearml")
    with pytest.raises(UnsupportedArgument, match="Neptune's service has ended"):
        make_trainer("hftrainer", tmp_path, "plain", report_to="neptune")
    with pytest.raises(MissingPackage, match="pip install transformers"):
        chosen("kubeflow")
    only("transformers")
    with pytest.raises(InvalidArgument, match="KUBEFLOW_TRAINER_SERVER_URL"):
        chosen("kubeflow")


def test_wrong_loggers(tmp_path):
    with pytest.raises(InvalidArgument, match=r"loggers holds True \(bool\)"):
        make_trainer("hftrainer", tmp_path, "plain", trainer={"loggers": [True]})
    with pytest.raises(InvalidArgument, match=r"loggers holds <class .*Recorder'> \(ABCMeta\)"):
        make_trainer("hftrainer", tmp_path, "plain", trainer={"loggers": [Recorder]})
    with pytest.raises(InvalidArgument, match=r"loggers=True \(bool\): give a list"):
        make_trainer("hftrainer", tmp_path, "plain", trainer={"loggers": True})
    with pytest.raises(InvalidArgument, match=r"Recorder is a Lightning logger, not a callback: .*loggers="):
        make_trainer("hftrainer", tmp_path, "plain", trainer={"callbacks": [Recorder()]})
    with pytest.raises(UnsupportedArgument, match=r"use report_to or Trainer\(loggers="):
        make_trainer("hftrainer", tmp_path, "plain", lightning_config={"logger": Recorder()})


@pytest.mark.newest_peer  # the first releases lack the callback
def test_callbacks_of_transformers(tmp_path, monkeypatch):
    """They stand where transformers puts them, and get our arguments and log lines."""
    written = types.ModuleType("trackio", "Trackio as far as its callback needs it.")
    written.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    written.__version__ = "99"
    written.lines, written.begun, written.frozen, written.config = [], [], [], {}
    written.log = lambda metrics, **kwargs: written.lines.append(metrics)
    written.init = lambda **kwargs: written.begun.append(kwargs)
    written.finish = lambda: None
    written.freeze = lambda **kwargs: written.frozen.append(kwargs) or "static"
    space = types.SimpleNamespace(get=lambda: "space")
    written.context_vars = types.SimpleNamespace(current_space_id=space, current_server_url=space)
    monkeypatch.setitem(sys.modules, "trackio", written)
    settings = {
        "project": "other",
        "trackio_space_id": "space",
        "trackio_bucket_id": "bucket",
        "trackio_static_space_id": "static",
    }
    trainer = make_trainer("hftrainer", tmp_path, "plain", report_to=["trackio", "csv"], **settings)
    names = trainer.callback_handler.callback_list.split("\n")
    assert names == ["DefaultFlowCallback", "ReportingCallback", "TrackioCallback", "PrinterCallback"]
    trainer.train()
    (begun,) = written.begun
    assert {begun["project"], begun["space_id"], begun["bucket_id"]} == {"other", "space", "bucket"}
    assert "static" in str(written.frozen)
    assert [line["train/loss"] for line in written.lines if "train/loss" in line]


@pytest.mark.parametrize(("release", "default"), [("4.57.6", "all"), ("5.0.0", "none")])
def test_default_of_unmodified_scripts(monkeypatch, release, default):
    """As in the release of transformers that is installed, through each way to make arguments; and undone."""
    monkeypatch.setattr("hftrainer.arguments.behaviours.importlib.metadata.version", lambda name: release)
    monkeypatch.setattr(
        "hftrainer.cli.install.warnings_of_earlier_imports", lambda caller: []
    )  # of what other tests import

    @dataclasses.dataclass
    class Own(TrainingArguments):
        more: int = 1

    def found():
        parsed = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(["--output_dir", "x"])[0]
        return [each.report_to for each in (TrainingArguments("x"), Seq2SeqTrainingArguments("x"), parsed)]

    install()
    try:
        assert found() == [[default] if default == "all" else []] * 3
    finally:
        uninstall()
    assert found() == [[], [], []]
    assert Own("x").report_to == []


def test_plain_runs_import_no_tracker(tmp_path):
    code = """
import sys
from hftrainer import Trainer, TrainingArguments
assert not [name for name in ("lightning", "wandb", "mlflow", "tensorboard", "comet_ml") if name in sys.modules]
"""
    subprocess.run([warm.PYTHON, "-c", code], env={**warm.environment(), **warm.LIBRARIES}, check=True, timeout=100)


def test_callback_is_there_for_trackers_only(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = Trainer(make_plain(), args)
    assert trainer.pop_callback(ReportingCallback) is None
    assert torch.is_tensor(trainer.model.layers[0].weight)


def test_removing_a_tracker_by_the_class_of_transformers(tmp_path):
    """Scripts that bring their own writer take the default one out so."""
    from transformers.integrations import TensorBoardCallback

    args = TrainingArguments(str(tmp_path), max_steps=2, report_to="tensorboard", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data())
    assert trainer.pop_callback(TensorBoardCallback) is not None
    assert trainer.pop_callback(TensorBoardCallback) is None
    trainer.train()
    assert not list(tmp_path.glob("runs/**/events*"))
