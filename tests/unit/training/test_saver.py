"""When a checkpoint is written again, and what is due once it is announced."""

import pytest

from tests.support.checkpoints import make_trainer


def test_request_made_while_a_checkpoint_is_written_is_kept(tmp_path, monkeypatch):
    trainer, announcements = make_trainer(tmp_path), []
    parts = trainer._hftrainer
    monkeypatch.setattr(parts.checkpoint_writer, "call_when_complete", announcements.append)
    parts.saver.call_on_save()
    trainer.control.should_save = True
    announcements.pop()()
    assert trainer.control.should_save


@pytest.mark.parametrize(("saved_step", "has_failed", "saves"), [(2, False, True), (3, False, False), (3, True, True)])
def test_step_is_saved_unless_its_checkpoint_exists(tmp_path, monkeypatch, saved_step, has_failed, saves):
    trainer, saved = make_trainer(tmp_path), []
    parts = trainer._hftrainer
    trainer.state.global_step, parts.run.last_saved_step = 3, saved_step
    parts.checkpoint_writer.has_failed = has_failed
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: saved.append(trainer.state.global_step))
    parts.saver.save_if_needed(None)
    assert saved == ([3] if saves else [])
