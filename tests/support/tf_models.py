"""A model and data for TFTrainer."""

import numpy as np
import torch
from torch import nn

from hftrainer import TFTrainer


class DenseModel(nn.Module):
    """A model without random numbers; its loss is a mean, as in transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(4, 6)
        self.LayerNorm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        logits = self.out(self.LayerNorm(torch.tanh(self.dense(x))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count=20, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=4).astype("float32"), "label": int(rng.integers(3))} for _ in range(count)]


class RecordingTrainer(TFTrainer):
    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def log(self, logs):
        super().log(logs)
        self.seen.append(dict(logs))
