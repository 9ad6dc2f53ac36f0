"""The folders of checkpoints: rotated, replaced, half copied, linked, changed by the user."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest

from hftrainer import Trainer, TrainerCallback
from hftrainer.checkpointing import staging
from hftrainer.checkpointing.folders import rotate_checkpoints
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import make_trainer
from tests.support.jobs import names


def test_rotation_keeps_what_was_just_written(tmp_path):
    make_trainer(tmp_path).train()
    os.utime(tmp_path / "checkpoint-3", (time.time() + 60,) * 2)  # somebody wrote into the older one
    rotate_checkpoints(str(tmp_path), 1, None, [str(tmp_path / "checkpoint-9")])
    assert "checkpoint-9" in names(tmp_path)


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("moment", range(4))
def test_interrupted_while_one_is_replaced(tmp_path, monkeypatch, renames, moment):
    """A second Ctrl-C between two renamings leaves one of the two checkpoints of the step in its place."""
    make_trainer(tmp_path, max_steps=3).train()
    left, original = [moment], Path.rename
    copy = shutil.copyfile

    def rename(self, target):
        if not renames:
            raise OSError(18, "Invalid cross-device link")
        if left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt
        left[0] -= 1
        return original(self, target)

    def copyfile(source, target):
        if not renames and left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt
        left[0] -= 1
        return copy(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with contextlib.suppress(KeyboardInterrupt):
        make_trainer(tmp_path, max_steps=3).train()
    monkeypatch.undo()
    staging.clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_half_copied_one_does_not_hide_the_whole(tmp_path):
    """Where folders cannot be renamed, a process may die with half of the target there."""
    make_trainer(tmp_path, max_steps=3).train()
    outer = tmp_path / "tmp-checkpoint-3"
    outer.mkdir()
    shutil.copytree(tmp_path / "checkpoint-3", outer / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    staging.clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory", "/vocab"), ConnectionError("hub")])
def test_errors_of_the_users_own_are_not_the_storages(tmp_path, error):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            raise error

    trainer = make_trainer(tmp_path)
    trainer.__class__ = Own
    with pytest.raises(type(error)):
        trainer.train()


def test_a_best_model_without_its_optimizer(tmp_path):
    """Callbacks that delete what they do not need keep the weights."""

    class Thrifty(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            os.remove(f"{args.output_dir}/checkpoint-{state.global_step}/optimizer.pt")

    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "learning_rate": 0.5}
    trainer = make_trainer(tmp_path, callbacks=[Thrifty()], **settings)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_links_and_foreign_manifests(tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            Path(output_dir, "manifest.json").write_text("mine")

    trainer = make_trainer(tmp_path / "out", save_total_limit=1)
    trainer.__class__ = Own
    trainer.train()
    assert get_last_checkpoint(str(tmp_path / "out")) == str(tmp_path / "out" / "checkpoint-9")
    shutil.move(tmp_path / "out" / "checkpoint-9", tmp_path / "elsewhere")
    (tmp_path / "out" / "checkpoint-9").symlink_to(tmp_path / "elsewhere")
    staging.remove(tmp_path / "out" / "checkpoint-9")
    assert names(tmp_path / "out") == []
    assert (tmp_path / "elsewhere" / "trainer_state.json").is_file()
