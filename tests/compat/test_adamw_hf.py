"""`optim="adamw_hf"` steps as the AdamW of transformers 4.48 does, to the bit; newer releases have it no more."""

import importlib

import pytest
import torch

from hftrainer.optimizers.adamw_hf import AdamW

theirs = getattr(importlib.import_module("transformers.optimization"), "AdamW", None)


@pytest.mark.skipif(theirs is None, reason="this release of transformers has no AdamW of its own")
@pytest.mark.parametrize("how", [{}, {"weight_decay": 0.1, "eps": 1e-4}, {"correct_bias": False, "betas": (0.8, 0.9)}])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adamw_hf_steps_are_those_of_transformers_4_48(how):
    weights = []
    for kind in (AdamW, theirs):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimizer = kind(layer.parameters(), lr=0.05, **how)
        for _ in range(6):
            optimizer.zero_grad()
            layer(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in layer.parameters()])
    assert all(torch.equal(ours, other) for ours, other in zip(*weights, strict=True))
