"""At which steps a run writes checkpoints, what is in them, which stay, and what is due once one is announced."""

import pytest

from hftrainer.checkpointing.inspection import inspect_checkpoint
from tests.support.checkpoints import OnSave, make_trainer


def saved_steps(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"save_steps": 4}, [4, 8, 9]),  # the last step is saved too
        ({"save_steps": 0.5}, [5, 9]),  # a share of the nine steps
        ({"save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}, [10, 20]),
        ({"save_strategy": "no"}, []),
        ({"save_total_limit": 2}, [6, 9]),
    ],
)
def test_steps_with_a_checkpoint(tmp_path, settings, steps):
    make_trainer(tmp_path, **settings).train()
    assert saved_steps(tmp_path) == steps


def test_run_that_is_complete_deletes_what_a_kill_has_left(tmp_path):
    """It was killed when it had written its last checkpoint, and before it had deleted the oldest."""
    make_trainer(tmp_path).train()
    assert saved_steps(tmp_path) == [3, 6, 9]
    make_trainer(tmp_path, save_total_limit=2).train(resume_from_checkpoint=True)
    assert saved_steps(tmp_path) == [6, 9]


def test_best_checkpoint_outlives_newer_ones(tmp_path):
    values = iter([3.0, 1.0, 2.0])
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_total_limit": 2}
    measured = {"metric_for_best_model": "value", "trainer": {"compute_metrics": lambda _: {"value": next(values)}}}
    trainer = make_trainer(tmp_path, **evaluated, **measured)
    trainer.train()
    assert saved_steps(tmp_path) == [3, 9]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(("limit", "has_failed", "kept"), [(1, False, "best"), (1, True, None), (2, False, None)])
def test_best_checkpoint_is_the_only_one_unless_the_last_save_failed(tmp_path, limit, has_failed, kept):
    trainer = make_trainer(tmp_path, save_total_limit=limit)
    trainer.state.best_model_checkpoint = "best"
    trainer._hftrainer.checkpoint_writer.has_failed = has_failed
    assert trainer._hftrainer.checkpoint_saver.only_checkpoint() == kept


@pytest.mark.parametrize("only_model", [False, True])
def test_checkpoint_is_complete_when_it_is_announced(tmp_path, only_model):
    found = []
    note = OnSave(lambda folder: found.append((folder, inspect_checkpoint(str(folder)).relative_skip_reason)))
    make_trainer(tmp_path, callbacks=[note], save_only_model=only_model).train()
    assert found == [(tmp_path / f"checkpoint-{step}", None) for step in (3, 6, 9)]
    files = {path.name for path in (tmp_path / "checkpoint-9").iterdir()}
    assert "model.safetensors" in files
    for_resuming = {"optimizer.pt", "progress.pt", "rng_state.pth", "scheduler.pt"}
    assert files & for_resuming == (set() if only_model else for_resuming)


def test_request_made_while_a_checkpoint_is_written_is_kept(tmp_path, monkeypatch):
    trainer, announcements = make_trainer(tmp_path), []
    parts = trainer._hftrainer
    monkeypatch.setattr(parts.checkpoint_writer, "call_when_complete", announcements.append)
    parts.checkpoint_saver.call_on_save()
    trainer.control.should_save = True
    announcements.pop()()
    assert trainer.control.should_save


@pytest.mark.parametrize(("saved_step", "has_failed", "saves"), [(2, False, True), (3, False, False), (3, True, True)])
def test_step_is_saved_unless_its_checkpoint_exists(tmp_path, monkeypatch, saved_step, has_failed, saves):
    trainer, saved = make_trainer(tmp_path), []
    parts = trainer._hftrainer
    trainer.state.global_step, parts.run.attempt.last_saved_step = 3, saved_step
    parts.checkpoint_writer.has_failed = has_failed
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: saved.append(trainer.state.global_step))
    parts.checkpoint_saver.ensure_saved()
    assert saved == ([3] if saves else [])
