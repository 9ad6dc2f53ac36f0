"""Lightning's finders: searches for batch size and learning rate by trial steps before training."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hftrainer.compat.overrides import make_scheduler
from hftrainer.training.context import Room, TrainerContext
from hftrainer.training.losses import LoggedMetrics
from hftrainer.training.steps import TrainingSteps

logger = logging.getLogger(__name__)


class Finders(Room):
    """Lets Lightning's finders among the callbacks choose batch size and learning rate.

    Args:
        context: the shared parts of the Trainer.
        steps: computes the losses.
    """

    def __init__(self, context: TrainerContext, steps: TrainingSteps) -> None:
        super().__init__(context)
        self.steps = steps

    def find_batch_size(self) -> None:
        """Run a `BatchSizeFinder`, if there is one among the callbacks."""
        trainer = self.trainer
        given = trainer.optimizer
        found = self.context.engine.find_batch_size(Tuning(self.context, self.steps), trainer.model)
        trainer.optimizer = given  # the trial steps' optimizer is discarded
        if found is not None:
            self.run.train_batch_size = found
            logger.info("BatchSizeFinder: training with %d samples in a batch.", found)

    def find_learning_rate(self, max_steps: int) -> None:
        """Run a `LearningRateFinder`, if there is one among the callbacks.

        Args:
            max_steps: optimizer steps of the run.
        """
        trainer = self.trainer
        found = self.context.engine.find_learning_rate(Tuning(self.context, self.steps), trainer.model)
        if found is None:
            return
        logger.info("LearningRateFinder: %g replaces learning_rate=%g.", found, trainer.args.learning_rate)
        for group in self.context.made_optimizer().param_groups:
            group["lr"] = group["initial_lr"] = found
        if self.run.made_scheduler:
            trainer.lr_scheduler = None
            make_scheduler(trainer, max_steps)
        else:
            trainer.lr_scheduler.base_lrs = [found for _ in trainer.lr_scheduler.base_lrs]


class Tuning(Room):
    """A Trainer's data, optimizer and loss, for trial steps outside a run.

    Attributes:
        batch_size: initial number of samples in a micro-batch of one process.
        learning_rate: the learning rate of the arguments.
        max_grad_norm: the norm to which gradients are clipped; 0 for no clipping.
    """

    def __init__(self, context: TrainerContext, steps: TrainingSteps) -> None:
        super().__init__(context)
        self.steps = steps
        self.batch_size = self.run.train_batch_size
        self.learning_rate = self.trainer.args.learning_rate
        self.max_grad_norm = self.trainer.args.max_grad_norm

    def loader(self, batch_size: int) -> Any:
        """The training data in batches of `batch_size` samples."""
        before, self.run.train_batch_size = self.run.train_batch_size, batch_size
        try:
            return self.trainer.get_train_dataloader()
        finally:
            self.run.train_batch_size = before

    def optimizer(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer, made if there is none yet."""
        return self.trainer.create_optimizer()

    def loss(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """The loss of one batch that is a complete optimizer step."""
        self.run.accumulation = 1
        items = self.trainer._get_num_items_in_batch([inputs], self.trainer.args.device)
        loss = self.steps.loss(model, inputs, items)
        self.run.logged_metrics = LoggedMetrics()
        return loss
