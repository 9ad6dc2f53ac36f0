"""Runs `LearningRateFinder` and `BatchSizeFinder` before training; only their result is kept.

The names of the attributes that they change, and the flag that ends a search without training, are private.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.seed import isolate_rng

from hftrainer_lightning.private_api.trainer import quiet_lightning

if TYPE_CHECKING:
    from hftrainer.training.planner import TrialSteps


class _FinderModule(pl.LightningModule):
    """The module for Lightning's finders, with the attributes that they change between trial steps."""

    def __init__(self, model: torch.nn.Module, hooks: TrialSteps, size_name: str, rate_name: str) -> None:
        super().__init__()
        self.model = model
        self._hooks = hooks
        self._size_name = size_name
        setattr(self, size_name, hooks.batch_size)
        setattr(self, rate_name, hooks.learning_rate)

    def train_dataloader(self) -> Any:
        """The Trainer's loader, with the batch size to try."""
        return self._hooks.loader(getattr(self, self._size_name))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer."""
        return self._hooks.optimizer()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The Trainer's loss."""
        return self._hooks.loss(self.model, batch)


_LIGHTNING = logging.getLogger("lightning.pytorch")
#: Builds a `lightning.Trainer` from the plan; keywords take precedence over it.
Build = Callable[..., pl.Trainer]


def find_batch_size(build: Build, finder: BatchSizeFinder, hooks: TrialSteps, model: torch.nn.Module) -> int:
    """The largest batch that fits into memory, in samples, found by `finder`."""
    name = finder._batch_arg_name
    trial = _FinderModule(model, hooks, name, "learning_rate")
    _run(build, finder, hooks, trial)
    return int(getattr(trial, name))


def find_learning_rate(
    build: Build, finder: LearningRateFinder, hooks: TrialSteps, model: torch.nn.Module
) -> float | None:
    """The learning rate that `finder` suggests; None when it finds none, or with `update_attr=False`.

    The curve is in `finder.optimal_lr` afterwards.
    """
    # Without a name, the finder would choose one itself.
    _run(build, finder, hooks, _FinderModule(model, hooks, "batch_size", finder._attr_name or "learning_rate"))
    found = finder.optimal_lr
    return found.suggestion() if found is not None and finder._update_attr else None


def _run(
    build: Build, finder: BatchSizeFinder | LearningRateFinder, hooks: TrialSteps, trial: pl.LightningModule
) -> None:
    """Fit until the finder is done. Lightning restores model and optimizer; this restores the random states."""
    finder._early_exit = True  # makes Lightning's Tuner skip training after the search
    with isolate_rng(), quiet_lightning(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
        trainer = build(max_epochs=-1, callbacks=[finder], gradient_clip_val=hooks.max_grad_norm or None)
        level = _LIGHTNING.level
        _LIGHTNING.setLevel(logging.WARNING)  # the Trainer logs the result
        try:
            trainer.fit(trial)
        finally:
            _LIGHTNING.setLevel(level)
