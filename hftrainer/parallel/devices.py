"""Devices: the one that torch finds, and functions that work alike on all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from hftrainer.parallel import tpu

logger = logging.getLogger(__name__)

#: Accelerators in search order. CUDA is last, since some of torch's plug-ins imitate it.
ACCELERATORS = ("mps", "xpu", "mlu", "musa", "npu", "tpu", "cuda")
#: Devices that Lightning does not support. `tpu` is torch_tpu's; torch_xla's is `xla`.
OTHERS = ("xpu", "mlu", "musa", "npu", "tpu")
#: Backends that accept only tensors on their accelerator.
ON_DEVICE = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu", "cncl": "mlu", "mccl": "musa", "tpu_dist": "tpu"}
#: Devices for which torch has no page-locked memory.
UNPINNED = ("cpu", "mps", "xla")
#: Text in out-of-memory errors that are not `torch.OutOfMemoryError`.
OUT_OF_MEMORY = (" out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")
#: Text in an error of a device → what to do.
HINTS = {
    "not currently implemented for the MPS device": (
        "Set PYTORCH_ENABLE_MPS_FALLBACK=1 before Python starts (torch reads it when it is imported): operators that "
        "Apple's GPU lacks then run on the CPU, with a warning. Or train on the CPU: use_cpu=True."
    ),
    "MPS framework doesn't support float64": (
        "Apple's GPU has no float64: use float32 in the dataset or the data_collator (numpy's default is float64). "
        "Or train on the CPU: use_cpu=True."
    ),
}


def found() -> str:
    """The type of accelerator that torch finds, or 'cpu'. ROCm's GPUs are 'cuda', as in torch."""
    return next((kind for kind in ACCELERATORS if _is_available(kind)), "cpu")


def _is_available(kind: str) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available()
    return hasattr(torch, kind) and module_of(kind).is_available()  # plug-ins add theirs when torch is imported


def module_of(kind: str) -> Any:
    """The module of a type of accelerators, with the API of `torch.cuda`."""
    return tpu.module if kind == "tpu" else torch.get_device_module(kind)


def count(kind: str) -> int:
    """Number of accelerators of a type that this process sees; 0 for the CPU, 1 on a Mac or a TPU."""
    return 0 if kind == "cpu" else 1 if kind in ("mps", "tpu") else module_of(kind).device_count()


def count_of(device: torch.device) -> int | None:
    """Number of devices of this type that the process sees; None for types of which each process has its own."""
    return count(device.type) if device.type in ("cuda", *OTHERS) and device.type != "tpu" else None


def own_backend(kind: str) -> str:
    """The native backend of a device."""
    return next((name for name, device in ON_DEVICE.items() if device == kind), "gloo")


def empty_cache() -> None:
    """Release the memory that torch caches on the device."""
    if (module := _module()) is not None:
        module.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine ran out of memory."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY):
        return True
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def memory_used() -> int | None:
    """Bytes of the tensors on the accelerator; None without one."""
    module = _module()
    if module is None:
        return None
    return (module.current_allocated_memory if module is torch.mps else module.memory_allocated)()


def memory_peak() -> int | None:
    """Peak of `memory_used` since `reset_memory_peak`, in bytes; None if torch does not measure it."""
    module = _module()
    return None if module is None or module is torch.mps else module.max_memory_allocated()


def reset_memory_peak() -> None:
    """Start a new measurement of the peak."""
    module = _module()
    if module is not None and module is not torch.mps:
        module.reset_peak_memory_stats()


def _module() -> Any:
    kind = found()
    return None if kind == "cpu" else module_of(kind)


def _add_note(error: Exception, hint: str) -> None:
    """Add a note to an error; before Python 3.11, which does not show notes, it is logged too."""
    if hasattr(error, "add_note"):
        error.add_note(hint)
        return
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), hint]
    logger.error(hint)


@contextlib.contextmanager
def hinted() -> Iterator[None]:
    """Add a hint to an error about something that a device does not support."""
    try:
        yield
    except Exception as error:
        for text, hint in HINTS.items():
            if text in str(error) and hint not in getattr(error, "__notes__", ()):
                _add_note(error, hint)
        raise
