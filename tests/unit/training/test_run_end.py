"""What an interrupted run says that it has saved."""

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
