"""`ControlActions` does what the control flags request, synchronizes ranks after each action, and judges metrics."""

import math

import pytest

from hftrainer import TrainerCallback
from hftrainer.training.stopping import FlagSync


class Requests(TrainerCallback):
    """Sets control flags at the end of a step and of an epoch; `calls` has what is done, in order."""

    def __init__(self, at_step_end, at_epoch_end):
        self.at_step_end, self.at_epoch_end, self.calls = at_step_end, at_epoch_end, []

    def on_step_end(self, args, state, control, **kwargs):
        for flag in self.at_step_end:
            setattr(control, f"should_{flag}", True)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.calls.append("epoch_end")
        for flag in self.at_epoch_end:
            setattr(control, f"should_{flag}", True)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.calls.append("log")

    def on_evaluate(self, args, state, control, **kwargs):
        self.calls.append("evaluate")

    def on_save(self, args, state, control, **kwargs):
        self.calls.append("save")


@pytest.fixture
def call_requested(make_trainer, monkeypatch):
    """The calls in a run of one step, with these flags at its end."""

    def call_requested(*at_step_end, at_epoch_end=(), metric=1.0, **settings):
        requests = Requests(at_step_end, at_epoch_end)
        # It does nothing in one process, but is called.
        monkeypatch.setattr(FlagSync, "sync_now", lambda flag_sync: requests.calls.append("sync"))
        judged = {"compute_metrics": lambda _: {"score": metric}, "metric_for_best_model": "score"}
        trainer = make_trainer(callbacks=[requests], max_steps=1, logging_strategy="no", **judged, **settings)
        trainer.train()
        return requests.calls

    return call_requested


LOG, EVALUATE, SAVE = ["log", "sync"], ["evaluate", "sync"], ["save", "sync"]
END = ["epoch_end", "sync"]


def test_log_evaluate_and_save_run_in_this_order(call_requested):
    assert call_requested() == END
    assert call_requested("save", "evaluate", "log") == LOG + EVALUATE + SAVE + END
    assert call_requested("evaluate") == EVALUATE + END


def test_step_has_one_log_line(call_requested):
    assert call_requested("log", at_epoch_end=["log", "save"]) == LOG + END + SAVE


@pytest.mark.parametrize(("metric", "saves"), [(1.0, SAVE), (math.nan, [])])
def test_best_metric_decides_about_saving(call_requested, metric, saves):
    assert call_requested("evaluate", metric=metric, save_strategy="best") == EVALUATE + saves + END
    assert call_requested("evaluate", "save", metric=metric) == EVALUATE + SAVE + END


@pytest.mark.parametrize(
    ("value", "greater_is_better", "is_best"),
    [
        (0.5, False, True),
        (0.5, True, False),
        (1.5, False, False),
        (1.5, True, True),
        *[(value, greater, False) for value in (1.0, math.nan) for greater in (False, True)],
    ],
)
def test_metric_is_the_best_if_it_is_better_than_all_before(make_trainer, value, greater_is_better, is_best):
    settings = {"metric_for_best_model": "loss", "greater_is_better": greater_is_better, "save_strategy": "steps"}
    trainer = make_trainer(**settings)
    trainer.state.global_step, trainer.state.best_metric, trainer.state.best_global_step = 5, 1.0, 3
    assert trainer._determine_best_metric({"eval_loss": value}, None) is is_best
    assert (trainer.state.best_metric, trainer.state.best_global_step) == ((value, 5) if is_best else (1.0, 3))
