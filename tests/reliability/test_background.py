"""Checkpoints written in the background: the same files in the same order, while training goes on."""

import os
import threading
import time

import pytest
import torch

from hftrainer import Trainer, TrainerCallback
from hftrainer.checkpointing import staging
from hftrainer.checkpointing import weights as weights_module
from hftrainer.data.random_states import numpy_state_types
from hftrainer.errors import CheckpointNotWritten
from tests.support.checkpoints import MODELS, make_trainer
from tests.support.differences import OWN_FILES
from tests.support.jobs import names

BACKGROUND = {"async_checkpoint": True}


def contents(path):
    """What a file holds, to compare."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if path.suffix in (".pt", ".bin") and path.name != "training_args.bin":
        with torch.serialization.safe_globals(numpy_state_types()):
            return repr(torch.load(path, weights_only=True))
    return path.read_text() if path.suffix == ".json" else None


@pytest.mark.parametrize("model", MODELS)
def test_the_same_files(tmp_path, model):
    """Although training goes on while they are written, each holds its own step."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    for name, config in (("now", {}), ("later", BACKGROUND)):
        callbacks = [EMAWeightAveraging(decay=0.5)] if model == "plain" else []
        make_trainer(tmp_path / name, model, callbacks, lightning_config=config).train()
    for step in (3, 6, 9):
        now, later = tmp_path / "now" / f"checkpoint-{step}", tmp_path / "later" / f"checkpoint-{step}"
        assert sorted(os.listdir(now)) == sorted(os.listdir(later))
        for path in now.iterdir():
            if path.name not in ("hftrainer_manifest.json", "README.md"):
                assert contents(path) == contents(later / path.name), path.name


class Slow:
    """Makes publishing slow, and notes who does it."""

    def __init__(self, monkeypatch, seconds):
        self.threads, original = [], staging.publish

        def publish(folder):
            self.threads.append(threading.current_thread())
            time.sleep(seconds)
            original(folder)

        monkeypatch.setattr(staging, "publish", publish)


class Notes(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step, threading.current_thread() is threading.main_thread()))
        assert os.path.isdir(f"{args.output_dir}/checkpoint-{state.global_step}"), "announced before it is there"


def test_training_does_not_wait(tmp_path, monkeypatch):
    slow, notes = Slow(monkeypatch, 0.5), Notes()
    trainer = make_trainer(tmp_path, callbacks=[notes], lightning_config=BACKGROUND, max_steps=8)
    trainer.train()
    assert all(thread is not threading.main_thread() for thread in slow.threads)
    saves = [event for event in notes.events if event[0] == "save"]
    assert saves == [("save", step, True) for step in (3, 6, 8)]
    assert notes.events.index(("save", 3, True)) > notes.events.index(("step", 5))  # two steps later
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_rotation_and_the_best(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1}
    for name, config in (("now", {}), ("later", BACKGROUND)):
        trainer = make_trainer(tmp_path / name, lightning_config=config, **settings)
        trainer.train()
        left = sorted(os.listdir(tmp_path / name))
        if name == "now":
            expected = left, {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    assert left == expected[0]
    assert all(torch.equal(tensor, expected[1][key]) for key, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("stop", [False, True])
def test_an_error_surfaces(tmp_path, monkeypatch, caplog, stop):
    original = staging.publish

    def publish(folder):
        if folder.endswith("checkpoint-3"):
            raise OSError(28, "No space left on device")
        original(folder)

    monkeypatch.setattr(staging, "publish", publish)
    config = {**BACKGROUND, "on_save_error": "stop" if stop else "continue"}
    trainer = make_trainer(tmp_path, lightning_config=config)
    if stop:
        with pytest.raises(CheckpointNotWritten, match="checkpoint-3 could not be written"):
            trainer.train()
        assert trainer.state.global_step <= 6
    else:
        trainer.train()
        assert "checkpoint-3 could not be written (No space left on device)" in caplog.text
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-6", "checkpoint-9"]


def test_errors_that_are_no_storages_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "publish", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, lightning_config=BACKGROUND).train()


def test_overrides_write_at_once(tmp_path):
    """A subclass that writes the model itself sees the weights of the step, not those of later ones."""

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            torch.save(self.model.state_dict(), f"{output_dir}/own.pt")

    trainer = make_trainer(tmp_path, lightning_config=BACKGROUND)
    trainer.__class__ = Own
    trainer.train()
    from safetensors.torch import load_file

    for step in (3, 6, 9):
        own = torch.load(tmp_path / f"checkpoint-{step}" / "own.pt")
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in own.items())


def test_lightnings_plugin_means_the_same(tmp_path, monkeypatch):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    slow = Slow(monkeypatch, 0)
    make_trainer(tmp_path, lightning_config={"plugins": [AsyncCheckpointIO()]}).train()
    assert len(slow.threads) == 3
    assert threading.main_thread() not in slow.threads


def test_two_runs_with_one_trainer(tmp_path):
    trainer = make_trainer(tmp_path, lightning_config=BACKGROUND)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert OWN_FILES & set(os.listdir(tmp_path / "checkpoint-9")) == {"hftrainer_manifest.json", "progress.pt"}


def test_adapters_in_the_background(tmp_path, monkeypatch):
    """However slow the writing is, they are those of their step."""
    original = weights_module.save_weights

    def slow(*args, **kwargs):
        time.sleep(0.3)
        original(*args, **kwargs)

    make_trainer(tmp_path / "now", "peft").train()
    monkeypatch.setattr("hftrainer.training.saver.save_weights", slow)
    make_trainer(tmp_path / "later", "peft", lightning_config=BACKGROUND).train()
    from safetensors.torch import load_file

    for step in (3, 6, 9):
        now, later = (
            load_file(tmp_path / name / f"checkpoint-{step}/adapter_model.safetensors") for name in ("now", "later")
        )
        assert all(torch.equal(tensor, later[name]) for name, tensor in now.items())


def test_training_again_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    original = staging.publish

    def slow(folder):
        time.sleep(0.5)
        original(folder)

    class Fails(TrainerCallback):
        failed = False

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4 and not Fails.failed:
                Fails.failed = True
                raise RuntimeError("my own bug")

    monkeypatch.setattr(staging, "publish", slow)
    trainer = make_trainer(tmp_path, callbacks=[Fails()], lightning_config=BACKGROUND)
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-3"]
    assert trainer.train(resume_from_checkpoint=True).global_step == 9
