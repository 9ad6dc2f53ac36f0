"""Evaluation in half precision, after which the weights are as they were."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the floating-point weights of a model in the block, and give them back afterwards, bit for bit.

    transformers leaves the model in half precision, and goes on to train and save that one. The weights wait in the
    memory of the host, so that the device holds only one copy.
    """
    waiting: deque[torch.Tensor | None] = deque()

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:  # a tied weight that was met before, too
            waiting.append(None)
            return tensor
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        waiting.append(tensor.detach().cpu() if plain else tensor.detach())
        return tensor.to(dtype)

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        kept = waiting.popleft()
        return tensor if kept is None else kept.to(tensor.device)

    model._apply(lower)
    try:
        yield
    finally:
        model._apply(restore)  # visits the weights in the same order
