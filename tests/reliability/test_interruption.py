"""Signals, Ctrl-C and errors: one checkpoint, an exit with the documented status, and an exact way on."""

import importlib
import os
import signal
import time

import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.checkpointing import staging
from tests.support.jobs import assert_same, finish, names, read_until, start, weights
from tests.support.parity import build
from tests.support.tiny import make_plain, plain_data

STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: -signal.SIGINT}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder)
    return weights(folder)


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        *((number, {}) for number in STATUS),
        (signal.SIGTERM, {"gradient_accumulation_steps": 2}),
        (signal.SIGTERM, {"lightning_config": {"async_checkpoint": True}}),
    ],
)
def test_signal(tmp_path, undisturbed, number, settings):
    process = start(tmp_path, pause=0.05, **settings)
    read_until(process, "step 9")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == STATUS[number], err
    assert f"{number.name}: saving after this optimizer step" in err
    steps = [int(line.split()[1]) for line in out.splitlines() if line.startswith("step")]
    saved = [int(line.split()[1]) for line in out.splitlines() if line.startswith("saved")]
    last = steps[-1] if steps else 9
    assert last <= 11
    if settings.get("lightning_config"):  # one from before may be announced late, in the background
        assert saved[-1] == last
    else:
        assert saved == [last]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-7", f"checkpoint-{last}"}
    lines, _ = finish(tmp_path, **settings)
    assert lines[0] == f"resuming from {tmp_path}/checkpoint-{last}"
    if "gradient_accumulation_steps" not in settings:
        assert_same(weights(tmp_path), undisturbed)


def test_second_signal_stops_at_once(tmp_path):
    process = start(tmp_path, pause=3)
    read_until(process, "resuming from None")
    time.sleep(1)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    process.communicate(timeout=2)
    assert process.returncode == -signal.SIGTERM


def test_without_it_signals_are_as_ever(tmp_path):
    process = start(tmp_path, pause=0.05, save_on_interrupt=False)
    read_until(process, "step 9")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-7"}


def test_a_long_evaluation_is_left(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 3}
    finish(tmp_path / "whole", **settings)
    process = start(tmp_path / "left", pause=0.2, per_device_eval_batch_size=1, **settings)
    read_until(process, "step 3")  # 70 batches of evaluation, 14 seconds
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=8)
    assert process.returncode == 143
    assert "The evaluation was aborted" in err
    assert {path.name for path in (tmp_path / "left").iterdir()} == {"checkpoint-3"}
    finish(tmp_path / "left", **settings)
    assert_same(weights(tmp_path / "left"), weights(tmp_path / "whole"))


# ---- In this process -----------------------------------------------------------------------------------------------


def make_trainer(folder, callbacks, **settings):
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    return Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(9), callbacks=callbacks)


class Raises(TrainerCallback):
    """Sends a signal, or fails, at a step."""

    def __init__(self, step, number=None, event="on_step_end"):
        self.step, self.number = step, number
        setattr(self, event, self._at)

    def _at(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if self.number is None:
                raise RuntimeError("my own bug")
            signal.raise_signal(self.number)


def test_jit_checkpoint(tmp_path):
    """As in transformers, `train()` returns, here with one checkpoint."""
    trainer = make_trainer(tmp_path, [Raises(3, signal.SIGTERM)], enable_jit_checkpoint=True, save_strategy="no")
    assert trainer.train().global_step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("event", ["on_step_end", "on_step_begin", "on_evaluate", "on_log"])
def test_an_error_is_saved_before(tmp_path, event):
    trainer = make_trainer(tmp_path, [Raises(3, event=event)], eval_strategy="steps", eval_steps=3, logging_steps=3)
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    resumed = make_trainer(tmp_path, [])
    assert resumed.train(resume_from_checkpoint=True).global_step == 8


@pytest.mark.parametrize(
    ("event", "settings"),
    [
        ("on_optimizer_step", {}),  # the weights are between two steps
        ("on_step_end", {"save_on_interrupt": False}),
        ("on_step_end", {"save_strategy": "no"}),
    ],
)
def test_errors_after_which_nothing_is_saved(tmp_path, event, settings):
    with pytest.raises(RuntimeError, match="my own bug"):
        make_trainer(tmp_path, [Raises(3, event=event)], **settings).train()
    assert not list(tmp_path.iterdir())


def test_an_error_right_after_a_save_saves_nothing_twice(tmp_path):
    trainer = make_trainer(tmp_path, [Raises(4, event="on_step_begin")], save_steps=4)
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_averaged_weights_are_put_back_when_an_evaluation_fails(tmp_path):
    """A callback that has put the averaged weights in place is told of the end, so that a resumed run is exact."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Fails(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise RuntimeError("my own bug")

    settings = {"eval_strategy": "steps", "eval_steps": 4}
    whole = make_trainer(tmp_path / "a", [EMAWeightAveraging(decay=0.7)], **settings)
    whole.train()
    with pytest.raises(RuntimeError, match="my own bug"):
        make_trainer(tmp_path / "b", [EMAWeightAveraging(decay=0.7), Fails()], **settings).train()
    resumed = make_trainer(tmp_path / "b", [EMAWeightAveraging(decay=0.7)], **settings)
    resumed.train(resume_from_checkpoint=True)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_the_scripts(tmp_path, number, monkeypatch):
    """Lightning would end training, and requeue the job under SLURM."""
    for name, value in {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    library = importlib.import_module("hftrainer")
    caught = []
    before = signal.signal(number, lambda *args: caught.append(args[0]))

    class Sends(library.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), number)

    try:
        trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=6)
        trainer.add_callback(Sends)
        assert trainer.train().global_step == 6
    finally:
        signal.signal(number, before)
    assert caught == [number]
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_signal_after_the_last_step(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        make_trainer(tmp_path, [Late()], max_steps=9, save_steps=3).train()
    assert left.value.code == 143


def test_a_signal_in_a_step_whose_save_failed(tmp_path, monkeypatch):
    original, tries = staging.publish, []

    def once(folder):
        tries.append(folder)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        original(folder)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(staging, "publish", once)
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, [Stops()], max_steps=9, save_steps=3).train()
    assert names(tmp_path) == ["checkpoint-3"]
