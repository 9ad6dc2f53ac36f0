"""Folders of checkpoints are rotated and replaced safely, also on storage that fails."""

import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from hftrainer import Trainer, TrainerCallback
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import BEST, AtStep, OnSave, make_trainer, train_to_end
from tests.support.faults import Disk
from tests.support.jobs import names_in


def test_run_that_does_not_resume_names_existing_checkpoints(tmp_path, caplog):
    make_trainer(tmp_path).train()
    assert "already has checkpoints" not in caplog.text
    make_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert "already has checkpoints" not in caplog.text
    make_trainer(tmp_path, save_strategy="no", eval_strategy="no", load_best_model_at_end=False).train()
    assert "already has checkpoints" not in caplog.text
    make_trainer(tmp_path).train()
    assert f"{tmp_path} already has checkpoints, up to checkpoint-9" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="optim"):
        make_trainer(tmp_path, optim="absent").train()
    assert not caplog.text


def test_best_model_without_its_optimizer_is_loaded(tmp_path):
    """As left by callbacks that delete what they do not need."""
    thrifty = OnSave(lambda folder: os.remove(folder / "optimizer.pt"))
    trainer = train_to_end(make_trainer(tmp_path, callbacks=[thrifty], learning_rate=0.5, **BEST))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_linked_checkpoints_and_other_manifests_are_left_intact(tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            Path(output_dir, "manifest.json").write_text("mine")

    checkpoint = tmp_path / "out" / "checkpoint-9"
    make_trainer(tmp_path / "out", trainer_class=Own, save_total_limit=1).train()
    assert get_last_checkpoint(str(tmp_path / "out")) == str(checkpoint)
    shutil.move(checkpoint, tmp_path / "elsewhere")
    checkpoint.symlink_to(tmp_path / "elsewhere")
    CheckpointFolder(checkpoint).remove()
    assert names_in(tmp_path / "out") == []
    assert (tmp_path / "elsewhere" / "trainer_state.json").is_file()


def test_parent_of_the_folder_in_save_is_the_output_folder(tmp_path):
    """ms-swift copies a file from there, and reads the step from the folder's name."""
    seen = []

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            shutil.copy(Path(output_dir).parent / "args.json", output_dir)
            seen.append([Path(output_dir).name.split("-")[part] for part in (1, -1)])

    (tmp_path / "args.json").write_text("{}")
    make_trainer(tmp_path, trainer_class=Own).train()
    assert seen == [["3", "3"], ["6", "6"], ["9", "9"]]
    assert len(list(tmp_path.glob("checkpoint-*/args.json"))) == 3
    assert names_in(tmp_path) == ["args.json", "checkpoint-3", "checkpoint-6", "checkpoint-9"]


@pytest.fixture
def make_disk(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(size):
            disk = Disk(tmp_path / "disk", size)
            stack.callback(disk.remove)
            if not disk.mounted:
                pytest.skip("this process may not mount a file system")
            return disk

        yield make


class Fills(TrainerCallback):
    def __init__(self, disk, saved, mended=None):
        self.disk, self.saved, self.mended = disk, saved, mended

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.saved:
            self.disk.fill()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.mended:
            self.trainer._hftrainer.checkpoint_writer.wait()
            self.disk.filler.unlink()


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_skips_a_checkpoint_and_training_continues(caplog, background, make_disk):
    disk = make_disk("200k")
    fills = Fills(disk, 3, 8)
    fills.trainer = make_trainer(disk.folder, callbacks=[fills], lightning_config={"async_checkpoint": background})
    assert fills.trainer.train().global_step == 9
    assert names_in(disk.folder) == ["checkpoint-3", "checkpoint-9"]
    assert "checkpoint-6 could not be written (No space left on device)" in caplog.text
    assert "Training continues" in caplog.text
    assert get_last_checkpoint(str(disk.folder)) == str(disk.folder / "checkpoint-9")


def test_full_disk_at_the_end_keeps_the_best_and_the_newest(make_disk):
    """Normally only the best is kept, but here the final state could not be saved."""
    disk = make_disk("500k")
    settings = {**BEST, "greater_is_better": True, "save_total_limit": 1, "learning_rate": 5e-5}
    trainer = train_to_end(make_trainer(disk.folder, callbacks=[Fills(disk, 6)], **settings))
    disk.filler.unlink()
    assert trainer.state.best_global_step == 3
    assert names_in(disk.folder) == ["checkpoint-3", "checkpoint-6"]
    train_to_end(make_trainer(disk.folder, **settings), "auto")
    assert names_in(disk.folder) == ["checkpoint-3"]


@pytest.fixture
def limit_files():
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit()
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["no folder", "limit"])
def test_lost_folder_or_quota_skips_a_checkpoint(tmp_path, caplog, kind, limit_files):
    """The folder becomes a file, or files may not grow, as under a quota."""
    folder, away = tmp_path / "out", tmp_path / "away"

    def hide():
        folder.rename(away)
        folder.touch()

    def show():
        folder.unlink()
        away.rename(folder)

    acts = (hide, show) if kind == "no folder" else (lambda: limit_files(1000), limit_files)
    saved = []
    callbacks = [AtStep(4, acts[0]), AtStep(7, acts[1]), OnSave(lambda checkpoint: saved.append(checkpoint.name))]
    assert train_to_end(make_trainer(folder, callbacks=callbacks)).state.global_step == 9
    assert "checkpoint-6 could not be written" in caplog.text
    assert names_in(folder) == saved == ["checkpoint-3", "checkpoint-9"]
