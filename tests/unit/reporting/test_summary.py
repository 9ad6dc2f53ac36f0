"""A run logs where it resumes, how it went, and how to continue."""

import dataclasses
import itertools
import logging
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.__main__ import main
from hftrainer.base.messages import command_name, count_of, format_duration
from hftrainer.callbacks.state import TrainerState
from hftrainer.monitoring import run_requests
from hftrainer.monitoring.journal import JOURNAL_NAME, read_events
from hftrainer.reporting import summary
from hftrainer.training.steps import loop
from tests.support.checkpoints import AtStep, SetFlag
from tests.support.parity import accuracy
from tests.support.small_models import make_plain, plain_data

GOES_ON = "trainer.train(resume_from_checkpoint=True) resumes from it."
SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def train(folder, resume=None, callbacks=None, trainer_class=Trainer, **settings):
    settings = {"max_steps": 4, "use_cpu": True, "disable_tqdm": True, **settings}
    args = TrainingArguments(str(folder), **settings)
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data(9), "compute_metrics": accuracy}
    trainer = trainer_class(make_plain(), args, callbacks=callbacks, **data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture
def run_messages(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name == "hftrainer.run"]


def test_run_reports_its_size_time_best_and_last_checkpoint(tmp_path, run_messages):
    trainer = train(tmp_path, metric_for_best_model="accuracy", **SAVED)
    begins, spent, best, newest = run_messages()
    assert begins == f"Training {trainer.get_num_trainable_parameters()} parameters on 1 x cpu: 4 steps of 8 samples."
    rate = r"[\d,.]+ samples/s overall, peak memory [\d.]+ [MG]B.*\."
    assert re.fullmatch(rf"Trained 4 steps in [\d.e-]+ m?s( \(\d+% .*\))?: {rate}", spent)
    state = trainer.state
    where = f"at step {state.best_global_step}, in {state.best_model_checkpoint}"
    assert best == f"Best eval_accuracy: {state.best_metric:.6g} {where}."
    assert newest == f"Last checkpoint: {tmp_path}/checkpoint-4."


def test_time_before_the_first_step_is_told(tmp_path, run_messages, monkeypatch):
    monkeypatch.setattr(loop, "time", SimpleNamespace(time=itertools.count(time.time() - 900, 900).__next__))
    train(tmp_path)
    assert " (100% preparation): " in run_messages()[1]


class SpikesAtStep3(Trainer):
    """Has its best accuracy between the checkpoints of steps 2 and 4."""

    def evaluate(self, *args, **kwargs):
        return {"eval_accuracy": {2: 0.5, 3: 0.75}.get(self.state.global_step, 0.25)}


@pytest.mark.parametrize("loads", [True, False])
def test_best_value_without_a_checkpoint_is_told(tmp_path, run_messages, loads):
    settings = {**SAVED, "eval_steps": 1, "metric_for_best_model": "accuracy", "load_best_model_at_end": loads}
    trainer = train(tmp_path, trainer_class=SpikesAtStep3, **settings)
    assert trainer.state.best_model_checkpoint == f"{tmp_path}/checkpoint-2"
    sentence = "Best eval_accuracy: 0.75 at step 3, of which there is no checkpoint (save_steps=2)."
    assert sentence + (f" Loaded: {tmp_path}/checkpoint-2." if loads else "") in run_messages()


@pytest.mark.parametrize(
    "callback", [SetFlag("should_training_stop", 3), EarlyStopping("eval_loss", stopping_threshold=99.0)]
)
def test_run_stopped_by_a_callback_names_it(tmp_path, run_messages, callback):
    """The stop is intended, so nothing is said of how to continue."""
    train(tmp_path, callbacks=[callback], **{**SAVED, "eval_steps": 3, "max_steps": 40, "num_train_epochs": 9})
    assert f"Stopped at step 3 of 40, by {type(callback).__name__}." in run_messages()
    assert run_messages()[-1] == f"Last checkpoint: {tmp_path}/checkpoint-2."


def test_resumed_run_names_what_stops_it_this_time(tmp_path, run_messages, monkeypatch):
    """The reason of the earlier stop, in the checkpoint and in a reused callback, is not repeated."""
    monkeypatch.setattr(run_requests, "_PERIOD", 0.0)
    settings, stopping = {**SAVED, "max_steps": 40}, EarlyStopping("eval_loss", stopping_threshold=99.0)
    train(tmp_path, callbacks=[stopping], **settings)
    stopping.stopping_threshold = None
    ask = AtStep(3, (tmp_path / run_requests.FOLDER / "stop").touch)
    for callback in (stopping, EarlyStopping("eval_loss", patience=99)):
        said_before = len(run_messages())
        (tmp_path / run_requests.FOLDER).mkdir(exist_ok=True)
        train(tmp_path, str(tmp_path / "checkpoint-2"), callbacks=[callback, ask], **settings)
        assert "Stopped at step 3 of 40, by `ask stop`." in run_messages()[said_before:]


def test_only_existing_checkpoints_are_named(tmp_path, run_messages):
    still = {"learning_rate": 0.0}  # so that none is better than the first
    trainer = train(tmp_path, save_total_limit=1, load_best_model_at_end=True, **still, **SAVED)
    assert trainer.state.best_global_step == 2
    assert run_messages()[-1] == f"Last checkpoint: {tmp_path}/checkpoint-2."


def test_summary_splits_the_time():
    metrics = {"train_runtime": 4000.0, "train_samples_per_second": 1234.56, "train_tokens_per_second": 98765.4}
    seconds = {"data": 30.0, "evaluation": 600.0, "saving": 59.5}
    state = TrainerState(best_metric=0.5, best_global_step=6)  # of an earlier call, which compared by a metric
    run = summary.FinishedRun(state, TrainingArguments(), metrics, seconds, 12_000, 0.5, non_finite_since=7)
    (spent, _), (loss, level) = summary.make_summary(run)
    assert level == logging.WARNING and loss.startswith("The loss is not finite since step 7 of ")
    run = dataclasses.replace(run, args=TrainingArguments(metric_for_best_model="loss"))
    assert "Best eval_loss: 0.5 at step 6, after the loss became NaN." in dict(summary.make_summary(run))
    shares = "83% training, 1% data, 15% evaluation, 1% saving"
    speeds = "617.3 samples/s and 49,383 tokens/s overall"
    assert spent.startswith(f"Trained 12,000 steps in 1 h 7 min ({shares}): {speeds}, peak memory ")
    assert [format_duration(time) for time in (0.0041, 0.5, 12.34, 120)] == ["4.1 ms", "0.5 s", "12.3 s", "2 min"]
    assert [count_of(number, "steps") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_resume_without_steps_left_tells_the_epochs_left(tmp_path, run_messages):
    """After 12 steps of 8 samples, 2.4 epochs, a run of 3 epochs with 19 samples a step has 6."""
    saved = {**SAVED, "max_steps": -1, "num_train_epochs": 3, "save_steps": 12, "per_device_train_batch_size": 8}
    train(tmp_path, **saved)
    before = len(run_messages())
    train(tmp_path, str(tmp_path / "checkpoint-12"), **{**saved, "per_device_train_batch_size": 19})
    (line,) = run_messages()[before:]
    assert "step 12 of 6, epoch 2.4. No steps are left, but 0.6 epochs are" in line and "elastic=True" in line


def test_resume_tells_its_step_or_that_the_run_is_complete(tmp_path, run_messages, caplog):
    train(tmp_path, **SAVED)
    before = len(run_messages())
    train(tmp_path, True, max_steps=6, **SAVED)
    assert run_messages()[before] == f"Resuming from {tmp_path}/checkpoint-4: step 4 of 6, epoch 0.8."
    before = len(run_messages())
    train(tmp_path, True, max_steps=6, **SAVED)
    train(tmp_path, True, **{**SAVED, "max_steps": 4, "save_steps": 3})
    train(tmp_path, True, **SAVED, max_steps=-1, num_train_epochs=1)
    line, *past = run_messages()[before:]
    assert line.startswith(f"{tmp_path}/checkpoint-6 is complete (step 6 of 6): nothing to train. Increase max_steps")
    for end, line in zip((4, 5), past, strict=True):
        assert f"checkpoint-6 is already past the end (step 6 of {end}): nothing to train. Increase max_steps" in line
    assert "Resuming with" not in caplog.text[caplog.text.index("nothing to train") :]


@pytest.mark.parametrize("observe", [True, False])
def test_resume_of_a_complete_run_keeps_its_journal(tmp_path, run_messages, caplog, capsys, observe):
    settings = {**SAVED, "logging_steps": 1, "observe": observe}
    train(tmp_path, **settings)
    journal, before = (tmp_path / JOURNAL_NAME).read_bytes() if observe else b"", len(caplog.records)
    capsys.readouterr()
    trainer = train(tmp_path, True, learning_rate=1.0, **settings)
    assert not observe or (tmp_path / JOURNAL_NAME).read_bytes() == journal
    assert trainer.state.log_history[-1]["train_loss"] == 0  # as in transformers
    assert len(caplog.records) == before + 1 and not capsys.readouterr().out


def test_goodput_is_told_after_a_resume(tmp_path, run_messages):
    train(tmp_path, observe=True, **SAVED)
    train(tmp_path, True, observe=True, **{**SAVED, "max_steps": 6})
    words = r"Goodput: \d+% of the time went into steps that were kept \(2 starts\)\."
    assert re.search(words, " ".join(run_messages()))
    failed = [event | {"reason": "OSError"} for event in read_events(str(tmp_path))]
    assert "% of the time, with pauses after failures, went into steps" in summary.make_goodput_message(failed)


def test_higher_checkpoint_of_an_earlier_run_is_not_promised(tmp_path, monkeypatch):
    for step in (4, 36):
        (tmp_path / f"checkpoint-{step}").mkdir()
    last = str(tmp_path / "checkpoint-4")
    advice = f"trainer.train(resume_from_checkpoint={last!r}): True would take {tmp_path}/checkpoint-36,"
    assert f"{last}. Resume with {advice}" in summary.make_resume_hint([last], is_complete=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume_from_checkpoint=auto"])
    assert "--resume_from_checkpoint true" in summary.make_resume_hint([f"{tmp_path}/checkpoint-36"], is_complete=False)


class NanFromStep6(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 5:
            next(model.parameters()).data.fill_(float("nan"))


def test_checkpoint_after_nan_is_not_recommended(tmp_path, run_messages, capsys):
    settings = {**SAVED, "max_steps": 8, "logging_steps": 2, "observe": True}
    train(tmp_path, callbacks=[NanFromStep6()], **settings)
    earlier = f"The last one before it is {tmp_path}/checkpoint-4: resume_from_checkpoint='{tmp_path}/checkpoint-4'."
    saved = "saved after the loss became NaN (since step 6)"
    assert run_messages()[-1] == f"Last checkpoint: {tmp_path}/checkpoint-8, {saved}. {earlier}"
    before = len(run_messages())
    train(tmp_path, True, **{**settings, "max_steps": 12})
    resumed, *_, last = run_messages()[before:]
    # Checkpoints do not name the step. The loss of the evaluation at step 4 was finite.
    assert resumed.endswith(f"It was saved after the loss became NaN (since step 5-6). {earlier}")
    assert last.endswith(f"checkpoint-12, saved after the loss became NaN (since step 5-6). {earlier}")
    main(["watch", "--once", str(tmp_path)])
    page = capsys.readouterr().out
    assert "loss NaN since step 6, complete" in page and re.search(r"checkpoint-12 [\d.]+ m?s ago, NaN", page)
    assert summary.find_nan(TrainerState(log_history=[{"loss": 2.0, "grad_norm": float("inf"), "step": 1}])) is None


@pytest.mark.parametrize(
    ("is_terminal", "settings", "is_told"),
    [(True, SAVED, True), (False, SAVED, False), (True, {"save_strategy": "no", "logging_steps": 1}, False)],
)
def test_terminal_is_told_of_the_plot_command(tmp_path, run_messages, monkeypatch, is_terminal, settings, is_told):
    """Only if there is a log that plot can read."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    train(tmp_path / "an out", **settings)
    assert (run_messages()[-1] == f"Curves: {command_name()} plot '{tmp_path}/an out'") is is_told


@pytest.mark.parametrize("log_level", ["passive", "info", "warning", "error"])
def test_log_level_error_silences_the_summary(tmp_path, run_messages, log_level):
    train(tmp_path, log_level=log_level, save_strategy="no")
    assert bool(run_messages()) is (log_level != "error")
    train(tmp_path, log_level="warning", save_strategy="no")


SCRIPT = """
    import os, signal
    from hftrainer import Trainer, TrainerCallback, TrainingArguments
    from tests.support.small_models import make_plain, plain_data

    class CtrlC(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    args = TrainingArguments({folder!r}, max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True)
    Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[CtrlC]).train()
"""


def test_ctrl_c_ends_with_the_last_checkpoint(tmp_path, processes):
    """Without a traceback, in a Python of its own."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(folder=str(tmp_path / "out"))))
    done = subprocess.run([sys.executable, script], env=processes.environment(), capture_output=True, text=True)
    *_, last = done.stderr.strip().splitlines()
    assert last == f"[hftrainer] Last checkpoint: {tmp_path}/out/checkpoint-2; {GOES_ON}"
    assert "Traceback" not in done.stderr and done.returncode == -signal.SIGINT
