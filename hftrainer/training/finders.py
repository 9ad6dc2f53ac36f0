"""What Lightning's finders of batch size and learning rate use of a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hftrainer.training.losses import LoggedMetrics
from hftrainer.training.steps import TrainingSteps

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.run import Run


class Tuning:
    """A Trainer's data, optimizer and loss, for trial steps outside a run.

    Args:
        trainer: the Trainer.
        run: its run.
        steps: computes the losses.

    Attributes:
        batch_size: initial number of samples in a micro-batch of one process.
        learning_rate: the learning rate of the arguments.
        max_grad_norm: the norm to which gradients are clipped; 0 for no clipping.
    """

    def __init__(self, trainer: Trainer, run: Run, steps: TrainingSteps) -> None:
        self.trainer = trainer
        self.run = run
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
