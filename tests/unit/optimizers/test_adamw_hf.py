"""`adamw_hf` makes the step of transformers' former AdamW; tests/compat/test_adamw_hf.py compares both."""

import torch

from hftrainer.optimizers.adamw_hf import AdamW


def test_adamw_hf_makes_the_step_computed_by_hand():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([0.5, 0.1])
    AdamW([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.5).step()
    moment, second = 0.1 * torch.tensor([0.5, 0.1]), 0.01 * torch.tensor([0.25, 0.01])
    size = 0.1 * (1 - 0.99) ** 0.5 / (1 - 0.9)
    stepped = torch.tensor([1.0, -2.0]) - size * moment / (second.sqrt() + 1e-3)
    assert torch.allclose(weight, stepped * (1 - 0.1 * 0.5), atol=1e-6)
