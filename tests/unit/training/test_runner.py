"""What an interrupted run says that it has saved, and which checkpoints a run keeps at its end."""

import pytest

from hftrainer.releases import followed
from tests.support.checkpoints import AtStep, make_trainer


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"save_strategy": "no"}, ["[hftrainer] Stopped at step 2 of 9; nothing was saved (save_strategy='no')."]),
        ({"save_on_interrupt": False}, []),
        ({}, ["[hftrainer] No checkpoint was saved."]),
    ],
)
def test_interrupted_run_says_what_is_saved(tmp_path, settings, said):
    with pytest.raises(KeyboardInterrupt) as caught:
        make_trainer(tmp_path, callbacks=[AtStep(2, interrupt)], **settings).train()
    assert getattr(caught.value, "__notes__", []) == said


@pytest.mark.parametrize(("limit", "has_failed", "kept"), [(1, False, "best"), (1, True, None), (2, False, None)])
def test_best_checkpoint_is_the_only_one_unless_the_last_save_failed(tmp_path, limit, has_failed, kept):
    trainer = make_trainer(tmp_path, save_total_limit=limit)
    trainer.state.best_model_checkpoint = "best"
    trainer._hftrainer.checkpoint_writer.has_failed = has_failed
    assert trainer._hftrainer.checkpoint_saver.only_checkpoint() == kept


@pytest.mark.parametrize(("release", "order"), [("4.48", ["values", "model"]), ("5.20", ["model", "values"])])
def test_call_is_prepared_in_the_order_of_the_release(tmp_path, monkeypatch, release, order):
    """The saves of an earlier call end first; a checkpoint replaces the weights last."""
    trainer = make_trainer(tmp_path)
    parts, calls = trainer._hftrainer, []
    monkeypatch.setattr(parts, "policy", followed.from_text(release))
    noted = {
        (parts.checkpoint_writer, "close_ignoring_errors"): "saves",
        (parts.checkpoint_restorer, "find_resume_folder"): "folder",
        (parts.model_setup, "remake_model"): "model",
        (trainer, "_hp_search_setup"): "values",
        (parts.trainer_setup, "apply_changed_arguments"): "arguments",
        (parts.checkpoint_restorer, "load_weights_and_batch_size"): "weights",
    }
    for (owner, name), word in noted.items():
        monkeypatch.setattr(owner, name, lambda *_, word=word: calls.append(word) or word)
    parts.training_runner.prepare_train(True, None)
    assert parts.run.resume_folder == "folder"
    assert calls == ["saves", "folder", *order, "arguments", "weights"]
