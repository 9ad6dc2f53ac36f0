"""A small model and data for experiments: `from hftrainer.demo import model, train, valid`.

Each sample has 8 random numbers in `x`; its label in `labels` is the index of the largest of the first three.
"""

from __future__ import annotations

import torch
from torch import nn


class Classifier(nn.Module):
    """Two linear layers; returns `{"loss": ..., "logits": ...}`, or only the logits without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Classify `x` of shape `(batch, 8)`; `labels` are class indices of shape `(batch,)`, logits `(batch, 3)`."""
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model() -> Classifier:
    """Return a model with the same initial weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier()


def make_data(count: int) -> list[dict[str, torch.Tensor]]:
    """Return the same `count` samples each time."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


model = make_model()
train = make_data(24)
valid = train[:8]
