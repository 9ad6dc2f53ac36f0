"""Trial steps before training, from which Lightning's finders suggest a batch size and a learning rate."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hftrainer.base.messages import count_of
from hftrainer.base.part import Part, temporary_attributes
from hftrainer.optimizers.optimizer_setup import call_create_scheduler
from hftrainer.training.steps.sums import LoggedMetrics

logger = logging.getLogger(__name__)


class LightningFinders(Part):
    """Runs Lightning's finders before training, and applies what they find."""

    def apply_batch_size_finder(self) -> None:
        """Train with the size that the `BatchSizeFinder` among the callbacks finds, if any."""
        optimizer = self.trainer.optimizer
        batch_size = self.parts.engine.search_batch_size(FinderSteps(self.parts), self.trainer.model)
        # Discard the optimizer of the trial steps.
        self.trainer.optimizer = optimizer
        if batch_size is not None:
            self.run.train_batch_size = batch_size
            logger.info("BatchSizeFinder: training with %s in a batch.", count_of(batch_size, "samples"))

    def apply_learning_rate_finder(self, max_steps: int) -> None:
        """Train with the rate that the `LearningRateFinder` among the callbacks suggests, if any.

        Args:
            max_steps: optimizer steps of the run.
        """
        learning_rate = self.parts.engine.search_learning_rate(FinderSteps(self.parts), self.trainer.model)
        if learning_rate is None:
            return
        logger.info("LearningRateFinder: %g replaces learning_rate=%g.", learning_rate, self.trainer.args.learning_rate)
        for group in self.parts.require_optimizer().param_groups:
            group["lr"] = group["initial_lr"] = learning_rate
        if self.run.has_created_scheduler:
            self.trainer.lr_scheduler = None
            call_create_scheduler(self.trainer, max_steps)
        else:
            self.trainer.lr_scheduler.base_lrs = [learning_rate for _ in self.trainer.lr_scheduler.base_lrs]


class FinderSteps(Part):
    """A Trainer's data, optimizer and loss, for the trial steps of Lightning's finders."""

    def make_loader(self, batch_size: int) -> Any:
        """The training data in batches of `batch_size` samples."""
        with temporary_attributes(self.run, train_batch_size=batch_size):
            return self.trainer.get_train_dataloader()

    def loss(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """The loss of one batch, which makes up a complete optimizer step."""
        self.run.current_gradient_accumulation_steps = 1
        items = self.trainer._get_num_items_in_batch([inputs], self.trainer.args.device)
        loss = self.parts.loss_computer.micro_batch_loss(model, inputs, items)
        self.run.attempt.logged_metrics = LoggedMetrics()
        return loss
