"""Creates, inspects and prepares the model of a Trainer."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from hftrainer.base.part import Part
from hftrainer.base.signatures import number_of_arguments
from hftrainer.base.tracebacks import describe_type
from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden, refuse_uncalled_methods
from hftrainer.data.randomness import enable_full_determinism, set_seed
from hftrainer.errors import InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.model import inspection
from hftrainer.parallel.plan import check_model_layout
from hftrainer.trainer_pt_utils import LabelSmoother

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)


class ModelSetup(Part):
    """Makes the model with `model_init` or takes the script's, finds out about it, and prepares it for training.

    The strategy says how it is sharded or wrapped; here is decided what comes before and after that.
    """

    def __init__(self, parts: TrainerParts) -> None:
        super().__init__(parts)
        #: Attributes of the Trainer that are derived from its model, with the values that we set.
        self._inferred_values: dict[str, Any] = {}

    def seed_generators(self) -> None:
        """Seed all random generators from the arguments."""
        args = self.trainer.args
        seed_all = enable_full_determinism if args.full_determinism else set_seed
        seed_all(args.seed)
        self.parts.strategy.seed(args.seed)

    def call_model_init(self, trial: Any) -> nn.Module:
        """A new model from `model_init`, which receives the trial if it accepts an argument."""
        model_init = self.trainer.model_init
        assert model_init is not None
        if isinstance(model_init, nn.Module):
            raise InvalidSetup(
                f"model_init is {describe_type(model_init)}, but must be a function that returns one: pass it as model."
            )
        num_arguments = number_of_arguments(model_init)
        if num_arguments > 1:
            raise InvalidSetup(
                f"model_init must accept no argument, or only the trial, but it accepts {num_arguments} arguments."
            )
        model = model_init(trial) if num_arguments else model_init()
        if model is None:
            raise InvalidSetup("model_init returned None: it must return the model.")
        return model

    def remake_model(self, trial: Any) -> None:
        """Make the model of this `train()` with `model_init`, if the script passed it."""
        if self.trainer.model_init is not None:
            self.seed_generators()
            self.set_model(self.trainer.call_model_init(trial))
            self.trainer.optimizer = self.trainer.lr_scheduler = None

    def align_special_tokens(self) -> None:
        """Set the processing class's special tokens in the model's configs, as the followed release does."""
        policy = self.parts.policy
        trainer = self.trainer
        has_tokens = libraries.has_special_tokens(trainer.processing_class) and hasattr(trainer.model, "config")
        if policy.aligns_special_tokens and has_tokens:
            model = self.parts.unwrapped_model
            all_tokens = not policy.aligns_only_set_tokens
            inspection.align_special_tokens(model, trainer.processing_class, all_tokens=all_tokens)

    def set_model(self, model: nn.Module) -> None:
        """Set the model: move it to its device, and inspect what it accepts and returns."""
        layout = self.parts.engine.plan.layout
        if (reason := check_model_layout(layout, model) or inspection.check_quantization(model)) is not None:
            raise InvalidArgument(reason)
        inspection.check_lightning_module(model, calls_forward=not is_overridden(self.trainer, "compute_loss"))
        self.trainer.model = self.trainer.model_wrapped = model
        self.set_inferred_attributes(self._inspect_model(model))
        uncalled = ["_build_accelerator_args"]
        if self.trainer.is_distributed_loading_by_transformers:
            uncalled += ["_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters"]
        refuse_uncalled_methods(type(self.trainer), *uncalled)
        if self.trainer.place_model_on_device:
            self._check_script_optimizer()
            self.trainer._move_model_to_device(model, self.trainer.args.device)

    def move_model(self, model: nn.Module, device: Any) -> None:
        """Move the model, unless it is already on several devices."""
        if getattr(model, "hf_device_map", None) is None:
            self.parts.strategy.move_model(model, device)

    def _inspect_model(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of a Trainer that are derived from its model, by name."""
        args, shards_model = self.trainer.args, self.parts.strategy.shards_model
        inspected = type(inspection.called_model(model))
        names = args.label_names
        return {
            "place_model_on_device": args.place_model_on_device is not False and not shards_model,
            "is_model_parallel": len({d for d in getattr(model, "hf_device_map", {}).values() if d != "cpu"}) > 1,
            "is_distributed_loading_by_transformers": getattr(model, "is_distributed_loading_by_transformers", False),
            "model_accepts_loss_kwargs": inspection.accepts_loss_kwargs(model),
            "_loss_shifts_labels": inspection.shifts_labels(model) or self._needs_shifted_smoothing(model),
            "label_names": inspection.find_labels(inspected) if names is None else names,
            "can_return_loss": inspection.can_return_loss(inspected),
            "_signature_columns": None,
            "label_smoother": self._make_label_smoother(),
        }

    def _needs_shifted_smoothing(self, model: nn.Module) -> bool:
        """Whether label smoothing shifts the labels of a model that transformers does not class as causal."""
        if not self.trainer.args.label_smoothing_factor or libraries.is_causal_lm(libraries.unwrap_peft(model)):
            return False
        return inspection.smoothing_shifts_labels(model)

    def set_inferred_attributes(self, values: dict[str, Any]) -> None:
        """Set attributes by name, except those that a subclass or the script has changed."""
        attributes = vars(self.trainer)
        for name, value in values.items():
            if name not in self._inferred_values or (
                name in attributes and _is_same(attributes[name], self._inferred_values[name])
            ):
                setattr(self.trainer, name, value)
            # Scripts extend lists in place.
            self._inferred_values[name] = list(value) if isinstance(value, list) else value

    def _check_script_optimizer(self) -> None:
        """Warn about the optimizer of another model; refuse parameters that a move to XLA would replace."""
        if self.trainer.optimizer is None:
            return
        parameters = [parameter for group in self.trainer.optimizer.param_groups for parameter in group["params"]]
        if not set(map(id, self.trainer.model.parameters())) & set(map(id, parameters)):
            logger.warning(
                "The optimizer passed in optimizers has no parameter of the model, so it trains nothing of the model."
            )
        if self.trainer.args.device.type == "xla" and any(parameter.device.type != "xla" for parameter in parameters):
            raise InvalidArgument(
                "optimizers holds parameters on the CPU, but a move to an XLA device replaces them: call "
                "model.to(args.device) before you create the optimizer, or pass optimizer_cls_and_kwargs."
            )

    def _make_label_smoother(self) -> LabelSmoother | None:
        """The label smoother, or None if the arguments do not enable it."""
        if self.trainer.args.label_smoothing_factor == 0:
            return None
        if getattr(getattr(self.trainer.model, "config", None), "problem_type", None) == "multi_label_classification":
            warnings.warn(
                "Label smoothing is not compatible with multi-label classification, where a sample has several labels: "
                "label_smoothing_factor is ignored.",
                stacklevel=4,
            )
            return None
        if self.trainer.compute_loss_func is not None:
            logger.warning("label_smoothing_factor has no effect: compute_loss_func computes the loss.")
        return LabelSmoother(epsilon=self.trainer.args.label_smoothing_factor)

    # ---- Before a run or an evaluation -------------------------------------------------------------------------

    def prepare_for_training(self, max_steps: int, folder: str | None) -> nn.Module:
        """Prepare the model, its optimizer and its scheduler, and return the model to train.

        Args:
            max_steps: optimizer steps of the run.
            folder: the checkpoint that the run resumes from, if any.
        """
        trainer = self.trainer
        # A scheduler that the Trainer created has the length of the previous run.
        if self.run.has_created_scheduler:
            trainer.lr_scheduler = None
            self.run.has_created_scheduler = False

        def load_checkpoint() -> None:
            if folder is not None:
                trainer._load_from_checkpoint(folder)

        with self._preserve_flos_count():
            self.parts.strategy.prepare_model(trainer, load_checkpoint)
        freezes = self.parts.engine.freeze_before_training(trainer.model)
        # v4 calls create_optimizer_and_scheduler. v5 calls only the two others, so scripts for v5 override those.
        calls_separately = self.parts.policy.calls_create_scheduler
        overrides_separate_methods = calls_separately and is_overridden(trainer, "create_optimizer", "create_scheduler")
        makes_both = not overrides_separate_methods and is_overridden(trainer, "create_optimizer_and_scheduler")
        self.parts.strategy.prepare_optimizer(trainer, max_steps, folder, makes_both=makes_both)
        self.parts.optimizer_setup.check_groups(freezes=freezes)
        if not trainer.args.save_only_model:
            self.parts.strategy.check_saving(trainer.model, self.parts.require_optimizer())
        if freezes and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes gradually (BackboneFinetuning) has frozen all trainable parameters: with "
                "adapters, write a BaseFinetuning callback that freezes the layers that you choose."
            )
        # Lightning adds unfrozen groups without weight_decay, so that they get torch's default.
        if freezes:
            self.parts.require_optimizer().defaults["weight_decay"] = trainer.args.weight_decay
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        return trainer.model_wrapped

    def prepare_for_evaluation(self) -> None:
        """Shard the model if the arguments require it, and synchronize its buffers between ranks."""
        with self._preserve_flos_count():
            self.parts.strategy.prepare_evaluation(self.trainer)

    @contextlib.contextmanager
    def _preserve_flos_count(self) -> Iterator[None]:
        """Count the model's operations before the block shards it, and keep that count afterwards."""
        if not self.parts.strategy.shards_model:
            yield
            return
        per_token = self.parts.counters.count_flos_per_token()
        yield
        self.parts.counters.model_and_flos_per_token = (self.trainer.model, per_token)

    def check_accumulation(self, steps: int) -> None:
        """Raise if the accumulation steps changed, but the strategy fixes them.

        Raises:
            InvalidArgument: the error names both numbers.
        """
        strategy = self.parts.strategy
        planned_steps = self.parts.engine.plan.accumulate_grad_batches
        if strategy.has_fixed_accumulation and steps != planned_steps:
            raise InvalidArgument(
                f"gradient_accumulation_steps was changed to {steps} in a run with {strategy.argument}, whose "
                f"configuration has {planned_steps}: change it before you create the Trainer."
            )

    def finds_unused_parameters(self) -> bool:
        """The default of DDP's `find_unused_parameters`."""
        model = self.trainer.model
        if not libraries.is_transformers_model(model):
            return True
        # transformers v5.23 renamed `is_gradient_checkpointing`.
        has_new_name = hasattr(model, "is_activation_checkpointing")
        is_checkpointing = model.is_activation_checkpointing if has_new_name else model.is_gradient_checkpointing
        return not (is_checkpointing or self.trainer.args.activation_checkpointing)


def _is_same(value: Any, previous_value: Any) -> bool:
    """Whether two values are equal. Arrays and tensors, which compare element by element, must be identical."""
    return value is previous_value or (type(value) is type(previous_value) and (value == previous_value) is True)
