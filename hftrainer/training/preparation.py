"""Prepares model, optimizer and schedule for a run or an evaluation."""

from __future__ import annotations

from torch import nn

from hftrainer.compat import peers
from hftrainer.compat.overrides import make_scheduler
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.training.context import Room, TrainerContext
from hftrainer.training.loader_factory import LoaderFactory


class Preparation(Room):
    """Shards or wraps the model, then makes the optimizer; `training.deepspeed` has another order, in a subclass.

    Args:
        context: the shared parts of the Trainer.
        loaders: counts the model's operations before it is sharded.
    """

    def __init__(self, context: TrainerContext, loaders: LoaderFactory) -> None:
        super().__init__(context)
        self.loaders = loaders

    def for_training(self, max_steps: int, folder: str | None) -> nn.Module:
        """Prepare the model, and make optimizer and schedule for it; returns the model to train.

        Args:
            max_steps: optimizer steps of the run.
            folder: the checkpoint that the run resumes from, if any.
        """
        if self.run.made_scheduler:  # its length is that of the previous call
            self.trainer.lr_scheduler = None
            self.run.made_scheduler = False
        return self._prepare(max_steps, folder)

    def _prepare(self, max_steps: int, folder: str | None) -> nn.Module:
        """Shard or wrap the model, then make optimizer and schedule; the arguments are those of `for_training`."""
        self._prepare_model(folder)
        self._prepare_optimizer(max_steps)
        if folder is not None:
            self.trainer._load_scaler(folder)
        return self.trainer.model_wrapped

    def for_evaluation(self) -> None:
        """Shard the model if the arguments ask for it, and give all ranks the same buffers."""
        self._prepare_model()
        self.context.states.share_buffers(self.trainer.model)

    def check_accumulation(self, steps: int) -> None:
        """Refuse a new number of micro-batches per optimizer step where it cannot change in a run.

        Raises:
            InvalidArgument: the error names both.
        """
        parallelism, planned = self.context.engine.parallelism, self.context.engine.plan.accumulate_grad_batches
        if parallelism.fixes_accumulation and steps != planned:
            raise InvalidArgument(
                f"gradient_accumulation_steps was changed to {steps} in a run with {parallelism.argument}, whose "
                f"configuration has {planned}: change it before the Trainer is made."
            )

    def _prepare_model(self, folder: str | None = None) -> None:
        """Shard the model, if the arguments ask for it, before the optimizer is made; then load the checkpoint."""
        trainer, context = self.trainer, self.context

        def shard() -> nn.Module:
            if not context.states.spread:
                return context.engine.parallelism.prepare(trainer.model)
            per_token = self.loaders.flos_per_token_of(trainer.model)  # counted before sharding
            trainer.model = trainer.model_wrapped = context.engine.parallelism.prepare(trainer.model)
            self.loaders.flos_per_token = (trainer.model, per_token)
            return trainer.model

        def load() -> None:
            if folder is not None:
                trainer._load_from_checkpoint(folder)

        context.states.prepare(trainer.model, shard, load)

    def _prepare_optimizer(self, max_steps: int) -> None:
        """Make the optimizer, let the accelerator prepare it with the model, then make the schedule."""
        trainer = self.trainer
        freezes = self.context.engine.freeze_before_training(trainer.model)
        makes_both = self._makes_both
        if makes_both:
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        else:
            trainer.create_optimizer()
        model = trainer._wrap_model(trainer.model_wrapped)
        if model is trainer.model:
            model, trainer.optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
        else:  # an override of _wrap_model has wrapped it
            trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        trainer.model_wrapped = model
        if freezes and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes gradually (BackboneFinetuning) has frozen all trained parameters: with "
                "adapters, write a BaseFinetuning that freezes the layers you choose."
            )
        if freezes:  # Lightning adds unfrozen groups without weight_decay, so they get torch's default
            self.context.made_optimizer().defaults["weight_decay"] = trainer.args.weight_decay
        if trainer.lr_scheduler is None or not makes_both:
            make_scheduler(trainer, max_steps)

    @property
    def _makes_both(self) -> bool:
        """Whether an override of `create_optimizer_and_scheduler` is called, as in v4.

        v5 calls the two others alone, so an override of one of them is written for that.
        """
        apart = self.context.policy.calls_create_scheduler
        others = apart and self.context.is_overridden("create_optimizer", "create_scheduler")
        return not others and self.context.is_overridden("create_optimizer_and_scheduler")

    def finds_unused_parameters(self) -> bool:
        """Whether DDP looks for parameters that a step has not used, unless an argument sets it."""
        model = self.trainer.model
        if not peers.is_pretrained(model):
            return True
        renamed = hasattr(model, "is_activation_checkpointing")  # in v5.23
        checkpoints = model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing
        return not (checkpoints or self.trainer.args.activation_checkpointing)
