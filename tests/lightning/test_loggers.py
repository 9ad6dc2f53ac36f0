"""Loggers of `report_to` and those that users pass get every log line."""

import importlib
import importlib.machinery
import sys
from typing import ClassVar
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from transformers.integrations import integration_utils

from hftrainer.trackers.base_callbacks import ReportingCallback
from hftrainer_lightning.loggers import count_rows
from tests.support import tracking
from tests.support.tracking import Recorder, evaluate_with_trackers, scalars

THEIRS = integration_utils.INTEGRATION_TO_CALLBACK


def make_trainer(folder, *loggers, callbacks=(), **settings):
    trainer_kwargs = {"loggers": list(loggers), "callbacks": list(callbacks)}
    return tracking.make_tracked_trainer("hftrainer", folder, "plain", trainer_kwargs, **settings)


@pytest.mark.parametrize("kind", [tracking.CSV, tracking.CustomCSVLogger, tracking.CustomLogger, tracking.MLflow])
def test_logger_gets_every_line_at_its_step(tmp_path, monkeypatch, kind):
    """Lines at their steps, the last one too; evaluations after training; a second training; hyperparameters once.

    TensorBoard and W&B are in tests/parity/test_trackers.py.
    """
    if kind.package:
        pytest.importorskip(kind.package)
    tracker = kind(tmp_path / "run", monkeypatch)
    trainer = tracking.make_tracked_trainer("hftrainer", tracker.folder, "plain", **tracker.settings)
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


def test_rows_of_a_table_are_counted_before_they_are_written(tmp_path):
    table = CSVLogger(tmp_path)
    table.log_metrics({"loss": 1.0}, 1)
    table.save()
    table.log_metrics({"loss": 0.5}, 2)
    assert count_rows(table) == 2
