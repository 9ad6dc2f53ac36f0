"""Floating-point operations of the first micro-batch, by torch's formulas, and the peak of the hardware."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hftrainer.plugins import adapter


class _Counting(TorchDispatchMode):
    """Adds up the operations of what runs.

    torch's `FlopCounterMode` splits some operators into others, which changes gradients in the last bit.
    """

    total = 0
    in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # In backward, only activation checkpointing enables gradients, to compute a part of forward again.
        is_repeated = self.in_backward and torch.is_grad_enabled()
        if not is_repeated and (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class FlopCounter:
    """Counts the operations of one micro-batch, forward and backward, attention included.

    The operations run as they would without it, once: their results do not change. But the micro-batch of a compiled
    model runs uncompiled, since torch compiles nothing while it counts. What activation checkpointing computes again
    does not count, as is usual for MFU.

    Args:
        peak: operations a second at which the device computes at most.

    Attributes:
        counted: operations of the first micro-batch on this process; None before it.
    """

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self.counted: int | None = None
        self._mode: _Counting | None = None
        self._contexts = contextlib.ExitStack()

    def begin(self) -> None:
        """Begin to count, at the first micro-batch."""
        if self.counted is None and self._mode is None:
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
            self._mode = self._contexts.enter_context(_Counting())

    def begin_backward(self) -> None:
        """Note that backward follows."""
        if self._mode is not None:
            self._mode.in_backward = True

    def end(self) -> None:
        """End the count, after the backward pass."""
        if self._mode is not None:
            self.counted = self._mode.total
            self.stop()

    def stop(self) -> None:
        """Leave the counting mode, also after an error."""
        self._mode = None
        self._contexts.close()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak operations per second, from Lightning's table; None if not listed.

    Args:
        device: the device.
        precision: the run's precision, as Lightning names it: '32-true', '16-mixed', 'bf16-mixed', ...
    """
    kind = torch.bfloat16 if precision.startswith("bf16") else torch.half if precision.startswith("16") else torch.float
    # XLA records operations instead of executing them, so there is nothing to count.
    return adapter().available_flops(device, kind) if device.type == "cuda" else None
