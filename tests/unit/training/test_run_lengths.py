"""How long a run is, and where in the data its steps begin, by numbers alone."""

import pytest

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidArgument
from hftrainer.training.run_lengths import RunLengths, compute_lengths, position_at_step, read_lengths


@pytest.mark.parametrize(
    ("step", "skips", "position"),
    [
        # An epoch of five micro-batches has windows of 2, 2 and 1.
        (0, [], (0, 0)),
        (2, [], (0, 4)),
        (3, [], (1, 0)),
        (7, [], (2, 2)),
        # A skipped window is not a step.
        (0, [(0, 0)], (0, 2)),
        (1, [(0, 2)], (0, 4)),
        (1, [(0, 4)], (0, 2)),
        (2, [(0, 2)], (1, 0)),
        (1, [(1, 0)], (0, 2)),
        (3, [(1, 0)], (1, 2)),
    ],
)
def test_position_after_steps(step, skips, position):
    assert position_at_step(step, 5, lambda epoch: 2, skips) == position


def test_position_follows_another_accumulation_in_each_epoch():
    assert [position_at_step(step, 4, lambda epoch: [1, 2, 4][epoch]) for step in (3, 4, 5, 6)] == [
        *((0, 3), (1, 0), (1, 2), (2, 0))
    ]


def plan(tmp_path, micro_batches=5, examples=9, **settings):
    args = TrainingArguments(str(tmp_path), report_to="none", **settings)
    return compute_lengths(args, micro_batches, examples, 4, lambda epoch: 2, lambda micro, steps: -(-micro // steps))


@pytest.mark.parametrize(
    ("settings", "epochs", "steps", "samples"),
    [
        ({"num_train_epochs": 2}, 2, 6, 18),
        ({"num_train_epochs": 1.5}, 2, 5, 13.5),
        ({"max_steps": 4}, 2, 4, 16),
        ({"max_steps": 0}, 3, 0, 27),
    ],
)
def test_lengths_of_a_run(tmp_path, settings, epochs, steps, samples):
    assert plan(tmp_path, **settings) == RunLengths(epochs, 3, 9, samples, 4, 5, steps)


def test_data_without_a_length_needs_max_steps(tmp_path):
    with pytest.raises(InvalidArgument, match="max_steps"):
        plan(tmp_path, None, None)
    assert plan(tmp_path, None, None, max_steps=7)[1:] == (7, 28, 28, 4, 14, 7)


def test_lengths_of_an_override_are_read_in_the_order_of_each_release(tmp_path):
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, report_to="none")
    current = RunLengths(1, 3, 9, 9, 4, 5, 3)
    assert read_lengths(list(current), args, total_train_batch_size=4) == current
    # Until v5.2: (..., whether the epochs count, the loader's length, max_steps).
    assert read_lengths((1, 3, 9, 9, True, 5, 3), args, total_train_batch_size=4) == current
    assert read_lengths((1, 3, 9, 9, False, None, 3), args, total_train_batch_size=4).micro_batches_in_epoch == 6
    with pytest.raises(InvalidArgument, match="6 values"):
        read_lengths(current[:6], args, total_train_batch_size=4)
