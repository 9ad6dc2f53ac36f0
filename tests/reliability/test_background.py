"""Checkpoints written in the background: the same files in the same order, while training goes on."""

import errno
import os
import threading
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from safetensors.torch import load_file

from hftrainer import Trainer, TrainerCallback
from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.writing import files, folder
from hftrainer.checkpointing.writing.folder import staging_folder
from hftrainer.checkpointing.writing.writer import CheckpointWriter
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import CheckpointNotWritten
from hftrainer.training.checkpoints import saver
from tests.support.checkpoints import BACKGROUND, BEST, MODELS, AtStep, assert_same_end, make_trainer, train_to_end
from tests.support.faults import FailsOnce
from tests.support.jobs import names_in
from tests.support.known_differences import OWN_FILES
from tests.support.parity import assert_same_weights


@pytest.fixture
def hold_back(monkeypatch):
    def hold(module, name):
        threads, waited, original, wait = [], threading.Event(), getattr(module, name), CheckpointWriter.wait

        def held(*args, **kwargs):
            threads.append(threading.current_thread())
            if threads[-1] is not threading.main_thread():  # which writes adapters, for they are small
                waited.wait()
            return original(*args, **kwargs)

        def wait_for_it(writer):
            waited.set()
            wait(writer)
            waited.clear()

        monkeypatch.setattr(module, name, held)
        monkeypatch.setattr(CheckpointWriter, "wait", wait_for_it)
        return threads

    return hold


def contents(path):
    if path.suffix == ".safetensors":
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if path.suffix in (".pt", ".bin") and path.name != "training_args.bin":
        with torch.serialization.safe_globals(numpy_state_types()):
            return repr(torch.load(path, weights_only=True))
    return path.read_text() if path.suffix == ".json" else None


@pytest.mark.parametrize("model", MODELS)
def test_background_saves_write_the_same_files(tmp_path, model, hold_back):
    for name, config in (("now", {}), ("later", BACKGROUND)):
        callbacks = [EMAWeightAveraging(decay=0.5)] if model == "plain" else []
        if name == "later":
            hold_back(saver, "save_weights")
        make_trainer(tmp_path / name, model, callbacks, **config).train()
    for step in (3, 6, 9):
        now, later = (tmp_path / name / f"checkpoint-{step}" for name in ("now", "later"))
        assert names_in(now) == names_in(later)
        for path in now.iterdir():
            if path.name not in ("hftrainer_manifest.json", "README.md"):
                assert contents(path) == contents(later / path.name), path.name


class Notes(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        assert os.path.isdir(f"{args.output_dir}/checkpoint-{state.global_step}"), "announced before it is there"
        assert threading.current_thread() is threading.main_thread()
        self.events.append(("save", state.global_step))


@pytest.mark.parametrize(
    "config", [BACKGROUND["lightning_config"], {"plugins": [AsyncCheckpointIO()]}], ids=["argument", "plugin"]
)
def test_training_continues_while_a_checkpoint_is_written(tmp_path, hold_back, config):
    notes, threads = Notes(), hold_back(folder, "write_manifest")
    make_trainer(tmp_path, callbacks=[notes], max_steps=8, lightning_config=config).train()
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    saves = [event for event in notes.events if event[0] == "save"]
    assert saves == [("save", step) for step in (3, 6, 8)]
    assert notes.events.index(saves[0]) > notes.events.index(("step", 5))
    assert names_in(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_rotation_and_best_model_are_the_same(tmp_path):
    now, later = (
        train_to_end(make_trainer(tmp_path / name, save_total_limit=1, **BEST, **config))
        for name, config in (("now", {}), ("later", BACKGROUND))
    )
    assert names_in(tmp_path / "later") == names_in(tmp_path / "now")
    assert_same_end(later, now)


def test_one_trainer_saves_in_two_runs(tmp_path):
    trainer = train_to_end(make_trainer(tmp_path, **BACKGROUND))
    train_to_end(trainer, tmp_path / "checkpoint-6")
    assert names_in(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert OWN_FILES & set(names_in(tmp_path / "checkpoint-9")) == {"hftrainer_manifest.json", "progress.pt"}


def test_train_after_an_error_waits_for_the_pending_checkpoint(tmp_path, hold_back):
    hold_back(folder, "write_manifest")
    fails_once = mock.Mock(side_effect=[RuntimeError("my own bug"), None])
    trainer = make_trainer(tmp_path, callbacks=[AtStep(4, fails_once, "on_pre_optimizer_step")], **BACKGROUND)
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert names_in(tmp_path) == ["checkpoint-3"]
    assert train_to_end(trainer, True).state.global_step == 9


def test_overridden_save_sees_the_weights_of_its_step(tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            torch.save(self.model.state_dict(), f"{output_dir}/own.pt")

    make_trainer(tmp_path, trainer_class=Own, **BACKGROUND).train()
    for step in (3, 6, 9):
        folder = tmp_path / f"checkpoint-{step}"
        assert_same_weights(torch.load(folder / "own.pt"), load_file(folder / "model.safetensors"))


def test_overridden_optimizer_save_finds_the_files_written_before_it(tmp_path):
    found = []

    class Own(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            assert os.path.getsize(f"{output_dir}/model.safetensors")
            super()._save_optimizer_and_scheduler(output_dir)
            state = torch.load(f"{output_dir}/optimizer.pt")  # it is there when super() returns
            torch.save({**state, "mine": self.state.global_step}, f"{output_dir}/optimizer.pt")
            found.append(self.state.global_step)

    make_trainer(tmp_path, trainer_class=Own).train()
    assert found == [3, 6, 9]
    for step in found:
        assert torch.load(tmp_path / f"checkpoint-{step}" / "optimizer.pt")["mine"] == step
        assert inspect_checkpoint(tmp_path / f"checkpoint-{step}").changes == ""


#: All but the last run in a thread also without `async_checkpoint`.
PLACES = {
    "writing": (files, "save", "optimizer.pt"),
    "flushing": (files, "flush_to_disk", "model.safetensors"),
    "checksum": (files, "crc32_of_file", "optimizer.pt"),
    "publishing": (folder, "write_manifest", staging_folder("checkpoint-3").name),
}
ERRORS = {"of the storage": OSError(errno.EIO, "Input/output error"), "another": ZeroDivisionError("my own bug")}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ERRORS)
def test_storage_error_skips_a_checkpoint_others_end_training(tmp_path, monkeypatch, caplog, place, background, kind):
    """Nothing of the checkpoint is left."""
    module, function, name = PLACES[place]
    fails = FailsOnce(monkeypatch, module, function, ERRORS[kind], name)
    trainer = make_trainer(tmp_path, lightning_config={"async_checkpoint": background})
    if kind == "another":
        with pytest.raises(ZeroDivisionError, match="my own bug"):
            trainer.train()
        assert not [name for name in names_in(tmp_path) if name == "checkpoint-3" or name.startswith("_tmp_")]
    else:
        trainer.train()
        assert "checkpoint-3 could not be written (Input/output error); its partial files were removed" in caplog.text
        assert names_in(tmp_path) == ["checkpoint-6", "checkpoint-9"]
    assert (fails.thread is threading.main_thread()) == (place == "publishing" and not background)


@pytest.mark.parametrize("background", [False, True])
def test_on_save_error_stop_ends_training(tmp_path, monkeypatch, background):
    FailsOnce(monkeypatch, folder, "write_manifest", OSError(errno.ENOSPC, "No space left on device"))
    trainer = make_trainer(tmp_path, lightning_config={"async_checkpoint": background, "on_save_error": "stop"})
    with pytest.raises(CheckpointNotWritten, match="checkpoint-3 could not be written"):
        trainer.train()
    assert "checkpoint-3" not in names_in(tmp_path)
    assert trainer.state.global_step <= (6 if background else 3)  # in the background, by the next save
