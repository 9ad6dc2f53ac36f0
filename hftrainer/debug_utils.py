"""`DebugUnderflowOverflow` finds the first layer with inf or nan values."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn

from hftrainer.arguments.choices import DebugOption as DebugOption


class DebugUnderflowOverflow:
    """Raises at the first inf or nan in a layer's weights, inputs or outputs.

    The argument `debug=underflow_overflow` enables it.

    Args:
        model: the model to check.
        max_frames_to_save: number of layers that the error shows.

    Raises:
        ValueError: in the forward pass with an inf or nan; names the layer, and shows the smallest and largest absolute
            values of the last layers.
    """

    def __init__(self, model: nn.Module, max_frames_to_save: int = 21) -> None:
        self.names = {module: name or "the model" for name, module in model.named_modules()}
        self.frames: collections.deque[str] = collections.deque(maxlen=max_frames_to_save)
        self.handles = [module.register_forward_hook(self._check_module) for module in self.names]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _check_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(recurse=False)]
        tensors += _leaves("input", inputs) + _leaves("output", outputs)
        lines = [f"{self.names[module]} ({type(module).__name__})"]
        problems = []
        for name, tensor in tensors:
            values = tensor.detach().float().abs()
            lines.append(f"  {values.min():9.2e} {values.max():9.2e}  {name}" if values.numel() else f"  empty  {name}")
            if not values.isfinite().all():
                problems.append(f"{name} has {'nan' if values.isnan().any() else 'inf'}")
        self.frames.append("\n".join(lines))
        if problems:
            frames = "\n".join(self.frames)
            raise ValueError(
                f"{self.names[module]} ({type(module).__name__}): {', '.join(problems)}. The smallest and largest "
                f"absolute values of the last layers:\n{frames}"
            )


def _leaves(name: str, data: Any) -> list[tuple[str, torch.Tensor]]:
    """The floating-point tensors in nested containers, each with its path."""
    if isinstance(data, torch.Tensor):
        return [(name, data)] if data.is_floating_point() else []
    items: Any = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, (list, tuple)):
        items = enumerate(data)
    return [leaf for key, value in items for leaf in _leaves(f"{name}[{key}]", value)]
