"""The sum of the losses; `tests/support/fake_npu.py` compares that of a device, which is not waited for."""

import pytest
import torch

from hftrainer import Trainer
from hftrainer.training.run import Run
from hftrainer.training.sums import LossAccumulator
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
