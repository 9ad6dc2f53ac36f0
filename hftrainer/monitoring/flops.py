"""Floating-point operations of the first micro-batch by torch's formulas, and the hardware's peak."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from hftrainer.plugins import lightning_engine_module


class _CountingMode(TorchDispatchMode):
    """Counts the operations of all operators that run.

    torch's `FlopCounterMode` splits some operators into others, which changes gradients in the last bit.
    """

    total = 0
    _tracker = ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # In backward, only activation checkpointing enables gradients, to recompute a part of forward.
        is_repeated = self._tracker.is_bw and torch.is_grad_enabled()
        if not is_repeated and (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class FlopCounter:
    """Counts the operations of one micro-batch, in forward and backward, including attention.

    Each operation runs once, with unchanged results. But the micro-batch of a compiled model runs uncompiled, since
    torch compiles nothing during the count. As is usual for MFU, recomputation by activation checkpointing does not
    count.

    Args:
        peak: the device's peak operations per second.

    Attributes:
        counted_operations: operations of the first micro-batch on this process; None before that.
    """

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self.counted_operations: int | None = None
        self._mode: _CountingMode | None = None
        self._contexts = contextlib.ExitStack()

    def start(self) -> None:
        """Start counting, before the first micro-batch."""
        if self.counted_operations is None and self._mode is None:
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
            self._mode = self._contexts.enter_context(_CountingMode())

    def end(self) -> None:
        """Finish the count, after the backward pass."""
        if self._mode is not None:
            self.counted_operations = self._mode.total
            self.stop()

    def stop(self) -> None:
        """Exit the counting mode, also after an error."""
        self._mode = None
        self._contexts.close()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak operations per second, from Lightning's table; None if not listed.

    Args:
        device: the device.
        precision: the run's precision in Lightning's names: '32-true', '16-mixed', 'bf16-mixed', ...
    """
    dtype = (
        torch.bfloat16 if precision.startswith("bf16") else torch.half if precision.startswith("16") else torch.float
    )
    # XLA records operations instead of executing them, so there is nothing to count.
    return lightning_engine_module().get_available_flops(device, dtype) if device.type == "cuda" else None
