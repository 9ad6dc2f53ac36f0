"""What `tests/parity/test_schedules.py` cannot compare: warnings, and the settings that a trial keeps."""

import pytest
import torch

from hftrainer.optimizers.schedules import get_constant_schedule, get_scheduler, keep_argument_settings


def make_optimizer(**settings):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **settings)


@pytest.mark.parametrize(("steps", "warns"), [(6, True), (5, False)])
def test_warmup_longer_than_the_run_warns(caplog, steps, warns):
    get_scheduler("linear", make_optimizer(), num_warmup_steps=steps, num_training_steps=5)
    assert ("the learning rate does not reach its peak" in caplog.text) is warns


def test_trial_keeps_its_rate_at_the_step_of_a_checkpoint():
    optimizer = make_optimizer(weight_decay=0.3)
    schedule = get_constant_schedule(optimizer)
    with keep_argument_settings(optimizer, schedule):
        optimizer.param_groups[0] |= {"initial_lr": 0.4, "lr": 0.2, "weight_decay": 0.0}
    group = optimizer.param_groups[0]
    assert (group["initial_lr"], group["lr"], group["weight_decay"]) == (0.1, 0.05, 0.3)
    assert (schedule.base_lrs, schedule.get_last_lr()) == ([0.1], [0.05])
