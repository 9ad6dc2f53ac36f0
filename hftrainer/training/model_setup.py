"""The model of a Trainer: moves it to its device, and finds out what it accepts and returns."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from hftrainer.compat import peers
from hftrainer.compat.overrides import number_of_arguments, refuse_uncalled
from hftrainer.data.randomness import enable_full_determinism, set_seed
from hftrainer.errors import InvalidArgument, InvalidSetup
from hftrainer.model import inspection
from hftrainer.parallel.plan import check_model_layout
from hftrainer.trainer_pt_utils import LabelSmoother

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)


class ModelSetup:
    """Sets up the model that the script passes, or that `model_init` makes.

    Attributes:
        found: attributes of the Trainer that follow from its model, with the values first set.
    """

    def __init__(self, components: Components) -> None:
        self.components = components
        self.trainer, self.run = components.trainer, components.run
        self.found: dict[str, Any] = {}

    def seed(self) -> None:
        """Seed all random generators from the arguments."""
        args = self.trainer.args
        if args.full_determinism:
            enable_full_determinism(args.seed)
        else:
            set_seed(args.seed)
        self.components.strategy.seed(args.seed)

    def call_model_init(self, trial: Any) -> nn.Module:
        """A new model from `model_init`, which gets the trial if it takes an argument."""
        make = self.trainer.model_init
        assert make is not None
        if isinstance(make, nn.Module):
            raise InvalidSetup(
                f"model_init is a {type(make).__name__}, and should be a function that makes one: pass it as model."
            )
        count = number_of_arguments(make)
        if count > 1:
            raise InvalidSetup(f"model_init must take no argument or one, the trial; it takes {count}.")
        model = make(trial) if count else make()
        if model is None:
            raise InvalidSetup("model_init returned None: it must return the model.")
        return model

    def remake_model(self, trial: Any) -> None:
        """Make the model of this `train()` with `model_init`, if there is one."""
        trainer = self.trainer
        if trainer.model_init is not None:
            self.seed()
            self.set_model(trainer.call_model_init(trial))
            trainer.optimizer = trainer.lr_scheduler = None

    def align_special_tokens(self) -> None:
        """Set the processing class's special tokens in the model's configs, as the followed release does."""
        trainer, policy = self.trainer, self.components.policy
        tokenizes = peers.is_tokenizing(trainer.processing_class) and hasattr(trainer.model, "config")
        if policy.aligns_special_tokens and tokenizes:
            inspection.align_special_tokens(
                self.components.bare_model, trainer.processing_class, all_tokens=not policy.aligns_only_set_tokens
            )

    def set_model(self, model: nn.Module) -> None:
        """Set the model: move it to its device, and find out what it accepts and returns."""
        trainer = self.trainer
        for reason in (
            check_model_layout(self.components.engine.plan.layout, model),
            inspection.check_quantization(model),
        ):
            if reason is not None:
                raise InvalidArgument(reason)
        trainer.model = trainer.model_wrapped = model
        for name, value in self._inspect(model).items():
            self.set_found(name, value)
        sharded = trainer.is_distributed_loading_by_transformers
        further = ("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters") if sharded else ()
        refuse_uncalled(type(trainer), "_build_accelerator_args", *further)
        if trainer.place_model_on_device:
            self._check_given_optimizer()
            trainer._move_model_to_device(model, trainer.args.device)

    def move(self, model: nn.Module, device: Any) -> None:
        """Move the model, unless it is on several devices already."""
        if getattr(model, "hf_device_map", None) is None:
            self.components.strategy.move(model, device)

    def _inspect(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of a Trainer that follow from its model, by name."""
        args = self.trainer.args
        inspected = type(inspection.called_model(model))
        names = args.label_names
        return {
            "place_model_on_device": args.place_model_on_device is not False and not self.components.strategy.shards,
            "is_model_parallel": len({d for d in getattr(model, "hf_device_map", {}).values() if d != "cpu"}) > 1,
            "is_distributed_loading_by_transformers": getattr(model, "is_distributed_loading_by_transformers", False),
            "model_accepts_loss_kwargs": inspection.accepts_loss_kwargs(model),
            "_loss_shifts_labels": inspection.shifts_labels(model) or self._smooths_unknown(model),
            "label_names": inspection.find_labels(inspected) if names is None else names,
            "can_return_loss": inspection.can_return_loss(inspected),
            "_signature_columns": None,
            "label_smoother": self._make_label_smoother(),
        }

    def _smooths_unknown(self, model: nn.Module) -> bool:
        """Whether label smoothing shifts the labels of a model that transformers does not know to be causal."""
        if not self.trainer.args.label_smoothing_factor or peers.is_causal_lm(peers.without_adapters(model)):
            return False
        return inspection.smoothing_shifts_labels(model)

    def set_found(self, name: str, value: Any) -> None:
        """Set an attribute, unless a subclass or the script has changed the value that was set before."""
        known = vars(self.trainer)
        if name not in self.found or (name in known and _is_same(known[name], self.found[name])):
            setattr(self.trainer, name, value)
        self.found[name] = list(value) if isinstance(value, list) else value  # scripts extend lists in place

    def _check_given_optimizer(self) -> None:
        """Warn of an optimizer of another model; refuse one whose parameters a move to an XLA device replaces."""
        trainer = self.trainer
        if trainer.optimizer is None:
            return
        own = {id(parameter) for parameter in trainer.model.parameters()}
        held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
        if not own & held:
            logger.warning("optimizers passes an optimizer that has no parameter of the model, and may not train it.")
        if trainer.args.device.type != "xla":
            return
        parameters = (parameter for group in trainer.optimizer.param_groups for parameter in group["params"])
        if any(parameter.device.type != "xla" for parameter in parameters):
            raise InvalidArgument(
                "optimizers holds parameters on the CPU, and a model that moves to an XLA device gets new ones: move "
                "it with model.to(args.device) before the optimizer is made, or pass optimizer_cls_and_kwargs."
            )

    def _make_label_smoother(self) -> LabelSmoother | None:
        """The label smoother, if the arguments ask for one."""
        trainer = self.trainer
        if trainer.args.label_smoothing_factor == 0:
            return None
        if getattr(getattr(trainer.model, "config", None), "problem_type", None) == "multi_label_classification":
            warnings.warn(
                "Label smoothing is not compatible with multi-label classification, where a sample has several labels: "
                "label_smoothing_factor is ignored.",
                stacklevel=4,
            )
            return None
        if trainer.compute_loss_func is not None:
            logger.warning("label_smoothing_factor has no effect: compute_loss_func computes the loss.")
        return LabelSmoother(epsilon=trainer.args.label_smoothing_factor)


def _is_same(value: Any, before: Any) -> bool:
    """Whether two values are equal; for arrays and tensors, which compare element by element, by identity."""
    return value is before or (type(value) is type(before) and (value == before) is True)
