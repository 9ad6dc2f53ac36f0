"""Divides the loss of a micro-batch, so that a step's gradients are those of a mean over its data.

A model or loss function that accepts `num_items_in_batch` divides its sum by the items of the step (`count_items`). All
else that divides a loss is here: a function for each of three methods, which users override or call by themselves.

1. `Trainer.compute_loss`: `undo_mean_over_ranks`. If the items of all ranks have divided the loss, averaging the
   gradients would divide once more.
2. `Trainer.training_step`: `divide_by_micro_batches`. A loss that no items have divided is the mean of its micro-batch.
   Up to v4.54 `gradient_accumulation_steps` divides it, even in an epoch's last step, which may have fewer
   (`ReleasePolicy.loss_divisor`); up to v4.52 not if the model accepts items that are not counted.
3. `accelerator.backward`: `divide_in_backward`, by accelerate's own accumulation steps. They are 1, except in v5.2 to
   v5.5 (`ReleasePolicy.gradient_divisor`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.base.signatures import accepts, ignores_other_keywords
from hftrainer.model.inspection import extract_loss
from hftrainer.parallel.accelerator import EngineAccelerator
from hftrainer.parallel.process_state import DistributedType

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


def count_items(parts: TrainerParts, micro_batches: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Number of labels that are not -100, over all micro-batches of a step; None if unused."""
    policy = parts.policy
    trainer = parts.trainer
    is_used = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if (not is_used and policy.counts_items_only_if_used) or not micro_batches:
        return None
    if micro_batches[0] is None or "labels" not in micro_batches[0]:
        return None
    labels = [policy.counted_labels(batch, shifts=trainer._loss_shifts_labels) for batch in micro_batches]
    if not all(isinstance(tensor, torch.Tensor) for tensor in labels):
        # The labels of detection models are lists of dicts.
        return None
    items = sum(tensor.ne(-100).sum() for tensor in labels).to(device)
    return policy.num_items(parts.counters.sum_over_data(items) if parts.averages_tokens else items)


def undo_mean_over_ranks(parts: TrainerParts, loss: Any, items: torch.Tensor | int | None) -> Any:
    """The loss times the ranks with distinct data, if the items of all of them have divided it."""
    if not parts.averages_tokens or items is None:
        return loss
    is_divided = parts.trainer.model_accepts_loss_kwargs or _function_accepts_items(parts.trainer.compute_loss_func)
    ranks = parts.trainer.accelerator.processes.data_world_size
    return loss * ranks if is_divided and ranks > 1 else loss


def divide_by_micro_batches(
    parts: TrainerParts, loss: torch.Tensor, other_losses: Mapping[str, Any], items: torch.Tensor | int | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss, and the other losses that are logged, divided by the step's micro-batches unless items divided them."""
    divisor = parts.policy.loss_divisor(parts.run.current_gradient_accumulation_steps, parts.trainer.args)
    if divisor > 1 and _is_divided_by_items(parts, items):
        divisor = 1
    logged_losses = {name: other / divisor for name, other in other_losses.items() if other is not None}
    return loss / divisor if divisor > 1 else loss, logged_losses


def divide_in_backward(accelerator: EngineAccelerator, loss: torch.Tensor) -> torch.Tensor:
    """The loss divided by accelerate's accumulation steps, but not with DeepSpeed, whose engine divides itself."""
    size = accelerator.gradient_accumulation_steps
    return loss / size if size > 1 and accelerator.distributed_type is not DistributedType.DEEPSPEED else loss


def _is_divided_by_items(parts: TrainerParts, items: torch.Tensor | int | None) -> bool:
    """Whether the loss is divided by the items of the step, rather than a micro-batch's mean."""
    trainer = parts.trainer
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    if not accepts(trainer.compute_loss, "num_items_in_batch"):
        # Overrides written before v4.46 do not accept the number of items.
        return False
    is_counted = items is not None or not parts.policy.divides_uncounted_loss
    return (trainer.model_accepts_loss_kwargs and is_counted) or _function_accepts_items(trainer.compute_loss_func)


@functools.lru_cache(maxsize=8)
def _function_accepts_items(function: Callable[..., Any] | None) -> bool:
    """Whether a `compute_loss_func` accepts the number of items. Others return a micro-batch's mean loss."""
    if function is None:
        return False
    is_parameter = "num_items_in_batch" in inspect.signature(function).parameters
    return is_parameter or (accepts(function, "num_items_in_batch") and not ignores_other_keywords(function))


def divides_by_items(parts: TrainerParts, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> bool:
    """Whether a model that accepts the number of items divides its loss by it, on any rank.

    Classifiers such as BERT's accept `num_items_in_batch`, but return the mean of a micro-batch. transformers sums
    these means, so that the loss depends on the number of micro-batches and processes.
    """
    loss, loss_for_double = (
        extract_loss(model(**{**inputs, "num_items_in_batch": count}), inputs) for count in (items, 2 * items)
    )
    dividing_ranks = parts.counters.sum_over_data(torch.tensor([not torch.equal(loss, loss_for_double)]).int())
    return bool(dividing_ranks.item())
