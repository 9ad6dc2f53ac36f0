"""Arguments and optimizer settings that do not match a checkpoint are named; see also tests/parity/test_resume.py."""

import contextlib

import pytest
import torch

from hftrainer import Trainer, TrainerState, TrainingArguments
from hftrainer.checkpointing.file_checks import check_optimizer_state
from hftrainer.checkpointing.resume import warn_about_changed_arguments
from tests.support.sharded_checkpoints import make_stepped
from tests.support.small_models import make_plain, plain_data


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


def test_checkpoint_of_another_shape_offers_a_new_start(make_args):
    Trainer(model := make_plain(), args := make_args(save_strategy="steps"), train_dataset=plain_data()).train()
    model.layers[4] = torch.nn.Linear(16, 5)
    shapes = r"\(layers.4.weight is \[3, 16\] in it and \[5, 16\] in yours; layers.4.bias is .*\)"
    with pytest.raises(RuntimeError, match=f"is of another model {shapes}: .* or start without resume_from_checkpoint"):
        Trainer(model, args, train_dataset=plain_data()).train(resume_from_checkpoint=True)


def test_complete_run_does_not_warn_of_other_batches(make_args, caplog):
    """It reads no data."""
    for size in (4, 2):
        args = make_args(save_strategy="steps", save_steps=1, max_steps=1, per_device_train_batch_size=size)
        Trainer(make_plain(), args, train_dataset=plain_data()).train(resume_from_checkpoint=size == 2)
    assert "per_device_train_batch_size=2, was 4" not in caplog.text
