"""What trial steps before training need of the Trainer: those of Lightning's finders."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.compat.overrides import make_scheduler
from hftrainer.training.logged_metrics import LoggedMetrics

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer


logger = logging.getLogger(__name__)


def find_batch_size(trainer: Trainer) -> None:
    """Let a `BatchSizeFinder` among the callbacks look for the batch size."""
    given = trainer.optimizer
    found = trainer._hftrainer.engine.find_batch_size(Tuning(trainer), trainer.model)
    trainer.optimizer = given  # what the trial steps used was for them alone
    if found is not None:
        trainer._train_batch_size = found
        logger.info("BatchSizeFinder: training with %d samples in a batch.", found)


def find_learning_rate(trainer: Trainer, max_steps: int) -> None:
    """Let a `LearningRateFinder` among the callbacks look for the learning rate.

    Args:
        trainer: whose optimizer and schedule take it.
        max_steps: optimizer steps of the run.
    """
    found = trainer._hftrainer.engine.find_learning_rate(Tuning(trainer), trainer.model)
    if found is None:
        return
    logger.info("LearningRateFinder: %g takes the place of learning_rate=%g.", found, trainer.args.learning_rate)
    for group in trainer._hftrainer.run.made_optimizer().param_groups:
        group["lr"] = group["initial_lr"] = found
    if trainer._created_lr_scheduler:
        trainer.lr_scheduler = None
        make_scheduler(trainer, max_steps)
    else:
        trainer.lr_scheduler.base_lrs = [found for _ in trainer.lr_scheduler.base_lrs]


class Tuning:
    """A Trainer's data, optimizer and loss, for steps that are not part of a run.

    Attributes:
        batch_size: samples in a micro-batch of one process, to begin with.
        learning_rate: the learning rate of the arguments.
        max_grad_norm: what gradients are clipped to; 0 for not at all.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch_size = trainer._train_batch_size
        self.learning_rate = trainer.args.learning_rate
        self.max_grad_norm = trainer.args.max_grad_norm

    def loader(self, batch_size: int) -> Any:
        """The training data in batches of `batch_size` samples."""
        trainer, before = self._trainer, self._trainer._train_batch_size
        trainer._train_batch_size = batch_size
        try:
            return trainer.get_train_dataloader()
        finally:
            trainer._train_batch_size = before

    def optimizer(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer, made if there is none yet."""
        return self._trainer.create_optimizer()

    def loss(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """The loss of one batch that is an optimizer step by itself."""
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = 1
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        loss = trainer._hftrainer.run.loss(model, inputs, items)
        trainer._hftrainer.logged_metrics = LoggedMetrics()
        return loss
