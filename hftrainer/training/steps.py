"""Micro-batches: moves them to the device, computes their loss, and counts tokens and operations."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.arguments import legacy
from hftrainer.arguments.choices import which_tokens
from hftrainer.compat.messages import log_once
from hftrainer.compat.overrides import accepted_by, accepts, call_with_accepted, ignores_other_keywords
from hftrainer.data.collators import count_tokens
from hftrainer.data.loaders import to_device
from hftrainer.errors import InvalidArgument
from hftrainer.model.inspection import is_training, smoothing_shifts_labels
from hftrainer.parallel import devices
from hftrainer.trainer_pt_utils import rebuilt
from hftrainer.trainer_utils import speed_metrics
from hftrainer.training.loader_factory import LoaderFactory
from hftrainer.training.losses import check_loss, first_output, split_losses

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=8)
def _takes_items(function: Callable[..., Any]) -> bool:
    named = "num_items_in_batch" in inspect.signature(function).parameters
    return named or (accepts(function, "num_items_in_batch") and not ignores_other_keywords(function))


class TrainingSteps:
    """Prepares micro-batches, computes their losses, and counts their tokens and operations.

    Args:
        components: the parts of the Trainer.
        loaders: counts labels and operations.
    """

    def __init__(self, components: Components, loaders: LoaderFactory) -> None:
        self.components = components
        self.trainer, self.run = components.trainer, components.run
        self.loaders = loaders

    def prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device; with `past_index` also the model's memory of earlier batches."""
        trainer = self.trainer
        if inputs is None:
            raise InvalidArgument(
                "data_collator returned None: it must return the batch, a dict of the model's inputs."
            )
        if len(inputs) == 0:
            raise InvalidArgument(
                "The batch is empty: none of the samples' keys is a parameter of the model's forward "
                f"({', '.join(trainer._signature_columns or [])})."
            )
        inputs = trainer._prepare_input(inputs)
        if getattr(self.run, "past", None) is not None:  # `past_index`; evaluation loops of v4 delete it
            inputs["mems"] = self.run.past
        return inputs

    def prepare_input(self, data: Any) -> Any:
        """A part of the batch on the device; for containers, `Trainer._prepare_input` prepares each part."""
        trainer = self.trainer
        if not isinstance(data, torch.Tensor) and isinstance(data, (dict, list, tuple, Mapping)):
            return rebuilt(data, trainer._prepare_input)
        return self.components.strategy.cast(to_device(data, trainer.accelerator.device), trainer.model)

    # ---- The loss ----------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation unless it already is."""
        trainer = self.trainer
        if not is_training(model):
            model.train()
        if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers have a training mode too
            trainer.optimizer.train()
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            accepted = accepted_by(trainer.compute_loss, {"num_items_in_batch": num_items_in_batch})
            loss = trainer.compute_loss(model, inputs, **accepted)
        every = trainer.args.torch_empty_cache_steps
        if every is not None and trainer.state.global_step % every == 0:
            devices.empty_cache()
        loss, parts = split_losses(loss)
        loss = check_loss(loss)
        divisor = self.components.policy.loss_divisor(self.run.accumulation, trainer.args)
        if divisor > 1 and self._loss_is_scaled(num_items_in_batch):
            divisor = 1
        for name, part in parts.items():
            if part is not None:
                self.run.logged_metrics.add(name, part / divisor, count=0)
        return loss / divisor if divisor > 1 else loss

    def _loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss was divided by the items of the whole window, rather than being a micro-batch's mean."""
        trainer = self.trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return trainer.loss_is_scaled_for_ga
        if not accepts(trainer.compute_loss, "num_items_in_batch"):
            return False  # an override from before v4.46 does not get them
        counted = num_items_in_batch is not None or not self.components.policy.divides_uncounted_loss
        return (trainer.model_accepts_loss_kwargs and counted) or self._function_takes_items

    @property
    def _function_takes_items(self) -> bool:
        """Whether there is a `compute_loss_func` that uses the number of items; others return the mean of a batch."""
        function = self.trainer.compute_loss_func
        return function is not None and _takes_items(function)

    def loss_and_outputs(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any]:
        """Implements `Trainer.compute_loss`: by `compute_loss_func`, the label smoother, or the model itself."""
        trainer = self.trainer
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(
                f"The batch is a {type(inputs).__name__}, and the model is called with names: let data_collator return "
                "a dict of the model's inputs, or override compute_loss."
            )
        takes_labels = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        labels = inputs.pop("labels", None) if takes_labels else None
        if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.components.past_index >= 0:
            self.run.past = outputs[self.components.past_index]
        if trainer.compute_loss_func is not None:
            loss = call_with_accepted(trainer.compute_loss_func, outputs, labels, num_items_in_batch=num_items_in_batch)
        elif trainer.label_smoother is not None and labels is not None:
            shift = smoothing_shifts_labels(trainer.accelerator.unwrap_model(model))
            items = num_items_in_batch if self.components.policy.smooths_over_items else None
            loss = trainer.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=items)
        else:
            if trainer.label_smoother is not None:
                log_once(
                    logger,
                    f"label_smoothing_factor={trainer.args.label_smoothing_factor} has no effect: it needs 'labels', "
                    f"and the batch has only {', '.join(inputs)}; the model computes its own loss.",
                )
            loss = first_output(outputs, inputs)
        takes_items = trainer.model_accepts_loss_kwargs or self._function_takes_items
        if self.components.averages_tokens and takes_items and num_items_in_batch is not None:
            loss = loss * trainer.accelerator.processes.data_processes  # averaging the gradients divides by it
        return loss, outputs

    # ---- Counting ----------------------------------------------------------------------------------------------

    def num_items(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Number of labels that are not -100, over all micro-batches; None when nothing uses it."""
        trainer, policy = self.trainer, self.components.policy
        asked = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if (not asked and policy.counts_items_only_if_used) or not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = [policy.counted_labels(batch, shifts=trainer._loss_shifts_labels) for batch in batch_samples]
        if not all(isinstance(each, torch.Tensor) for each in labels):
            return None  # detection models: labels are lists of dicts
        count = sum(each.ne(-100).sum() for each in labels).to(device)
        if self.components.averages_tokens:
            count = self.loaders.sum_over_data(count)
        return policy.num_items(count)

    def track_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch over all ranks, if an argument asks for it."""
        trainer = self.trainer
        if legacy.value(trainer.args, "include_tokens_per_second") and "input_ids" in inputs:
            self.run.tokens += inputs["input_ids"].numel() * trainer.accelerator.processes.data_processes
        how = which_tokens(trainer.args.include_num_input_tokens_seen)
        if how == "no":
            return
        main_input = getattr(trainer.model, "main_input_name", "input_ids")
        count = count_tokens(inputs, main_input, how, getattr(trainer.processing_class, "pad_token_id", None))
        if count is not None:
            trainer.state.num_input_tokens_seen += int(self.loaders.sum_over_data(count))

    def token_metrics(self, start_time: float | None) -> dict[str, float]:
        """Input tokens seen so far, and tokens per second since `start_time`, if arguments ask for them."""
        trainer = self.trainer
        if which_tokens(trainer.args.include_num_input_tokens_seen) == "no":
            return {}
        seen = trainer.state.num_input_tokens_seen
        found: dict[str, float] = {"num_input_tokens_seen": seen}
        if start_time is not None and self.components.policy.logs_tokens_per_second:
            found |= speed_metrics("train", start_time, num_tokens=seen - self.run.initial_tokens)
        return found

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of forward and backward on a batch: 6 per token and parameter; 0 if unknown."""
        model: Any = self.trainer.model
        if hasattr(model, "floating_point_ops") and not self.components.policy.estimates_total_flos:
            return model.floating_point_ops(inputs)
        main_input = getattr(model, "main_input_name", "input_ids")
        return inputs[main_input].numel() * self.loaders.flos_per_token_of(model) if main_input in inputs else 0

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        flos = self.run.flos
        if self.trainer.args.world_size > 1:  # summed in float32, as in transformers
            flos = self.loaders.sum_over_data(torch.tensor([flos])).item()
        self.trainer.state.total_flos += flos
        self.run.flos = 0.0
