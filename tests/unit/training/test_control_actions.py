"""`ControlActions` does what the control flags request, synchronizes ranks after each action, and judges metrics."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from hftrainer import TrainerControl, TrainerState
from hftrainer.releases import followed
from hftrainer.training.control_actions import ControlActions
from hftrainer.training.run import Run


def run_requested(*flags, is_best=True, save_strategy="steps", last_logged=4):
    """The calls at step 5, in order, and the Trainer."""
    calls = []

    def record(name, result=None):
        return lambda *_, **__: calls.append(name) or result

    trainer = SimpleNamespace(
        args=SimpleNamespace(save_strategy=save_strategy),
        state=TrainerState(global_step=5),
        control=TrainerControl(**{f"should_{flag}": True for flag in flags}),
        _evaluate=record("evaluate", {"eval_loss": 1.0}),
        _determine_best_metric=record("judge", is_best),
        _save_checkpoint=record("save"),
    )
    run = Run(last_logged_step=last_logged)
    run.loop = SimpleNamespace(
        **dict.fromkeys(("grad_norm", "learning_rate", "start_time")),
        flag_sync=SimpleNamespace(sync_now=record("sync")),
        monitors=SimpleNamespace(measure_activity=lambda name: contextlib.nullcontext(calls.append(name))),
    )
    saver = SimpleNamespace(call_on_save=record("on_save"))
    actions = ControlActions(SimpleNamespace(trainer=trainer, run=run, checkpoint_saver=saver))
    actions._log_training_loss = record("log")
    actions.log_if_requested(None, None, None, None)
    actions.save_if_requested(None, None, actions.evaluate_if_requested(None, None))
    return calls, trainer


LOG, EVALUATE = ["log", "sync"], ["evaluation", "evaluate", "judge", "sync"]
SAVE = ["saving", "save", "on_save", "sync"]


def test_log_evaluate_and_save_run_in_this_order():
    assert run_requested()[0] == []
    assert run_requested("log", "evaluate", "save")[0] == LOG + EVALUATE + SAVE
    assert run_requested("evaluate")[0] == EVALUATE
    # A step has one log line.
    assert run_requested("log", "save", last_logged=5)[0] == SAVE


@pytest.mark.parametrize("is_best", [True, False])
def test_best_metric_decides_about_saving(is_best):
    calls, trainer = run_requested("evaluate", save_strategy="best", is_best=is_best)
    assert calls == EVALUATE + (SAVE if is_best else []) and trainer.control.should_save is is_best
    assert run_requested("evaluate", "save", is_best=is_best)[0] == EVALUATE + SAVE


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
def test_metric_is_the_best_if_it_is_better_than_all_before(value, greater_is_better, is_best):
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=greater_is_better, save_strategy="steps")
    state = TrainerState(global_step=5, best_metric=1.0, best_global_step=3)
    trainer = SimpleNamespace(args=args, state=state)
    actions = ControlActions(SimpleNamespace(trainer=trainer, run=Run(), policy=followed.from_text("5.20")))
    assert actions.determine_best_metric({"eval_loss": value}, None) is is_best
    assert (state.best_metric, state.best_global_step) == ((value, 5) if is_best else (1.0, 3))
