"""Lightning's callbacks get the hooks of each evaluation, and every metric under its name."""

import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar

from tests.support.parity import EVALUATED, build
from tests.support.small_models import Stream, plain_data

SETS = {"first": plain_data(9), "second": plain_data(20)[9:]}


class Recorder(Callback):
    def __init__(self):
        self.hooks = []

    @property
    def names(self):
        return [name for name, _ in self.hooks]


def _note(name):
    def hook(self, trainer, pl_module, *args, **kwargs):
        self.hooks.append((name, {key: value.item() for key, value in trainer.callback_metrics.items()}))

    return hook


for _stage in ("validation", "test", "predict"):
    for _point in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
        setattr(Recorder, f"on_{_stage}_{_point}", _note(f"on_{_stage}_{_point}"))


def make_trainer(tmp_path, callbacks, evaluated=None, **settings):
    trainer_kwargs = {"callbacks": callbacks, "eval_dataset": evaluated or plain_data(9)}
    defaults = {"max_steps": 4, "logging_steps": 1}
    return build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, **defaults | settings)[0]


def hooks_of_loop(stage, batches):
    each = [f"on_{stage}_batch_start", f"on_{stage}_batch_end"] * batches
    inner = [f"on_{stage}_epoch_start", *each, f"on_{stage}_epoch_end"]
    return [f"on_{stage}_start", *inner, f"on_{stage}_end"]


def test_evaluate_and_predict_call_the_hooks_of_their_stage(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, [recorder])
    metrics = trainer.evaluate()
    trainer.evaluate(metric_key_prefix="test")
    trainer.predict(plain_data(9))
    assert recorder.names == [*hooks_of_loop("validation", 2), *hooks_of_loop("test", 2), *hooks_of_loop("predict", 2)]
    ends = {name: found for name, found in recorder.hooks if name.endswith(("validation_end", "test_end"))}
    assert ends["on_validation_end"]["eval_loss"] == pytest.approx(metrics["eval_loss"])
    assert ends["on_test_end"]["test_loss"] == pytest.approx(metrics["eval_loss"])


def test_several_eval_sets_are_one_validation_in_training(tmp_path):
    """`evaluate()` alone has a validation for each set."""
    recorder = Recorder()
    trainer = make_trainer(tmp_path, [recorder], SETS, **EVALUATED)
    trainer.train()
    epochs = ["on_validation_epoch_start", "on_validation_epoch_end"]
    each = ["on_validation_start", *epochs * 2, "on_validation_end"]
    assert [name for name in recorder.names if "batch" not in name] == each * 2
    at_end = [found for name, found in recorder.hooks if name == "on_validation_end"][-1]
    logged = {key: value for line in trainer.state.log_history for key, value in line.items()}
    first, second = logged["eval_first_loss"], logged["eval_second_loss"]
    assert at_end["eval_first_loss"] == pytest.approx(first)
    assert at_end["eval_second_loss"] == pytest.approx(second)
    assert at_end["eval_loss"] == pytest.approx((first + second) / 2)
    assert "eval_loss" not in logged  # as in transformers
    trainer.evaluate()
    alone = ["on_validation_start", *epochs, "on_validation_end"]
    assert [name for name in recorder.names if "batch" not in name] == [*each * 2, *alone * 2]


@pytest.mark.parametrize("monitor", ["eval_loss", "eval_first_loss", "eval_second_loss"])
def test_monitors_find_the_metric_of_each_set(tmp_path, monitor):
    stopper = EarlyStopping(monitor=monitor, patience=1, min_delta=10.0)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "lightning", monitor=monitor, save_top_k=1)
    trainer = make_trainer(tmp_path, [stopper, checkpoint], SETS, max_steps=20, **EVALUATED)
    assert trainer.train().global_step < 20
    assert torch.isfinite(checkpoint.best_model_score)


def test_best_model_is_chosen_by_mean_loss_of_eval_sets(tmp_path):
    """transformers stops with a KeyError at the first evaluation; we compare the mean of the losses."""
    saved = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, [], SETS, **EVALUATED, **saved)
    trainer.train()
    names, log = ("eval_first_loss", "eval_second_loss"), trainer.state.log_history
    first, second = ([line[name] for line in log if name in line] for name in names)
    means = [sum(pair) / 2 for pair in zip(first, second, strict=True)]
    assert trainer.state.best_metric == pytest.approx(min(means))


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("source", ["sized", "stream"])
def test_lightning_bars_show_evaluations_and_predictions(tmp_path, bar, source, capsys):
    data = plain_data(9) if source == "sized" else Stream(9)
    trainer = make_trainer(tmp_path, [bar()], data, **EVALUATED)
    trainer.train()
    trainer.evaluate()
    trainer.predict(data)
    shown = capsys.readouterr()
    assert "Validation" in shown.out + shown.err
    assert "Predicting" in shown.out + shown.err


@pytest.mark.parametrize("source", ["sized", "stream"])
def test_our_bar_shows_evaluations_below_training(tmp_path, source, capfd, monkeypatch):
    """Below the bar of training, with the number of batches where it is known."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    data = plain_data(9) if source == "sized" else Stream(9)
    trainer = make_trainer(tmp_path, [], data, **EVALUATED, disable_tqdm=False)
    trainer.train()
    alone = trainer.callback_handler.callbacks[-1]
    assert alone.prediction_bar is None
    trainer.predict(data)
    shown = capfd.readouterr().err
    assert ("2/2" if source == "sized" else "2it") in shown
    assert "4/4" in shown  # training's own
