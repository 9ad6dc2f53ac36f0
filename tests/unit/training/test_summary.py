"""What a run says of itself: where it resumes, how it went, and how to go on."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.callbacks.state import TrainerState
from hftrainer.reporting import summary
from hftrainer.training.stopping import Interruption
from tests.support.parity import accuracy
from tests.support.tiny import make_plain, plain_data

SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def train(folder, resume=None, **settings):
    settings = {"max_steps": 4, "use_cpu": True, "disable_tqdm": True, **settings}
    args = TrainingArguments(str(folder), **settings)
    trainer = Trainer(
        make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(9), compute_metrics=accuracy
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture
def said(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name == "hftrainer.run"]


def test_end_of_a_run(tmp_path, said):
    trainer = train(tmp_path, metric_for_best_model="accuracy", **SAVED)
    spent, speed, best, newest = said()
    assert re.match(r"Trained 4 steps in [\d.e-]+ s: ", spent)
    assert re.fullmatch(r"[\d,.]+ samples/s, peak memory [\d.]+ GB.*\.", speed)
    state = trainer.state
    where = f"at step {state.best_global_step}, in {state.best_model_checkpoint}"
    assert best == f"Best accuracy: {state.best_metric:.6g} {where}."
    assert newest.startswith(f"Last checkpoint: {tmp_path}/checkpoint-4; trainer.train(resume_from_checkpoint=True)")


def test_where_the_time_went():
    metrics = {"train_runtime": 4000.0, "train_samples_per_second": 1234.56, "train_tokens_per_second": 98765.4}
    seconds = {"waiting for data": 30.0, "in evaluations": 600.0, "saving": 59.5}
    spent, speed = summary.finished(TrainerState(), None, metrics, seconds, 12_000)
    assert spent == "Trained 12,000 steps in 1:06:40: 0:55:10 training, 0:10:00 in evaluations, 59.5 s saving."
    assert speed.startswith("1,235 samples/s, 98,765 tokens/s, peak memory ")


def test_resumed_and_complete(tmp_path, said):
    train(tmp_path, **SAVED)
    before = len(said())
    train(tmp_path, True, max_steps=6, **SAVED)
    assert said()[before] == f"Resuming from {tmp_path}/checkpoint-4: step 4 of 6, epoch 0.8."
    before = len(said())
    train(tmp_path, True, max_steps=6, **SAVED)
    (line,) = said()[before:]
    assert line.startswith(f"Resuming from {tmp_path}/checkpoint-6: step 6 of 6") and "is complete, so nothing" in line


@pytest.mark.parametrize("log_level", ["passive", "info", "warning", "error"])
def test_quiet_on_request(tmp_path, said, log_level):
    train(tmp_path, log_level=log_level, save_strategy="no")
    assert bool(said()) is (log_level != "error")
    train(tmp_path, log_level="warning", save_strategy="no")


SCRIPT = """
    import os, signal
    from hftrainer import Trainer, TrainerCallback, TrainingArguments
    from tests.support.tiny import make_plain, plain_data

    class CtrlC(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    args = TrainingArguments({folder!r}, max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True)
    Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[CtrlC]).train()
"""


def test_after_ctrl_c(tmp_path, processes):
    """In a Python of its own, which prints the traceback and ends."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(folder=str(tmp_path / "out"))))
    done = subprocess.run([sys.executable, script], env=processes.environment(), capture_output=True, text=True)
    *_, last = done.stderr.strip().splitlines()
    words = f"[hftrainer] Last checkpoint: {tmp_path}/out/checkpoint-2; trainer.train(resume_from_checkpoint=True)"
    assert last.startswith(words) and "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError(), None])
def test_only_if_ctrl_c_has_ended_the_script(monkeypatch, said, error):
    interruption = Interruption(saves=True)
    interruption.received, interruption.last_words = signal.SIGINT, "last words"
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    with pytest.raises(KeyboardInterrupt):
        interruption.leave()
    if error is not None:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    registered[0]()
    assert said() == (["last words"] if isinstance(error, KeyboardInterrupt) else [])
