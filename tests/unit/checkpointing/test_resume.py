"""Arguments and optimizer settings that do not match a checkpoint are named; see also tests/parity/test_resume.py."""

import contextlib

import pytest

from hftrainer import TrainerState, TrainingArguments
from hftrainer.checkpointing.file_checks import check_optimizer_state
from hftrainer.checkpointing.resume import warn_about_changed_arguments
from tests.support.sharded_checkpoints import make_stepped


@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
@pytest.mark.parametrize(
    ("now", "warns"), [(2, False), (3, True), (1, True), (0.5, False)], ids=["same", "other", "every step", "ratio"]
)
def test_changed_number_of_steps_warns(tmp_path, caplog, name, now, warns):
    """A ratio cannot be compared: the state has the number of steps that came of it."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **{name: now})
    warn_about_changed_arguments(args, TrainerState(**{name: 2}))
    assert (f"{name}={now}, was 2" in caplog.text) == warns


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("amsgrad", None, "amsgrad is None"), ("maximize", None, "maximize is None"), ("fused", None, None)],
)
def test_optimizer_setting_of_none_is_refused(name, value, error):
    _, optimizer = make_stepped()
    state = optimizer.state_dict()
    state["param_groups"][0][name] = value
    with pytest.raises(TypeError, match=error) if error else contextlib.nullcontext():
        check_optimizer_state(state, optimizer)
