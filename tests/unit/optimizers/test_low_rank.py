"""Which layers GaLore and APOLLO project, and how a layer-wise optimizer steps within backward."""

import pytest
import torch
from torch import nn

from hftrainer.optimizers.low_rank import LayerWiseDummyOptimizer, find_target_weights

MODEL = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}), "head": nn.Linear(4, 4)})
ALL = {"mlp.up.weight", "head.weight"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [("all-linear", ALL), ("mlp.up", {"mlp.up.weight"}), (".*up", {"mlp.up.weight"}), (["up", "he"], ALL)],
)
def test_targets_are_names_patterns_or_parts_of_names(targets, expected):
    assert find_target_weights("galore_adamw", targets, MODEL) == expected


def test_layer_wise_optimizer_steps_in_backward_with_the_rate_of_the_schedule():
    model = nn.Linear(2, 1, bias=False)
    optimizers = {model.weight: torch.optim.SGD([model.weight], lr=9.0, momentum=0.5)}
    optimizer, before = LayerWiseDummyOptimizer(optimizers, lr=0.5), model.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.25  # as a schedule sets it
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.25)
    assert model.weight.grad is None
    optimizer.remove_hooks()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight, before - 0.25)
