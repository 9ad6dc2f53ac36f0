"""Loggers of `report_to` and those that users pass get every log line; wrong ones are refused."""

import dataclasses
import importlib
import importlib.machinery
import sys
from typing import ClassVar
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from transformers.integrations import integration_utils

import hftrainer
from hftrainer import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage, UnsupportedArgument
from hftrainer.trackers.base import ReportingCallback
from hftrainer.trackers.selection import TRACKERS, select_trackers
from hftrainer_lightning.loggers import count_rows
from tests.support import tracking
from tests.support.tracking import Recorder, evaluate_with_trackers, scalars

THEIRS = integration_utils.INTEGRATION_TO_CALLBACK


def make_trainer(folder, *loggers, callbacks=(), **settings):
    given = {"loggers": list(loggers), "callbacks": list(callbacks)}
    return tracking.make_trainer("hftrainer", folder, "plain", given, **settings)


@pytest.mark.parametrize("kind", [tracking.CSV, tracking.CustomCSVLogger, tracking.CustomLogger, tracking.MLflow])
def test_logger_gets_every_line_at_its_step(tmp_path, monkeypatch, kind):
    """Lines at their steps, the last one too; evaluations after training; a second training; hyperparameters once.

    TensorBoard and W&B are in tests/parity/test_trackers.py.
    """
    if kind.package:
        pytest.importorskip(kind.package)
    tracker = kind(tmp_path / "run", monkeypatch)
    trainer = tracking.make_trainer("hftrainer", tracker.folder, "plain", **tracker.settings)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.train()
    written = tracker.read()
    assert written.steps("train/loss") == [2, 4, 6, 8, 2, 4, 6, 8]
    assert written.steps("eval/loss") == [3, 6, 8, 8, 3, 6, 8]
    assert written.steps("train/train_loss") == [8, 8]
    history = trainer.state.log_history
    assert written.curves["train/train_loss"][-1][1] == pytest.approx(history[-1]["train_loss"])
    logged = [line["loss"] for line in history if "loss" in line]
    assert [value for _, value in written.curves["train/loss"][4:]] == pytest.approx(logged)
    assert [float(each["learning_rate"]) for each in written.hyperparameters] == [5e-5]
    if kind is tracking.MLflow:
        assert written.details["runs"] == [("a-run", "FINISHED")]


class LogsValues(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("mine", float(trainer.global_step))

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("of the epoch", float(trainer.global_step))

    def on_validation_epoch_end(self, trainer, pl_module):
        for each in trainer.loggers:
            each.log_metrics({"at evaluation": 1.0})


def test_callback_values_go_to_log_lines_without_a_logger(tmp_path):
    """They are in the log lines, at the same steps; those of evaluations are not."""
    trainer = make_trainer(tmp_path, callbacks=[LearningRateMonitor(), LogsValues(), ModelCheckpoint()])
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["lr-AdamW/pg1"] for line in lines] == [line["learning_rate"] for line in lines]
    assert [line.get("mine") for line in lines] == [None, 2.0, 4.0, 6.0]  # logged after the line of their step
    assert not [line for line in trainer.state.log_history if "at evaluation" in line]
    assert trainer.loggers == []
    assert trainer.lightning_trainer.loggers[0].save_dir == str(tmp_path)
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))  # the stand-in for a logger makes no folders
    plain = make_trainer(tmp_path)
    assert plain.pop_callback(ReportingCallback) is None  # it is there for trackers only
    plain.train()
    assert plain.lightning_trainer.loggers == []


def test_callback_values_go_to_the_loggers(tmp_path, monkeypatch):
    recorder, tensorboard = Recorder(), tracking.TensorBoard(tmp_path, monkeypatch)
    trainer = make_trainer(tmp_path, recorder, callbacks=[LearningRateMonitor(), LogsValues()], report_to="tensorboard")
    trainer.train()
    written = tensorboard.read()
    assert written.steps("lr-AdamW/pg1") == [2, 4, 6, 8]  # as the log lines
    for each in (written, recorder.written):
        assert list(each.curves["mine"]) == [(2, 2.0), (4, 4.0), (6, 6.0), (8, 8.0)]
        assert list(each.curves["of the epoch"]) == [(8, 8.0)]
    assert not [line for line in trainer.state.log_history if "mine" in line]
    assert trainer.lightning_trainer.loggers == trainer.loggers == [trainer.loggers[0], recorder]


@pytest.mark.parametrize(("strategy", "steps"), [("no", []), ("epoch", [10, 20])])
def test_callbacks_log_when_the_trainer_logs(tmp_path, strategy, steps):
    recorder, settings = Recorder(), {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": strategy}
    make_trainer(tmp_path, recorder, callbacks=[LearningRateMonitor(logging_interval="step")], **settings).train()
    assert [step for step, _ in recorder.written.curves.get("lr-AdamW/pg1", [])] == steps


class RecordingBar(TQDMProgressBar):
    shown: ClassVar[list] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.shown.append(self.get_metrics(trainer, pl_module))


def test_lightning_bar_shows_values_of_log_lines(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[RecordingBar()])
    trainer.train()
    lines = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert [each.get("loss") for each in RecordingBar.shown[2:8:2]] == [lines[2], lines[4], lines[6]]
    assert "eval_loss" in RecordingBar.shown[-1] and "loss" not in RecordingBar.shown[0]
    assert not {"epoch", "learning_rate", "eval_runtime"} & set(RecordingBar.shown[-1])


def test_logger_is_finalized_once_after_the_last_line(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder)
    trainer.args.hub_token = "hf_secret"
    trainer.evaluate()
    assert recorder.status == []
    note = {"teardown": lambda *args, **kwargs: recorder.status.append("teardown")}
    trainer.add_callback(type("Notes", (Callback,), note))
    trainer.train()
    assert recorder.status == ["teardown", "success"]
    assert recorder.written.hyperparameters[0]["hub_token"] == "<HUB_TOKEN>"


def test_logger_is_finalized_as_failed_after_an_error(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise RuntimeError("mine")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(tmp_path, recorder, callbacks=[Fails()]).train()
    assert recorder.status == ["failed"]


def test_log_folders_appear_when_something_is_written(tmp_path, monkeypatch):
    """`predict()` writes nothing; earlier tables are kept."""
    logs = tmp_path / "logs"
    for earlier in range(2):
        trainer = make_trainer(tmp_path, report_to=["tensorboard", "csv"], logging_dir=str(logs))
        trainer.predict(trainer.eval_dataset)
        assert logs.exists() == bool(earlier)
        assert len(list(logs.glob("csv/version_*/metrics.csv"))) == len(list(logs.glob("events*"))) == earlier
        trainer.evaluate()
    assert len(list(logs.glob("csv/version_*/metrics.csv"))) == 2
    tensorboard, table = make_trainer(tmp_path, report_to=["tensorboard", "csv"]).loggers
    assert tensorboard.log_dir.startswith(str(tmp_path / "runs"))
    assert table.log_dir.startswith(tensorboard.log_dir)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "there"))
    (tensorboard,) = make_trainer(tmp_path, report_to="tensorboard").loggers
    assert tensorboard.log_dir.rstrip("/") == str(tmp_path / "there")


def test_each_search_trial_has_its_own_log_folder(tmp_path, monkeypatch):
    """The folder has the name of the trial in the state."""
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, report_to="tensorboard", max_steps=2)
    begin = trainer._init_training_state
    for name in ("first", "second"):

        def named(*args, name=name):
            found = begin(*args)
            trainer.state.trial_name = name
            return found

        monkeypatch.setattr(trainer, "_init_training_state", named)
        trainer.train(trial={"seed": 1})
        (folder,) = tmp_path.glob(f"runs/*/{name}")
        assert [step for step, _ in scalars(folder)["train/loss"]] == [2]
    assert len(recorder.written.hyperparameters) == 2


def test_only_the_main_process_of_two_writes_logs(tmp_path, processes):
    """The main process writes; Lightning's callbacks, which want a logger, run in both."""
    assert processes.run_ranks(evaluate_with_trackers, 2, tmp_path) == [2, 0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("events*"))) == len(list(folder.glob("csv/version_*"))) == 1
    assert [step for step, _ in scalars(folder)["eval/loss"]] == [0]


@pytest.mark.newest_peer  # the first releases lack the callback
def test_transformers_tracker_callbacks_get_our_log_lines(tmp_path, monkeypatch):
    """They stand where transformers puts them, and get our arguments and log lines."""
    trackio = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("trackio", None), __version__="99")
    trackio.context_vars.current_space_id.get.return_value = "space"
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    names = {"project": "other", "trackio_space_id": "space", "trackio_bucket_id": "bucket"}
    trainer = make_trainer(tmp_path, report_to=["trackio", "csv"], trackio_static_space_id="static", **names)
    callbacks = trainer.callback_handler.callback_list.split("\n")
    assert callbacks == ["DefaultFlowCallback", "ReportingCallback", "TrackioCallback", "PrinterCallback"]
    trainer.train()
    begun = trackio.init.call_args.kwargs
    assert {name: begun[name.removeprefix("trackio_")] for name in names} == names
    assert "static" in str(trackio.freeze.call_args)
    assert [call for call in trackio.log.call_args_list if "train/loss" in call.args[0]]


@pytest.fixture
def install_only(monkeypatch):
    """Make a set of packages look installed, and no other tracker's."""
    real = importlib.util.find_spec
    known = {module for kind in TRACKERS.values() for each in kind.modules for module in each.split("|")}
    known |= {"azureml", "azureml.core", "transformers"}

    def install(*packages):
        def find(name, *args):
            if name not in known:
                return real(name, *args)
            return importlib.machinery.ModuleSpec(name, None) if name in packages else None

        monkeypatch.setattr("hftrainer.trackers.selection.importlib.util.find_spec", find)

    return install


def test_report_to_all_selects_installed_trackers(install_only, monkeypatch):
    monkeypatch.delenv("DISABLE_MLFLOW_INTEGRATION", raising=False)
    install_only("wandb", "tensorboardX", "mlflow", "transformers", "codecarbon", "flytekit", "trackio")
    trackio = ["trackio"] if "trackio" in THEIRS else []
    assert (
        select_trackers("all") == select_trackers(["all"]) == ["mlflow", "tensorboard", "wandb", "codecarbon", *trackio]
    )
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    assert select_trackers("all") == ["tensorboard", "codecarbon", *trackio]
    assert select_trackers("wandb") == []
    install_only("tensorboard", "trackio")  # without transformers
    assert select_trackers("all") == ["tensorboard"]
    assert select_trackers("none") == select_trackers([]) == select_trackers(None) == []


def test_report_to_all_selects_what_transformers_finds():
    found = integration_utils.get_available_reporting_integrations()
    assert select_trackers("all") == [name for name in found if name != "neptune"]


def test_tracker_names_of_transformers_are_known(monkeypatch):
    assert THEIRS.keys() - {"neptune"} <= TRACKERS.keys()
    assert select_trackers(["csv", "csv"]) == ["csv"]
    monkeypatch.setenv("COMET_MODE", "disabled")
    assert select_trackers("comet") == []
    monkeypatch.setenv("COMET_MODE", "sometimes")
    with pytest.raises(InvalidArgument, match=r"COMET_MODE='sometimes' must be one of 'get_or_create'"):
        select_trackers("comet")


def test_rows_of_a_table_are_counted_before_they_are_written(tmp_path):
    table = CSVLogger(tmp_path)
    table.log_metrics({"loss": 1.0}, 1)
    table.save()
    table.log_metrics({"loss": 0.5}, 2)
    assert count_rows(table) == 2


@pytest.mark.newest_peer
def test_our_trackers_are_those_of_newest_transformers():
    assert TRACKERS.keys() - {"csv"} == THEIRS.keys() - {"neptune"}


def test_tracker_unknown_to_installed_transformers_needs_upgrade(monkeypatch, install_only):
    """trackio and kubeflow came after v4.48."""
    for name in ("trackio", "kubeflow"):
        monkeypatch.delitem(THEIRS, name, raising=False)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    install_only("transformers", "trackio", "codecarbon")
    assert select_trackers("all") == ["codecarbon"]
    assert select_trackers("csv") == ["csv"]
    for name in ("trackio", "kubeflow"):
        with pytest.raises(MissingPackage, match=f"report_to='{name}' .* pip install --upgrade transformers"):
            select_trackers(name)


@pytest.mark.parametrize("given", ["none", ["csv"]])
def test_kubeflow_job_reports_to_kubeflow(tmp_path, monkeypatch, given):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    trainer = tracking.make_trainer("hftrainer", tmp_path, "plain", report_to=given)
    assert trainer.args.report_to == [*([] if given == "none" else given), "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    trainer = tracking.make_trainer("hftrainer", tmp_path, "plain", report_to=given)
    assert "kubeflow" not in trainer.args.report_to


#: `report_to` or other arguments of a Trainer; no package of a tracker is installed but those that are named.
REFUSED = [
    ("wanbd", InvalidArgument, r"report_to='wanbd' is not a tracker; did you mean 'wandb'\? Valid names"),
    (["none", "tensorboard"], InvalidArgument, "'none' cannot be"),
    (["all", "wandb"], InvalidArgument, "'all' cannot be"),
    ({"report_to": 3}, InvalidArgument, "report_to=3"),
    (["csv", "comet"], MissingPackage, r"report_to='comet_ml' needs .* pip install comet-ml"),
    ("clearml", MissingPackage, r"'clearml', which uses .* pip install clearml transformers"),
    ("neptune", UnsupportedArgument, "Neptune's service has ended"),
    ("kubeflow", MissingPackage, "pip install transformers"),
    ("kubeflow with transformers", InvalidArgument, "KUBEFLOW_TRAINER_SERVER_URL"),
    ({"trainer": {"loggers": [True]}}, InvalidArgument, r"loggers contains True \(bool\)"),
    ({"trainer": {"loggers": [Recorder]}}, InvalidArgument, r"loggers contains <class .*Recorder'> \(ABCMeta\)"),
    ({"trainer": {"loggers": True}}, InvalidArgument, r"loggers=True \(bool\): pass a list"),
    ({"trainer": {"callbacks": [Recorder()]}}, InvalidArgument, r"Recorder is a Lightning logger, .*loggers="),
    ({"lightning_config": {"logger": Recorder()}}, InvalidArgument, r"use report_to or Trainer\(loggers="),
]


@pytest.mark.parametrize(("given", "kind", "words"), REFUSED)
def test_invalid_trackers_and_loggers_are_refused(tmp_path, install_only, given, kind, words):
    install_only(*["transformers"] if "transformers" in given else [])
    if not isinstance(given, dict):
        given = {"report_to": given.split(" ")[0] if isinstance(given, str) else given}
    with pytest.raises(kind, match=words):
        tracking.make_trainer("hftrainer", tmp_path, "plain", **given)


@pytest.mark.parametrize(("release", "default"), [("4.57.6", ["all"]), ("5.0.0", [])])
def test_install_gives_report_to_default_of_the_release(monkeypatch, release, default):
    """However arguments are made, the default is that of the installed transformers, until `uninstall()`."""
    monkeypatch.setattr("hftrainer.releases.followed.importlib.metadata.version", lambda name: release)
    # of what other tests import
    monkeypatch.setattr("hftrainer.cli.install.check_earlier_imports", lambda: [])

    @dataclasses.dataclass
    class Own(TrainingArguments):
        more: int = 1

    def found():
        parsed = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(["--output_dir", "x"])[0]
        return [each.report_to for each in (TrainingArguments("x"), Seq2SeqTrainingArguments("x"), parsed)]

    hftrainer.install()
    try:
        assert found() == [default] * 3
    finally:
        hftrainer.uninstall()
    assert [*found(), Own("x").report_to] == [[]] * 4
