"""Devices: which one torch finds, and what its modules for them have in common."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Accelerators in the order in which they are looked for. Some of torch's plug-ins pose as CUDA, so it comes last.
ACCELERATORS = ("mps", "xpu", "mlu", "musa", "npu", "cuda")
#: Devices that Lightning does not know, whose modules in torch follow `torch.cuda`.
OTHERS = ("xpu", "mlu", "musa", "npu")
#: Backends that take only what is on their accelerator.
ON_DEVICE = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu", "cncl": "mlu", "mccl": "musa"}
#: Devices that torch has no page-locked memory for.
UNPINNED = ("cpu", "mps", "xla")
#: What errors of a device say → what to do.
HINTS = {
    "not currently implemented for the MPS device": (
        "Set PYTORCH_ENABLE_MPS_FALLBACK=1 before Python starts (torch reads it when it is imported): operators that "
        "Apple's GPU lacks then run on the CPU, with a warning. Or train on the CPU: use_cpu=True."
    ),
    "MPS framework doesn't support float64": (
        "Apple's GPU has no float64: give float32, from the dataset or the data_collator (numpy's default is float64). "
        "Or train on the CPU: use_cpu=True."
    ),
}


def found() -> str:
    """The kind of accelerator that torch finds here, or 'cpu'. ROCm's GPUs are 'cuda', as torch has them."""
    return next((kind for kind in ACCELERATORS if _is_available(kind)), "cpu")


def _is_available(kind: str) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available()
    module = getattr(torch, kind, None)  # plug-ins add theirs when torch is imported
    return module is not None and module.is_available()


def count(kind: str) -> int:
    """Accelerators of a kind that this process sees; the CPU is none, and a Mac has one."""
    return 0 if kind == "cpu" else 1 if kind == "mps" else torch.get_device_module(kind).device_count()


def count_of(device: torch.device) -> int | None:
    """How many of a device this process sees; None for those that have no number."""
    return torch.get_device_module(device).device_count() if device.type in ("cuda", *OTHERS) else None


def own_backend(kind: str) -> str:
    """The backend that is made for a device."""
    return next((name for name, device in ON_DEVICE.items() if device == kind), "gloo")


def empty_cache() -> None:
    """Give memory that torch keeps for later back to the device."""
    if (module := _module()) is not None:
        module.empty_cache()


def memory_used() -> int | None:
    """Bytes of the tensors on the accelerator; None without one."""
    module = _module()
    if module is None:
        return None
    return (module.current_allocated_memory if module is torch.mps else module.memory_allocated)()


def memory_peak() -> int | None:
    """The most that `memory_used` has been since `reset_memory_peak`; None where torch does not measure it."""
    module = _module()
    return None if module is None or module is torch.mps else module.max_memory_allocated()


def reset_memory_peak() -> None:
    """Measure the peak anew."""
    module = _module()
    if module is not None and module is not torch.mps:
        module.reset_peak_memory_stats()


def _module() -> Any:
    kind = found()
    return None if kind == "cpu" else torch.get_device_module(kind)


def _add_note(error: Exception, hint: str) -> None:
    """Add a note to an error; before Python 3.11, which shows them, it is logged too."""
    if hasattr(error, "add_note"):
        error.add_note(hint)
        return
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), hint]
    logger.error(hint)


@contextlib.contextmanager
def hinted() -> Iterator[None]:
    """Add what to do to an error that says what a device cannot do."""
    try:
        yield
    except Exception as error:
        for said, hint in HINTS.items():
            if said in str(error) and hint not in getattr(error, "__notes__", ()):
                _add_note(error, hint)
        raise
