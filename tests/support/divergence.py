"""Runs whose steps diverge at chosen samples."""

import json

import torch
from torch.utils.data import IterableDataset

from tests.support.checkpoints import make_trainer, train_to_end
from tests.support.small_models import make_plain, plain_data

SEQUENTIAL = {"train_sampling_strategy": "sequential", "save_steps": 2, "logging_steps": 1}
#: Optimizer steps that the data has.
STEPS = 36
SIZE = 2


class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Sensitive(torch.nn.Module):
    """A model whose loss, or only its gradient, diverges by the `ill` of its samples."""

    def __init__(self):
        super().__init__()
        self.plain = make_plain()

    def forward(self, x, labels, ill):
        loss = self.plain(x, labels)["loss"]
        return {"loss": _Explodes.apply(loss) if ill.max() > 1e30 else loss * (1 + ill.max())}


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


#: Kind of divergence → the value of `ill` that causes it.
FAULTS = {"nan loss": float("nan"), "infinite gradient": 1e31, "spike": 200.0}


def rows(count, bad=(), value=float("nan")):
    bad = set(bad)
    return [{**row, "ill": torch.tensor(value if index in bad else 0.0)} for index, row in enumerate(plain_data(count))]


def rows_without(windows, size):
    return [row for index, row in enumerate(rows(STEPS * size)) if index // size not in windows]


def fit(folder, data, resume=None, model=None, **settings):
    """Train a model with dropout on the samples in order; returns the Trainer."""
    settings = {**SEQUENTIAL, "per_device_train_batch_size": SIZE, **settings}
    torch.manual_seed(0)
    trainer_kwargs = {"model": model or Sensitive(), "train_dataset": data}
    return train_to_end(make_trainer(folder, trainer=trainer_kwargs, **settings), resume)


def entries(folder):
    return [json.loads(line) for line in (folder / "skipped_samples.jsonl").read_text().splitlines()]
