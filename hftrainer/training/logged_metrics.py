"""Metrics of training steps for the next log line, besides the loss, collected without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.errors import InvalidArgument


class LoggedMetrics:
    """Sums on the device, read once per log line together with the loss."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Set numbers of which only the last value is logged."""
        self._last |= values

    def add(self, name: str, value: Any, count: int = 1) -> None:
        """Add a value, a number or a tensor of shape `()`, which counts as `count` values in the mean.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        if isinstance(value, torch.Tensor) and value.ndim:
            raise InvalidArgument(
                f"{name!r} cannot be logged: it is a tensor of shape {tuple(value.shape)}, and a log line holds "
                "numbers. Every entry of a dict of losses is logged; return other outputs separately."
            )
        value = value.detach().float() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        before = self._sums.get(name)
        self._sums[name] = value.clone() if before is None else before + value.to(before.device)
        self._counts[name] = self._counts.get(name, 0) + count

    def state_dict(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Sum and count of each, on the CPU."""
        return {name: (value.cpu(), self._counts[name]) for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[torch.Tensor, int]], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {name: value.to(device) for name, (value, _) in state.items()}
        self._counts = {name: count for name, (_, count) in state.items()}

    def read(self, loss: torch.Tensor, steps: int) -> tuple[float, dict[str, float]]:
        """The loss, the means and the last values as numbers, in one transfer from the device; then reset.

        Args:
            loss: the loss summed so far, shape `()`.
            steps: optimizer steps since the last call; values without their own count are divided by it.
        """
        last, self._last = self._last, {}
        if not self._sums:
            return loss.item(), last
        numbers = torch.stack([loss.float(), *(value.to(loss.device) for value in self._sums.values())]).tolist()
        means = {
            name: number / (self._counts[name] or steps) for name, number in zip(self._sums, numbers[1:], strict=True)
        }
        self._sums.clear()
        self._counts.clear()
        return numbers[0], means | last


def split_losses(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss for backward, and its parts: of a mapping its 'loss', or else the sum, and the other entries."""
    if not isinstance(loss, Mapping):
        return loss, {}
    parts = {name: value for name, value in loss.items() if name != "loss"}
    return loss["loss"] if "loss" in loss else sum(parts.values()), parts
