"""`_maybe_log_save_evaluate` of another release gets the positional values that its release passes."""

import pytest

from hftrainer.compat.overrides import log_save_evaluate_arguments

NAMES = "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate".split()
WITHOUT_NORM = ["tr_loss", *NAMES[2:6]]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (lambda loss, model, trial, epoch: None, WITHOUT_NORM[:4]),
        (lambda loss, model, trial, epoch, ignored: None, WITHOUT_NORM),
        (lambda loss, norm, model, trial, epoch, ignored, start, rate: None, NAMES),
        (lambda *values: None, NAMES[:7]),
    ],
)
def test_values_are_those_of_the_release(method, expected):
    args, kwargs = log_save_evaluate_arguments(method, {name: name for name in NAMES})
    assert (args, kwargs) == (expected, {})
