"""Rotation deletes the oldest checkpoints of a run, and nothing else."""

import os

import pytest

from hftrainer import Trainer
from hftrainer.checkpointing.layout import save_time, sort_checkpoints
from hftrainer.checkpointing.run_checkpoints import rotate_checkpoints
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import make_trainer, train_to_end, truncate
from tests.support.jobs import names_in


def test_rotation_keeps_the_checkpoint_just_written(tmp_path):
    make_trainer(tmp_path).train()
    later = save_time(tmp_path / "checkpoint-9") + 60
    os.utime(tmp_path / "checkpoint-3" / "trainer_state.json", (later, later))  # somebody edited the older one
    rotate_checkpoints(str(tmp_path), 1, None, [str(tmp_path / "checkpoint-9")])
    assert "checkpoint-9" in names_in(tmp_path)


def test_rotation_keeps_the_last_intact_checkpoint(tmp_path):
    """The two newer ones are damaged."""
    make_trainer(tmp_path).train()
    for step in (6, 9):
        truncate(tmp_path / f"checkpoint-{step}" / "optimizer.pt")

    class Looks(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            assert get_last_checkpoint(str(tmp_path)) is not None

    rotate_checkpoints(str(tmp_path), 1, None)
    assert names_in(tmp_path) == ["checkpoint-3", "checkpoint-9"]
    train_to_end(make_trainer(tmp_path, trainer_class=Looks, save_total_limit=1), True)
    assert names_in(tmp_path) == ["checkpoint-9"]


def test_rotation_deletes_only_checkpoints_of_the_run(tmp_path):
    for name in ("checkpoint-1", "tmp-checkpoint", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    make_trainer(tmp_path, save_total_limit=1).train()
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-9", "checkpoint-best", "tmp-checkpoint"]


@pytest.mark.parametrize(("seconds", "steps"), [(60, [20, 3]), (0.5, [3, 20])])
def test_checkpoints_are_sorted_by_time_where_it_is_kept(tmp_path, seconds, steps):
    for step, time in ((20, 100.0), (3, 100.0 + seconds)):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.touch()
        os.utime(state, (time, time))
    assert sort_checkpoints(str(tmp_path)) == [str(tmp_path / f"checkpoint-{step}") for step in steps]
