"""Runs `LearningRateFinder` and `BatchSizeFinder` before training, and keeps only their result.

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
    from hftrainer.training.lightning_finders import FinderSteps


class _FinderModule(pl.LightningModule):
    """The module for Lightning's finders, with the attributes that they change between trial steps."""

    def __init__(self, model: torch.nn.Module, steps: FinderSteps, size_name: str, rate_name: str) -> None:
        super().__init__()
        self.model = model
        self.steps = steps
        self._size_name = size_name
        setattr(self, size_name, steps.run.train_batch_size)
        setattr(self, rate_name, steps.trainer.args.learning_rate)

    def train_dataloader(self) -> Any:
        """The Trainer's loader, with the batch size to try."""
        return self.steps.make_loader(getattr(self, self._size_name))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer, created if it does not exist yet."""
        return self.steps.trainer.create_optimizer()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The Trainer's loss."""
        return self.steps.loss(self.model, batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Run forward and backward, which Lightning passes as a closure, then clip and step."""
        optimizer_closure()
        self.trainer.precision_plugin.unscale_gradients(optimizer.optimizer)
        self.clip_gradients(optimizer.optimizer, self.trainer.gradient_clip_val)
        optimizer.step()


_lightning_logger = logging.getLogger("lightning.pytorch")
#: Builds a `lightning.Trainer` from the plan; keyword arguments override the plan.
TrainerFactory = Callable[..., pl.Trainer]


def search_batch_size(
    make_pl_trainer: TrainerFactory, finder: BatchSizeFinder, steps: FinderSteps, model: torch.nn.Module
) -> int:
    """Size in samples of the largest batch that fits into memory, found by `finder`."""
    argument = finder._batch_arg_name
    finder_module = _FinderModule(model, steps, argument, "learning_rate")
    _run_search(make_pl_trainer, finder, finder_module)
    return int(getattr(finder_module, argument))


def search_learning_rate(
    make_pl_trainer: TrainerFactory, finder: LearningRateFinder, steps: FinderSteps, model: torch.nn.Module
) -> float | None:
    """The learning rate that `finder` suggests; None if it finds none, or with `update_attr=False`.

    The curve is in `finder.optimal_lr` afterwards.
    """
    # Without a name, the finder would choose one.
    finder_module = _FinderModule(model, steps, "batch_size", finder._attr_name or "learning_rate")
    _run_search(make_pl_trainer, finder, finder_module)
    optimal_lr = finder.optimal_lr
    return optimal_lr.suggestion() if optimal_lr is not None and finder._update_attr else None


def _run_search(
    make_pl_trainer: TrainerFactory, finder: BatchSizeFinder | LearningRateFinder, finder_module: _FinderModule
) -> None:
    """Run `fit` until the finder is done, and restore the random states. Lightning restores model and optimizer."""
    # With this flag, Lightning's Tuner skips training after the search.
    finder._early_exit = True
    with isolate_rng(), quiet_lightning(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
        max_norm = finder_module.steps.trainer.args.max_grad_norm or None
        pl_trainer = make_pl_trainer(max_epochs=-1, callbacks=[finder], gradient_clip_val=max_norm)
        level = _lightning_logger.level
        # The Trainer logs the result.
        _lightning_logger.setLevel(logging.WARNING)
        try:
            pl_trainer.fit(finder_module)
        finally:
            _lightning_logger.setLevel(level)
