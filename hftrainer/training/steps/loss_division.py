"""What divides the loss of a micro-batch, so that a step's gradients are those of a mean over its data.

- Models and loss functions that accept `num_items_in_batch` divide their sum by the items of the whole step
  (`count_items`). If all ranks' are counted, averaging the gradients divides once more: `rank_multiplier` makes up.
- Any other loss is the mean of its micro-batch: `micro_batch_divisor` is the number of micro-batches.
- In v5.2 to v5.5, `accelerator.backward` divides too, by `ReleasePolicy.gradient_divisor`.

`LossComputer` applies `rank_multiplier` and `micro_batch_divisor`.
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

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


def count_items(parts: TrainerParts, micro_batches: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Number of labels that are not -100, over all micro-batches of a step; None if unused."""
    policy, trainer = parts.policy, parts.trainer
    is_used = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if (not is_used and policy.counts_items_only_if_used) or not micro_batches:
        return None
    if micro_batches[0] is None or "labels" not in micro_batches[0]:
        return None
    labels = [policy.counted_labels(batch, shifts=trainer._loss_shifts_labels) for batch in micro_batches]
    if not all(isinstance(each, torch.Tensor) for each in labels):
        # The labels of detection models are lists of dicts.
        return None
    items = sum(each.ne(-100).sum() for each in labels).to(device)
    return policy.num_items(parts.counters.sum_over_data(items) if parts.averages_tokens else items)


def rank_multiplier(parts: TrainerParts, items: torch.Tensor | int | None) -> int:
    """The ranks with distinct data, if the loss is divided by the items of all of them; else 1."""
    if not parts.averages_tokens or items is None:
        return 1
    divides = parts.trainer.model_accepts_loss_kwargs or _function_accepts_items(parts.trainer.compute_loss_func)
    return parts.trainer.accelerator.processes.data_world_size if divides else 1


def micro_batch_divisor(parts: TrainerParts, items: torch.Tensor | int | None) -> int:
    """The divisor of a loss for accumulation: 1 if the items of the step have divided it."""
    micro_batches = parts.policy.loss_divisor(parts.run.accumulation_steps, parts.trainer.args)
    return 1 if micro_batches > 1 and _is_divided_by_items(parts, items) else micro_batches


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
