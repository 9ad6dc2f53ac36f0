"""Where a resumed run continues in its data."""

import dataclasses

import pytest

from hftrainer.checkpointing.run_progress import RunProgress

UNUSED = dict.fromkeys(each.name for each in dataclasses.fields(RunProgress))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"position": 4}, (1, 4)),
        ({"position": 5}, (2, 0)),
        ({"position": 4, "epoch_left": True}, (2, 0)),
        ({"position": 4, "data": {"exhausted": True}}, (2, 0)),
        ({"position": 4, "data": None}, None),
        ({"position": 0, "epoch": None}, None),
    ],
)
def test_run_resumes_in_its_epoch_or_at_the_next(state, place):
    progress = RunProgress(**{**UNUSED, "epoch": 1, "data": {"exhausted": False}, **state})
    assert progress.resume_position(5) == place


def test_warning_says_what_keeps_the_size_of_a_step(caplog):
    settings = {"world_size": 1, "elastic": False}
    RunProgress(**{**UNUSED, "settings": settings}).adapt_to({**settings, "world_size": 2}, skips_data=True)
    assert "a per_device_train_batch_size that fits, keeps the size of a step." in caplog.text
