"""Creates the optimizer and the scheduler of a Trainer, from its arguments or by the script's overrides."""

from __future__ import annotations

import inspect
import reprlib
import types
from typing import Any, NoReturn

import torch
from torch import nn

from hftrainer.arguments.choices import as_text
from hftrainer.base.messages import tell
from hftrainer.base.part import Part
from hftrainer.base.signatures import accepts, call_with_accepted
from hftrainer.base.tracebacks import describe_type
from hftrainer.compat.libraries import bare_name
from hftrainer.errors import InvalidArgument, InvalidSetup
from hftrainer.optimizers import param_groups
from hftrainer.optimizers.factory import parameter_groups, use_32bit_embedding_moments
from hftrainer.optimizers.schedules import get_scheduler, needs_metric


def check_optimizer_pair(optimizers: Any) -> tuple[Any, Any]:
    """The optimizer and the scheduler of the Trainer's `optimizers`.

    Raises:
        InvalidSetup: for anything but a pair of objects, such as a single optimizer or an optimizer class.
    """
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        size = f" of {len(optimizers)}" if isinstance(optimizers, (tuple, list)) else ""
        raise InvalidSetup(
            f"optimizers is {describe_type(optimizers)}{size}, but must be a pair: (optimizer, scheduler), or "
            "(optimizer, None) for the schedule of lr_scheduler_type."
        )
    if others := [value for value in optimizers if isinstance(value, (type, str))]:
        raise InvalidSetup(
            f"optimizers accepts objects, not {others[0]!r}: pass optimizer_cls_and_kwargs=(class, kwargs), or set "
            "optim and lr_scheduler_type, and the Trainer creates them."
        )
    if not hasattr(optimizers[0], "param_groups") and hasattr(optimizers[1], "param_groups"):
        names = ", ".join(type(value).__name__ for value in optimizers)
        raise InvalidSetup(f"optimizers is ({names}): pass (optimizer, scheduler), in this order.")
    return optimizers[0], optimizers[1]


def _check_class_and_kwargs(value: Any) -> tuple[Any, dict[str, Any]]:
    if not (isinstance(value, (tuple, list)) and len(value) == 2 and callable(value[0]) and isinstance(value[1], dict)):
        raise InvalidSetup(
            f"optimizer_cls_and_kwargs is {reprlib.repr(value)}, but must be a pair: (class, dict of kwargs)."
        )
    return value[0], dict(value[1])


def call_create_scheduler(trainer: Any, num_training_steps: int) -> None:
    """Call `create_scheduler`, with the optimizer if the method accepts it. transformers v4 passes it, v5 does not."""
    if trainer.optimizer is None:
        raise InvalidSetup(f"{type(trainer).__name__}.create_optimizer must set self.optimizer, and return it.")
    step = vars(trainer.optimizer).get("step")
    # torch's schedulers wrap `optimizer.step` as a method: make one from a script's plain function.
    if step is not None and not inspect.ismethod(step) and not hasattr(step, "_wrapped_by_lr_sched"):
        trainer.optimizer.step = types.MethodType(lambda _, *args, **kwargs: step(*args, **kwargs), trainer.optimizer)
    options = {"optimizer": trainer.optimizer} if accepts(trainer.create_scheduler, "optimizer") else {}
    trainer.create_scheduler(num_training_steps=num_training_steps, **options)


class OptimizerSetup(Part):
    """Creates the optimizer and the scheduler that arguments ask for, and finds groups and learning rates in them.

    It steps neither (`TrainingLoop` does), and loads no state (`Strategy` does).
    """

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer for the model's parameters."""
        args = self.trainer.args
        decayed_names = self.trainer.get_decay_parameter_names(model)
        optimizer_cls, kwargs = self._choose_class(model)
        # Since v5.0, get_optimizer_cls_and_kwargs may return a factory.
        is_factory = not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer))
        # GaLore, LOMO and layer-wise optimizers bring their own parameter groups.
        group_arguments = [name for name in ("params", "model", "optimizer_dict") if name in kwargs]
        if args.param_groups:
            if is_factory or group_arguments:
                self._refuse_param_groups()
            return self._make_grouped_optimizer(model, decayed_names, optimizer_cls, kwargs)
        if is_factory:
            return optimizer_cls()(model, **kwargs)
        groups: Any = parameter_groups(model, decayed_names, args.weight_decay)
        for name in group_arguments:
            groups = kwargs.pop(name)
        optimizer = optimizer_cls(groups, **kwargs)
        use_32bit_embedding_moments(model, optimizer_cls, kwargs)
        return optimizer

    def _choose_class(self, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        """The class and keyword arguments that the script passed, or that `optim` selects."""
        if self.trainer.optimizer_cls_and_kwargs is not None:
            return _check_class_and_kwargs(self.trainer.optimizer_cls_and_kwargs)
        return call_with_accepted(self.trainer.get_optimizer_cls_and_kwargs, self.trainer.args, model=model)

    def _refuse_param_groups(self) -> NoReturn:
        """Raise InvalidArgument: the optimizer brings its own groups."""
        is_from_script = self.trainer.optimizer_cls_and_kwargs is not None
        source = "optimizer_cls_and_kwargs" if is_from_script else f"optim={as_text(self.trainer.args.optim)!r}"
        raise InvalidArgument(
            f"param_groups: {source} creates its own parameter groups: use another optimizer, such as "
            "optim='adamw_torch', or remove param_groups."
        )

    def _make_grouped_optimizer(
        self, model: nn.Module, decayed_names: list[str], optimizer_cls: Any, kwargs: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """A new optimizer with the named groups of `param_groups`. Logs the contents of each group.

        Raises:
            InvalidArgument: for entries that do not fit the model or the optimizer; one error lists them all.
        """
        args = self.trainer.args
        entries: Any = args.param_groups
        rate = kwargs.get("lr") or args.learning_rate
        selected, errors = param_groups.select_groups(model, decayed_names, entries, rate, args.weight_decay)
        groups = parameter_groups(model, decayed_names, args.weight_decay, selected)
        names = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        for group in groups:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
        optimizer: torch.optim.Optimizer = optimizer_cls(groups, **kwargs)
        if problems := [*errors, *param_groups.find_unknown_keys(entries, optimizer)]:
            raise InvalidArgument("\n".join(problems))
        plain_groups = parameter_groups(model, decayed_names, args.weight_decay)
        order = [names[id(parameter)] for group in plain_groups for parameter in group["params"]]
        setattr(optimizer, param_groups.NAMES_WITHOUT_GROUPS, order)
        use_32bit_embedding_moments(model, optimizer_cls, kwargs)
        if self.trainer.is_world_process_zero():
            for line in param_groups.describe_groups(optimizer.param_groups):
                tell(line)
        return optimizer

    def check_groups(self, *, freezes: bool) -> None:
        """Refuse `param_groups` for an optimizer that has other groups.

        Args:
            freezes: whether a callback unfreezes the model gradually, which adds groups.
        """
        groups = self.parts.require_optimizer().param_groups
        if not self.trainer.args.param_groups:
            return
        if any("param_names" not in group for group in groups):
            raise InvalidArgument(
                "param_groups is for the optimizer that the Trainer creates, but this one is the script's, from "
                "optimizers or create_optimizer: set the options of its groups there, or pass optimizer_cls_and_kwargs."
            )
        if freezes:
            raise InvalidArgument(
                "param_groups: a callback that unfreezes gradually (BackboneFinetuning) adds its own groups: use only "
                "one of them."
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        """A new scheduler for `num_training_steps` optimizer steps."""
        args = self.trainer.args
        self.run.has_created_scheduler = True
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(num_training_steps),
            num_training_steps,
            args.lr_scheduler_kwargs,  # type: ignore[arg-type]
        )

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        names = self.parts.strategy.decay_parameter_names(model)
        return self.parts.policy.decay_parameter_names(model) if names is None else names

    def find_group(self, param: Any) -> Any:
        """The parameter group that contains `param`, or for None the parameters of each group."""
        groups = self.parts.require_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is member for member in group["params"])), None)

    def learning_rate(self) -> float:
        """The learning rate to log: that of the first parameter group."""
        if needs_metric(self.trainer.lr_scheduler):
            rate = self.parts.require_optimizer().param_groups[0]["lr"]
        else:
            rate = self.trainer.lr_scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate
