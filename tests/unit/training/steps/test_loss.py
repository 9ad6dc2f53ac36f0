"""The loss of a micro-batch: in parts, and with smoothed labels."""

import pytest
import torch
from torch import nn

from hftrainer.trainer_pt_utils import LabelSmoother
from hftrainer.training.steps.loss import split_losses
from tests.support.losses import Returns, make_losses


def test_dict_of_losses_is_summed_and_logged_in_parts():
    """The loss for backward is 'loss', or else the sum. The parts are logged, divided as the loss."""
    assert split_losses(5) == (5, {})
    assert split_losses({"a": 1, "b": 2}) == (3, {"a": 1, "b": 2})
    losses, parts = make_losses(), {"a": torch.tensor(12.0), "b": torch.tensor(36.0), "none": None}
    assert losses.micro_batch_loss(Returns({**parts, "loss": torch.tensor(48.0)}), {}, None).item() == 48 / 4
    assert losses.run.attempt.logged_metrics.pop(torch.tensor(0.0), 1)[1] == {"a": 12 / 4, "b": 36 / 4}


@pytest.mark.parametrize(("release", "divisor"), [("5.20", 8), ("5.14", 3)])
def test_label_smoothing_divides_by_the_items(release, divisor):
    """The sum over the labels that count, by the items of the step; until v5.14 by those of the micro-batch."""
    logits, labels = torch.tensor([[[2.0, 1.0, 0.0]] * 4]), torch.tensor([[0, 1, 2, -100]])
    losses = make_losses(release, label_smoother=LabelSmoother(0.3), model_accepts_loss_kwargs=True)
    loss, _ = losses.loss_and_outputs(Returns({"loss": None, "logits": logits}), {"labels": labels}, 8)
    entropy = nn.functional.cross_entropy(logits[0], labels[0], reduction="sum", label_smoothing=0.3)
    torch.testing.assert_close(loss, entropy / divisor)
