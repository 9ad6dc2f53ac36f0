"""`ControlActions` does what the control flags request, synchronizes ranks after each action, and judges metrics."""

import math

import pytest

import hftrainer
from hftrainer.training.stopping import FlagSync
from tests.support.checkpoints import SetFlag
from tests.support.parity import make_recorder


@pytest.fixture
def run_requested(make_trainer, monkeypatch):
    """The actions in a run of one step, at whose end these flags are set; some at the end of the epoch, after it."""

    def run_requested(*flags, at_epoch_end=(), metric=1.0, **settings):
        recorder, later = make_recorder(hftrainer), [SetFlag(flag, 1, "on_epoch_end") for flag in at_epoch_end]
        # It does nothing in one process, but is called.
        monkeypatch.setattr(FlagSync, "sync_now", lambda flag_sync: recorder.events.append(["sync"]))
        judged = {"compute_metrics": lambda _: {"score": metric}, "metric_for_best_model": "score"}
        callbacks = [recorder, *(SetFlag(flag, 1) for flag in flags), *later]
        make_trainer(callbacks=callbacks, max_steps=1, logging_strategy="no", **judged, **settings).train()
        return [event for event, *_ in recorder.events if event in {*LOG, *EVALUATE, *SAVE, *END}]

    return run_requested


# An evaluation and the end of a run each write a log line.
LOG, EVALUATE, SAVE = ["on_log", "sync"], ["on_log", "on_evaluate", "sync"], ["on_save", "sync"]
END_OF_EPOCH, END_OF_RUN = ["on_epoch_end", "sync"], ["on_log", "on_train_end"]
END = END_OF_EPOCH + END_OF_RUN


def test_log_evaluate_and_save_run_in_this_order(run_requested):
    assert run_requested() == END
    assert run_requested("should_save", "should_evaluate", "should_log") == LOG + EVALUATE + SAVE + END
    assert run_requested("should_evaluate") == EVALUATE + END


def test_step_has_one_log_line(run_requested):
    assert (
        run_requested("should_log", at_epoch_end=["should_log", "should_save"])
        == LOG + END_OF_EPOCH + SAVE + END_OF_RUN
    )


@pytest.mark.parametrize(("metric", "saves"), [(1.0, SAVE), (math.nan, [])])
def test_best_metric_decides_about_saving(run_requested, metric, saves):
    assert run_requested("should_evaluate", metric=metric, save_strategy="best") == EVALUATE + saves + END
    assert run_requested("should_evaluate", "should_save", metric=metric) == EVALUATE + SAVE + END


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
    trainer = make_trainer(metric_for_best_model="loss", greater_is_better=greater_is_better, save_strategy="steps")
    trainer.state.global_step, trainer.state.best_metric, trainer.state.best_global_step = 5, 1.0, 3
    assert trainer._determine_best_metric({"eval_loss": value}, None) is is_best
    assert (trainer.state.best_metric, trainer.state.best_global_step) == ((value, 5) if is_best else (1.0, 3))
