"""The sum of the losses; `tests/support/fake_npu.py` compares that of a device, which is not waited for."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer.training.sums import LossAccumulator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_are_summed_in_float32(dtype):
    """As transformers does, also losses of float64; a loss that is not finite counts as the mean so far."""
    args = SimpleNamespace(device=torch.device("cpu"), logging_nan_inf_filter=True, on_divergence="stop")
    state, run = SimpleNamespace(global_step=1), SimpleNamespace(last_logged=0)
    losses = LossAccumulator(SimpleNamespace(args=args, state=state), run)
    expected = torch.tensor(0.0)
    for loss in (1 / 3, 2 / 3, float("nan"), 0.1):
        loss = torch.tensor(loss, dtype=dtype)
        losses.add_loss(loss, {})
        expected += loss if loss.isfinite() else expected / 2
    assert run.loss_since_log.dtype is torch.float32
    assert torch.equal(run.loss_since_log, expected)
