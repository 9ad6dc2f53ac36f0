"""Utilities for nested outputs, parameter names and readable metrics."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hftrainer.arguments.accelerator_config import AcceleratorConfig as AcceleratorConfig
from hftrainer.compat import peers
from hftrainer.errors import InvalidArgument
from hftrainer.parallel.processes import rebuild_container as rebuild_container
from hftrainer.releases.policy import get_parameter_names as get_parameter_names

#: The most frequent types first: `isinstance` checks them in this order.
_CONTAINERS = (tuple, dict, list, Mapping)


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Number of elements of a model's parameters, or of those that are trained; of the whole model with ZeRO-3."""
    return sum(peers.element_count(each) for each in model.parameters() if each.requires_grad or not trainable_only)


def nested_apply(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to every leaf of nested mappings, lists and tuples."""
    if isinstance(data, torch.Tensor):  # the common case first: `isinstance(data, Mapping)` is slow
        return function(data)
    if isinstance(data, _CONTAINERS):
        return rebuild_container(data, lambda value: nested_apply(function, value))
    return function(data)


def nested_detach(tensors: Any) -> Any:
    """Detach every tensor; other leaves are kept."""
    return nested_apply(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tensors)


def nested_numpify(tensors: Any) -> Any:
    """Convert tensors to NumPy arrays; bfloat16, which NumPy does not have, becomes float32."""
    return nested_apply(_numpify, tensors)


def _numpify(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.cpu()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()


def drop_all_rows(data: Any, *, lists_of_samples: bool = False) -> Any:
    """The nested outputs with all rows removed; with `lists_of_samples`, lists become empty."""
    if lists_of_samples and isinstance(data, list):
        return []
    if isinstance(data, _CONTAINERS):
        return rebuild_container(data, lambda value: drop_all_rows(value, lists_of_samples=lists_of_samples))
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return (data if data.ndim else data.reshape(1))[:0]
    return data


def find_batch_size(tensors: Any) -> int | None:
    """First dimension of the first tensor in nested containers, or None."""
    if isinstance(tensors, (torch.Tensor, np.ndarray)):
        return tensors.shape[0] if tensors.ndim else None
    if not isinstance(tensors, _CONTAINERS):
        return None
    values = tensors.values() if isinstance(tensors, (dict, Mapping)) else tensors
    return next((size for value in values if (size := find_batch_size(value)) is not None), None)


@dataclass
class LabelSmoother:
    """Cross entropy with label smoothing: part of each label's probability is spread over all classes.

    Attributes:
        epsilon: the fraction that is spread.
        ignore_index: label that the loss ignores.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss, shape `()`.

        Args:
            model_output: the model's output; its logits have shape `(..., classes)`.
            labels: labels of shape `(...)`.
            shift_labels: whether position `i` predicts label `i + 1`, as in causal language models.
            num_items_in_batch: divisor; by default the number of labels that count.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if labels.is_floating_point():
            raise InvalidArgument(
                f"label_smoothing_factor={self.epsilon} needs a class for each label, and the labels are numbers "
                f"({labels.dtype}), as in a regression: set it to 0, or make the labels integers."
            )
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        negative = -nn.functional.log_softmax(logits, dim=-1)
        if labels.ndim == negative.ndim - 1:
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        own = negative.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
        spread = negative.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        items: Any = ignored.numel() - ignored.long().sum() if num_items_in_batch is None else num_items_in_batch
        items = items.to(own.device) if isinstance(items, torch.Tensor) else items
        spread_mean = spread.sum() / (items * negative.shape[-1])
        loss: torch.Tensor = (1 - self.epsilon) * (own.sum() / items) + self.epsilon * spread_mean
        return loss


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for display: memory in MB, run times as h:mm:ss.cc, FLOs in GF, floats with four decimal places."""
    return {name: _formatted(name, value) for name, value in metrics.items()}


def _formatted(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        return f"{datetime.timedelta(seconds=int(value))}.{int(abs(value - int(value)) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
