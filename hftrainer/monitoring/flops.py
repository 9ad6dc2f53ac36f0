"""Floating-point operations of the first micro-batch, by torch's counter, and the peak of the hardware."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hftrainer.plugins import adapter


class FlopCounter:
    """Counts the operations of one micro-batch, forward and backward, attention included.

    The operations run as they would without it, once: their results do not change. But the micro-batch of a compiled
    model runs uncompiled, since torch compiles nothing while it counts. With activation checkpointing, the second
    forward pass does not count, as is usual for MFU.

    Args:
        recomputes: whether activations are computed again in backward.

    Attributes:
        counted: operations of the first micro-batch on this process; None before it.
    """

    def __init__(self, *, recomputes: bool) -> None:
        self.counted: int | None = None
        self._recomputes = recomputes
        self._mode: Any = None
        self._contexts = contextlib.ExitStack()
        self._forward = 0

    def begin(self) -> None:
        """Begin to count, at the first micro-batch."""
        if self.counted is None and self._mode is None:
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
            self._mode = self._contexts.enter_context(FlopCounterMode(display=False))

    def wrap_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The function that computes a loss, which also notes the operations of the forward pass."""

        @functools.wraps(loss)
        def compute(*args: Any, **kwargs: Any) -> Any:
            result = loss(*args, **kwargs)
            if self._mode is not None:
                self._forward = self._mode.get_total_flops()
            return result

        return compute

    def end(self) -> None:
        """End the count, after the backward pass."""
        if self._mode is not None:
            self.counted = self._mode.get_total_flops() - (self._forward if self._recomputes else 0)
            self.stop()

    def stop(self) -> None:
        """Leave the counting mode, also after an error."""
        self._mode = None
        self._contexts.close()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second at which the device computes at most, from Lightning's table; None if it is not listed.

    Args:
        device: the device.
        precision: the run's precision, as Lightning names it: '32-true', '16-mixed', 'bf16-mixed', ...
    """
    kind = torch.bfloat16 if precision.startswith("bf16") else torch.half if precision.startswith("16") else torch.float
    # XLA records operations instead of executing them, so there is nothing to count.
    return adapter().available_flops(device, kind) if device.type == "cuda" else None
