"""The optimizer and the schedule of a Trainer."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer import trainer_optimizer
from hftrainer.compat.overrides import call_with_accepted
from hftrainer.errors import InvalidSetup
from hftrainer.optimization import follows_metric, get_scheduler

if TYPE_CHECKING:
    from hftrainer.training.components import Components


def checked_pair(optimizers: Any) -> tuple[Any, Any]:
    """The Trainer's `optimizers`, if it is a pair of objects.

    Raises:
        InvalidSetup: for anything else, as an optimizer alone, or its class.
    """
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise InvalidSetup(
            f"optimizers is a {type(optimizers).__name__}, and should be a pair: (optimizer, scheduler), or "
            "(optimizer, None) for the schedule of lr_scheduler_type."
        )
    if classes := [each.__name__ for each in optimizers if isinstance(each, type)]:
        raise InvalidSetup(
            f"optimizers takes objects, and {classes[0]} is a class: pass optimizer_cls_and_kwargs=(class, keywords) "
            "for an optimizer that the Trainer makes."
        )
    return optimizers[0], optimizers[1]


def _class_and_keywords(given: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[1], dict):
        raise InvalidSetup(
            f"optimizer_cls_and_kwargs is {reprlib.repr(given)}, and should be a pair: class, dict of keywords."
        )
    return given[0], dict(given[1])


class OptimizerFactory:
    """Makes optimizer and schedule from the arguments, and reads their learning rates."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.trainer, self.run = components.trainer, components.run

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer for the model's parameters."""
        trainer = self.trainer
        decayed = trainer.get_decay_parameter_names(model)
        groups = trainer_optimizer.parameter_groups(model, decayed, trainer.args.weight_decay)
        if trainer.optimizer_cls_and_kwargs is not None:
            kind, kwargs = _class_and_keywords(trainer.optimizer_cls_and_kwargs)
        else:
            kind, kwargs = call_with_accepted(trainer.get_optimizer_cls_and_kwargs, trainer.args, model=model)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):  # a factory, since v5.0
            return kind()(model, **kwargs)
        for name in (
            "params",
            "model",
            "optimizer_dict",
        ):  # GaLore, LOMO and layer-wise optimizers pass their own parameters
            groups = kwargs.pop(name, groups)
        optimizer = kind(groups, **kwargs)
        trainer_optimizer.keep_embeddings_precise(model, kind, kwargs)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        """A new schedule over `num_training_steps` optimizer steps."""
        args = self.trainer.args
        self.run.made_scheduler = True
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(num_training_steps),
            num_training_steps,
            args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        known = self.components.strategy.decay_parameter_names(model)
        return self.components.policy.decay_parameter_names(model) if known is None else known

    def group_of(self, param: Any) -> Any:
        """The parameter group that holds `param`; for None, the parameters of each group."""
        groups = self.components.made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is held for held in group["params"])), None)

    def learning_rate(self) -> float:
        """The logged learning rate: that of the first group."""
        if follows_metric(self.trainer.lr_scheduler):
            rate = self.components.made_optimizer().param_groups[0]["lr"]
        else:
            rate = self.trainer.lr_scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate
