"""What an interrupted run says that it has saved, and which checkpoints a run keeps at its end."""

import pytest

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
    assert trainer._hftrainer.saver.only_checkpoint() == kept
