"""Prepares model, optimizer and schedule for a run or an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from hftrainer.compat import peers
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.training.loader_factory import LoaderFactory

if TYPE_CHECKING:
    from hftrainer.training.components import Components


class Preparation:
    """Lets the strategy prepare the model, then the optimizer.

    Args:
        components: the parts of the Trainer.
        loaders: counts the model's operations before it is sharded.
    """

    def __init__(self, components: Components, loaders: LoaderFactory) -> None:
        self.components = components
        self.trainer, self.run = components.trainer, components.run
        self.loaders = loaders

    def for_training(self, max_steps: int, folder: str | None) -> nn.Module:
        """Prepare the model, and make optimizer and schedule for it; returns the model to train.

        Args:
            max_steps: optimizer steps of the run.
            folder: the checkpoint that the run resumes from, if any.
        """
        trainer, strategy = self.trainer, self.components.strategy
        if self.run.made_scheduler:  # its length is that of the previous call
            trainer.lr_scheduler = None
            self.run.made_scheduler = False

        def load() -> None:
            if folder is not None:
                trainer._load_from_checkpoint(folder)

        self._prepare_model(lambda: strategy.prepare_model(trainer, load))
        freezes = self.components.engine.freeze_before_training(trainer.model)
        strategy.prepare_optimizer(trainer, max_steps, folder, makes_both=self._makes_both)
        if freezes and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes gradually (BackboneFinetuning) has frozen all trained parameters: with "
                "adapters, write a BaseFinetuning that freezes the layers you choose."
            )
        if freezes:  # Lightning adds unfrozen groups without weight_decay, so they get torch's default
            self.components.made_optimizer().defaults["weight_decay"] = trainer.args.weight_decay
        return trainer.model_wrapped

    def for_evaluation(self) -> None:
        """Shard the model if the arguments ask for it, and give all ranks the same buffers."""
        self._prepare_model(lambda: self.components.strategy.prepare_evaluation(self.trainer))

    def _prepare_model(self, prepare: Callable[[], None]) -> None:
        """Prepare the model; its operations are counted before it is sharded."""
        shards, loaders = self.components.strategy.shards, self.loaders
        per_token = loaders.flos_per_token_of(self.trainer.model) if shards else 0
        prepare()
        if shards:
            loaders.flos_per_token = (self.trainer.model, per_token)

    def check_accumulation(self, steps: int) -> None:
        """Refuse a new number of micro-batches per optimizer step where it cannot change in a run.

        Raises:
            InvalidArgument: the error names both.
        """
        strategy, planned = self.components.strategy, self.components.engine.plan.accumulate_grad_batches
        if strategy.fixes_accumulation and steps != planned:
            raise InvalidArgument(
                f"gradient_accumulation_steps was changed to {steps} in a run with {strategy.argument}, whose "
                f"configuration has {planned}: change it before the Trainer is made."
            )

    @property
    def _makes_both(self) -> bool:
        """Whether an override of `create_optimizer_and_scheduler` is called, as in v4.

        v5 calls the two others alone, so an override of one of them is written for that.
        """
        apart = self.components.policy.calls_create_scheduler
        others = apart and is_overridden(self.trainer, "create_optimizer", "create_scheduler")
        return not others and is_overridden(self.trainer, "create_optimizer_and_scheduler")

    def finds_unused_parameters(self) -> bool:
        """Whether DDP looks for parameters that a step has not used, unless an argument sets it."""
        model = self.trainer.model
        if not peers.is_pretrained(model):
            return True
        renamed = hasattr(model, "is_activation_checkpointing")  # in v5.23
        checkpoints = model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing
        return not (checkpoints or self.trainer.args.activation_checkpointing)
