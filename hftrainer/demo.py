"""A small model and data to try things with: `from hftrainer.demo import model, train, valid`.

Samples are 8 random numbers under `x`; `labels` says which of the first three is the largest.
"""

from __future__ import annotations

import torch
from torch import nn


class Classifier(nn.Module):
    """Two linear layers; returns `{"loss": ..., "logits": ...}`, and the logits alone without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Classify `x` (batch, 8); `labels` (batch) are class numbers. The logits are (batch, 3)."""
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model() -> Classifier:
    """Return the model with its first weights, which are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier()


def make_data(count: int) -> list[dict[str, torch.Tensor]]:
    """Return `count` samples, the same each time."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


model = make_model()
train = make_data(24)
valid = train[:8]
