"""Creates, inspects and prepares the model of a Trainer, its optimizer and its schedule."""

from __future__ import annotations

import contextlib
import logging
import reprlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer import trainer_optimizer
from hftrainer.arguments.choices import as_text
from hftrainer.checkpointing.regrouping import NAMES_WITHOUT_GROUPS
from hftrainer.compat import peers
from hftrainer.compat.messages import tell
from hftrainer.compat.overrides import call_with_accepted, is_overridden, number_of_arguments, refuse_uncalled
from hftrainer.compat.peers import bare_name
from hftrainer.data.randomness import enable_full_determinism, set_seed
from hftrainer.errors import InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.model import inspection
from hftrainer.optimization import get_scheduler, needs_metric
from hftrainer.optimizers import param_groups
from hftrainer.parallel.plan import check_model_layout
from hftrainer.trainer_pt_utils import LabelSmoother
from hftrainer.training.component import Component

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)


def check_pair(optimizers: Any) -> tuple[Any, Any]:
    """The Trainer's `optimizers`, if it is a pair of objects.

    Raises:
        InvalidSetup: for anything else, such as a single optimizer or an optimizer class.
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


class ModelSetup(Component):
    """Sets up the model that the script passes, or that `model_init` makes, with its optimizer and its schedule."""

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        #: Attributes of the Trainer that are derived from its model, with the values that we set.
        self._inferred: dict[str, Any] = {}

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
        """Make the model of this `train()` with `model_init`, if the script passed it."""
        if self.trainer.model_init is not None:
            self.seed()
            self.set_model(self.trainer.call_model_init(trial))
            self.trainer.optimizer = self.trainer.lr_scheduler = None

    def align_special_tokens(self) -> None:
        """Set the processing class's special tokens in the model's configs, as the followed release does."""
        policy = self.components.policy
        tokenizes = peers.has_special_tokens(self.trainer.processing_class) and hasattr(self.trainer.model, "config")
        if policy.aligns_special_tokens and tokenizes:
            inspection.align_special_tokens(
                self.components.unwrapped_model,
                self.trainer.processing_class,
                all_tokens=not policy.aligns_only_set_tokens,
            )

    def set_model(self, model: nn.Module) -> None:
        """Set the model: move it to its device, and inspect what it accepts and returns."""
        layout = self.components.engine.plan.layout
        if (reason := check_model_layout(layout, model) or inspection.check_quantization(model)) is not None:
            raise InvalidArgument(reason)
        inspection.check_lightning_module(model, calls_forward=not is_overridden(self.trainer, "compute_loss"))
        self.trainer.model = self.trainer.model_wrapped = model
        self.set_inferred(self._inspect(model))
        sharded = self.trainer.is_distributed_loading_by_transformers
        further = ("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters") if sharded else ()
        refuse_uncalled(type(self.trainer), "_build_accelerator_args", *further)
        if self.trainer.place_model_on_device:
            self._check_given_optimizer()
            self.trainer._move_model_to_device(model, self.trainer.args.device)

    def move(self, model: nn.Module, device: Any) -> None:
        """Move the model, unless it is on several devices already."""
        if getattr(model, "hf_device_map", None) is None:
            self.components.strategy.move(model, device)

    def _inspect(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of a Trainer that are derived from its model, by name."""
        args = self.trainer.args
        inspected = type(inspection.called_model(model))
        names = args.label_names
        return {
            "place_model_on_device": args.place_model_on_device is not False and not self.components.strategy.shards,
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
        """Whether label smoothing shifts the labels of a model that transformers does not know to be causal."""
        if not self.trainer.args.label_smoothing_factor or peers.is_causal_lm(peers.unwrap_peft(model)):
            return False
        return inspection.smoothing_shifts_labels(model)

    def set_inferred(self, values: dict[str, Any]) -> None:
        """Set attributes by name, except those that a subclass or the script has changed since we set them."""
        known = vars(self.trainer)
        for name, value in values.items():
            if name not in self._inferred or (name in known and _is_same(known[name], self._inferred[name])):
                setattr(self.trainer, name, value)
            # Scripts extend lists in place.
            self._inferred[name] = list(value) if isinstance(value, list) else value

    def _check_given_optimizer(self) -> None:
        """Warn if the optimizer belongs to another model; refuse one whose parameters a move to XLA would replace."""
        if self.trainer.optimizer is None:
            return
        held = [parameter for group in self.trainer.optimizer.param_groups for parameter in group["params"]]
        if not set(map(id, self.trainer.model.parameters())) & set(map(id, held)):
            logger.warning("optimizers passes an optimizer that has no parameter of the model, and may not train it.")
        if self.trainer.args.device.type == "xla" and any(parameter.device.type != "xla" for parameter in held):
            raise InvalidArgument(
                "optimizers holds parameters on the CPU, and a model that moves to an XLA device gets new ones: move "
                "it with model.to(args.device) before the optimizer is made, or pass optimizer_cls_and_kwargs."
            )

    def _make_label_smoother(self) -> LabelSmoother | None:
        """The label smoother, if the arguments ask for one."""
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

    # ---- The optimizer and the schedule ------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer for the model's parameters."""
        args = self.trainer.args
        decayed = self.trainer.get_decay_parameter_names(model)
        if self.trainer.optimizer_cls_and_kwargs is not None:
            kind, kwargs = _class_and_keywords(self.trainer.optimizer_cls_and_kwargs)
        else:
            kind, kwargs = call_with_accepted(self.trainer.get_optimizer_cls_and_kwargs, args, model=model)
        is_factory = not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))  # since v5.0
        # GaLore, LOMO and layer-wise optimizers bring their own parameter groups.
        own = [name for name in ("params", "model", "optimizer_dict") if name in kwargs]
        if args.param_groups:
            if is_factory or own:
                given = self.trainer.optimizer_cls_and_kwargs is not None
                raise InvalidArgument(
                    f"param_groups: {'optimizer_cls_and_kwargs' if given else f'optim={as_text(args.optim)!r}'} makes "
                    "its own groups of parameters: use another, such as optim='adamw_torch', or leave param_groups out."
                )
            return self._create_with_groups(model, decayed, kind, kwargs)
        optimizer: torch.optim.Optimizer
        if is_factory:
            optimizer = kind()(model, **kwargs)
            return optimizer
        groups: Any = trainer_optimizer.parameter_groups(model, decayed, args.weight_decay)
        for name in own:
            groups = kwargs.pop(name)
        optimizer = kind(groups, **kwargs)
        trainer_optimizer.use_32bit_embedding_moments(model, kind, kwargs)
        return optimizer

    def _create_with_groups(
        self, model: nn.Module, decayed: list[str], kind: Any, kwargs: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """A new optimizer with the named groups of `param_groups`; logs what each group holds.

        Raises:
            InvalidArgument: for entries that do not fit the model or the optimizer; one error lists them all.
        """
        args = self.trainer.args
        entries: Any = args.param_groups
        rate = kwargs.get("lr") or args.learning_rate
        chosen = param_groups.select_groups(model, decayed, entries, rate, args.weight_decay)
        groups = trainer_optimizer.parameter_groups(model, decayed, args.weight_decay, chosen.groups)
        names = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
        for group in groups:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
        optimizer: torch.optim.Optimizer = kind(groups, **kwargs)
        if problems := [*chosen.problems, *param_groups.find_unknown_keys(entries, optimizer)]:
            raise InvalidArgument("\n".join(problems))
        plain = trainer_optimizer.parameter_groups(model, decayed, args.weight_decay)
        order = [names[id(parameter)] for group in plain for parameter in group["params"]]
        setattr(optimizer, NAMES_WITHOUT_GROUPS, order)
        trainer_optimizer.use_32bit_embedding_moments(model, kind, kwargs)
        if self.trainer.is_world_process_zero():
            for line in param_groups.describe_groups(optimizer.param_groups):
                tell(line)
        return optimizer

    def _check_groups(self, *, freezes: bool) -> None:
        """Refuse `param_groups` for an optimizer whose groups are others.

        Args:
            freezes: whether a callback unfreezes the model gradually, and adds groups.
        """
        groups = self.components.require_optimizer().param_groups
        if not self.trainer.args.param_groups:
            return
        if any("param_names" not in group for group in groups):
            raise InvalidArgument(
                "param_groups is for the optimizer that the Trainer makes, but this one is the script's, from "
                "optimizers or create_optimizer: give its groups their settings there, or pass "
                "optimizer_cls_and_kwargs."
            )
        if freezes:
            raise InvalidArgument(
                "param_groups: a callback that unfreezes gradually (BackboneFinetuning) adds its own groups: leave out "
                "one of both."
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        """A new schedule over `num_training_steps` optimizer steps."""
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
        known = self.components.strategy.decay_parameter_names(model)
        return self.components.policy.decay_parameter_names(model) if known is None else known

    def find_group(self, param: Any) -> Any:
        """The parameter group that holds `param`; for None, the parameters of each group."""
        groups = self.components.require_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is held for held in group["params"])), None)

    def learning_rate(self) -> float:
        """The learning rate to log: that of the first parameter group."""
        if needs_metric(self.trainer.lr_scheduler):
            rate = self.components.require_optimizer().param_groups[0]["lr"]
        else:
            rate = self.trainer.lr_scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    # ---- Before a run or an evaluation -------------------------------------------------------------------------

    def prepare_for_training(self, max_steps: int, folder: str | None) -> nn.Module:
        """Prepare the model, and make optimizer and schedule for it; returns the model to train.

        Args:
            max_steps: optimizer steps of the run.
            folder: the checkpoint that the run resumes from, if any.
        """
        trainer = self.trainer
        if self.run.has_created_scheduler:  # it was made for the length of the previous run
            trainer.lr_scheduler = None
            self.run.has_created_scheduler = False

        def load() -> None:
            if folder is not None:
                trainer._load_from_checkpoint(folder)

        with self._preserve_flos_count():
            self.components.strategy.prepare_model(trainer, load)
        freezes = self.components.engine.freeze_before_training(trainer.model)
        # As in v4. v5 calls only the two other methods, so scripts for v5 override one of those.
        apart = self.components.policy.calls_create_scheduler
        others = apart and is_overridden(trainer, "create_optimizer", "create_scheduler")
        makes_both = not others and is_overridden(trainer, "create_optimizer_and_scheduler")
        self.components.strategy.prepare_optimizer(trainer, max_steps, folder, makes_both=makes_both)
        self._check_groups(freezes=freezes)
        if not trainer.args.save_only_model:
            self.components.strategy.check_saving(trainer.model, self.components.require_optimizer())
        if freezes and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes gradually (BackboneFinetuning) has frozen all trained parameters: with "
                "adapters, write a BaseFinetuning that freezes the layers you choose."
            )
        if freezes:  # Lightning adds unfrozen groups without weight_decay, so they get torch's default
            self.components.require_optimizer().defaults["weight_decay"] = trainer.args.weight_decay
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        return trainer.model_wrapped

    def prepare_for_evaluation(self) -> None:
        """Shard the model if the arguments ask for it, and give all ranks the same buffers."""
        with self._preserve_flos_count():
            self.components.strategy.prepare_evaluation(self.trainer)

    @contextlib.contextmanager
    def _preserve_flos_count(self) -> Iterator[None]:
        """Count the model's operations before the block shards it, and keep that count afterwards."""
        if not self.components.strategy.shards:
            yield
            return
        per_token = self.components.steps.count_flos_per_token()
        yield
        self.components.steps.flos_per_token = (self.trainer.model, per_token)

    def check_accumulation(self, steps: int) -> None:
        """Raise if accumulation steps changed under a strategy that fixes them.

        Raises:
            InvalidArgument: the error names both numbers.
        """
        strategy = self.components.strategy
        planned = self.components.engine.plan.accumulate_grad_batches
        if strategy.has_fixed_accumulation and steps != planned:
            raise InvalidArgument(
                f"gradient_accumulation_steps was changed to {steps} in a run with {strategy.argument}, whose "
                f"configuration has {planned}: change it before the Trainer is made."
            )

    def finds_unused_parameters(self) -> bool:
        """Default for DDP's `find_unused_parameters`."""
        model = self.trainer.model
        if not peers.is_transformers_model(model):
            return True
        renamed = hasattr(model, "is_activation_checkpointing")  # in v5.23
        checkpoints = model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing
        return not (checkpoints or self.trainer.args.activation_checkpointing)


def _is_same(value: Any, before: Any) -> bool:
    """Whether two values are equal; for arrays and tensors, which compare element by element, by identity."""
    return value is before or (type(value) is type(before) and (value == before) is True)
