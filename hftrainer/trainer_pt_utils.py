"""Label smoothing, parameter counts and the display of metrics; and names of transformers' module."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hftrainer.arguments.accelerator_config import AcceleratorConfig as AcceleratorConfig
from hftrainer.base.nested import (
    find_batch_size as find_batch_size,
    nested_detach as nested_detach,
    nested_numpify as nested_numpify,
)
from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument
from hftrainer.releases.policy import get_parameter_names as get_parameter_names


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Number of elements in a model's (trainable) parameters, including those that ZeRO-3 partitions."""
    return sum(libraries.element_count(p) for p in model.parameters() if p.requires_grad or not trainable_only)


@dataclass
class LabelSmoother:
    """Cross entropy with label smoothing, which distributes part of each label's probability over all classes.

    Attributes:
        epsilon: the distributed fraction.
        ignore_index: the label that the loss ignores.
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
            num_items_in_batch: the divisor of the loss; default the number of labels that are not ignored.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if labels.is_floating_point():
            raise InvalidArgument(
                f"label_smoothing_factor={self.epsilon} needs a class for each label, but the labels are "
                f"{labels.dtype}, as for regression: set it to 0, or convert the labels to integers."
            )
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        class_losses = -nn.functional.log_softmax(logits, dim=-1)
        if labels.ndim == class_losses.ndim - 1:
            labels = labels.unsqueeze(-1)
        ignore_mask = labels.eq(self.ignore_index)
        label_losses = class_losses.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignore_mask, 0.0)
        loss_sums = class_losses.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignore_mask, 0.0)
        items: Any = (
            ignore_mask.numel() - ignore_mask.long().sum() if num_items_in_batch is None else num_items_in_batch
        )
        items = items.to(label_losses.device) if isinstance(items, torch.Tensor) else items
        smoothed_loss = loss_sums.sum() / (items * class_losses.shape[-1])
        return (1 - self.epsilon) * (label_losses.sum() / items) + self.epsilon * smoothed_loss


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for display: memory in MB, run times as h:mm:ss.cc, FLOs in GF, floats with four decimal places."""
    return {name: _format_metric(name, value) for name, value in metrics.items()}


def _format_metric(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        return f"{datetime.timedelta(seconds=int(value))}.{int(abs(value - int(value)) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
