"""The sums of losses and logged values. `tests/support/fake_npu.py` compares those of a device that is not awaited."""

import pytest
import torch

from hftrainer import Trainer
from hftrainer.training.run import Run
from hftrainer.training.sums import LoggedMetrics, LossAccumulator
from tests.support.tiny import make_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_are_summed_in_float32(make_args, dtype):
    """As transformers does, also losses of float64; a loss that is not finite counts as the mean so far."""
    trainer, run = Trainer(make_plain(), make_args(on_divergence="stop")), Run()
    trainer.state.global_step = 1
    losses = LossAccumulator(trainer, run)
    expected = torch.tensor(0.0)
    for loss in (1 / 3, 2 / 3, float("nan"), 0.1):
        loss = torch.tensor(loss, dtype=dtype)
        losses.add_loss(loss, {})
        expected += loss if loss.isfinite() else expected / 2
    assert run.loss_since_log.dtype is torch.float32
    assert torch.equal(run.loss_since_log, expected)


def test_logged_values_are_means_over_their_counts_or_else_over_the_steps():
    metrics = LoggedMetrics()
    for value in (1.0, 2.0):
        metrics.add("counted", value)
        metrics.add("uncounted", torch.tensor(value), count=0)
    metrics.add("once", 5.0)
    metrics.set({"last": 7.0})
    means = {"counted": 3 / 2, "uncounted": 3 / 4, "once": 5.0, "last": 7.0}
    assert metrics.pop(torch.tensor(8.0), 4) == (8.0, means)
    assert metrics.pop(torch.tensor(8.0), 4) == (8.0, {})
