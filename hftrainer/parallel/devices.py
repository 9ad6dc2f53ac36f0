"""Detects devices, including TPUs, and provides functions that work on all of them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hftrainer.base.config_files import env_flag
from hftrainer.base.tracebacks import add_note

#: Accelerators in search order. CUDA is last, since some of torch's plug-ins imitate it.
ACCELERATORS = ("mps", "xpu", "mlu", "musa", "npu", "tpu", "cuda")
#: Devices that Lightning does not support. `tpu` is torch_tpu's; torch_xla's is `xla`.
UNSUPPORTED_BY_LIGHTNING = ("xpu", "mlu", "musa", "npu", "tpu")
#: Backends that accept only tensors on their accelerator.
DEVICE_OF_BACKEND = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu", "cncl": "mlu", "mccl": "musa", "tpu_dist": "tpu"}
#: Devices for which torch has no page-locked memory.
UNPINNED = ("cpu", "mps", "xla")
#: Text in out-of-memory errors that are not `torch.OutOfMemoryError`.
OUT_OF_MEMORY = (" out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")
#: Text in an error of torch → advice to add.
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


def cpu_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def detect_device_type() -> str:
    """The type of accelerator that torch finds, or 'cpu'. ROCm's GPUs are 'cuda', as in torch."""
    return next((device_type for device_type in ACCELERATORS if _is_available(device_type)), "cpu")


def _is_available(device_type: str) -> bool:
    if device_type == "mps":
        return torch.backends.mps.is_available()
    # Plug-ins add the module when torch is imported.
    return hasattr(torch, device_type) and device_module(device_type).is_available()


def device_module(device_type: str) -> Any:
    """The torch module for a type of accelerator, with the API of `torch.cuda`."""
    return torch_tpu if device_type == "tpu" else torch.get_device_module(device_type)


def device_count(device_type: str) -> int:
    """Number of visible devices of a type: 0 for the CPU, 1 for MPS or TPU."""
    return (
        0 if device_type == "cpu" else 1 if device_type in ("mps", "tpu") else device_module(device_type).device_count()
    )


def visible_device_count(device: torch.device) -> int | None:
    """Number of visible devices of this type; None if each process has its own (TPU)."""
    is_shared = device.type == "cuda" or (device.type in UNSUPPORTED_BY_LIGHTNING and device.type != "tpu")
    return device_count(device.type) if is_shared else None


def native_backend(device_type: str) -> str:
    """The native process group backend of a type of device."""
    return next((name for name, device in DEVICE_OF_BACKEND.items() if device == device_type), "gloo")


# ---- Memory ---------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Release the memory that torch caches on the device."""
    if (module := _module_in_use()) is not None:
        module.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine ran out of memory."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY):
        return True
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def used_memory() -> int | None:
    """Bytes of the tensors on the accelerator; None without an accelerator."""
    if (module := _module_in_use()) is None:
        return None
    return int((module.current_allocated_memory if module is torch.mps else module.memory_allocated)())


def memory_peak() -> int | None:
    """Peak of `used_memory` since `reset_memory_peak`, in bytes; None if torch does not measure it."""
    module = _module_in_use()
    return None if module in (None, torch.mps) else max(_highest_returned_peak[0], int(module.max_memory_allocated()))


def pop_memory_peak() -> int | None:
    """The peak in bytes since the last call or reset. `memory_peak` still counts from the reset."""
    module = _module_in_use()
    if module in (None, torch.mps):
        return None
    peak = int(module.max_memory_allocated())
    _highest_returned_peak[0] = max(_highest_returned_peak[0], peak)
    module.reset_peak_memory_stats()
    return peak


def reset_memory_peak() -> None:
    """Reset the peak of the device's memory."""
    _highest_returned_peak[0] = 0
    if (module := _module_in_use()) not in (None, torch.mps):
        module.reset_peak_memory_stats()


#: The highest peak since the reset that `pop_memory_peak` has returned, as the only item.
_highest_returned_peak = [0]


def _module_in_use() -> Any:
    device_type = detect_device_type()
    return None if device_type == "cpu" else device_module(device_type)


@contextlib.contextmanager
def error_hints() -> Iterator[None]:
    """Add advice to errors about operations that the device does not support."""
    try:
        yield
    except Exception as error:
        for text, hint in HINTS.items():
            if text in str(error):
                add_note(error, hint)
        raise


# ---- TPUs: torch_xla, whose device is `xla`, and its successor torch_tpu --------------------------------------------

INSTALL_TORCH_XLA = "pip install 'hftrainer[tpu]' (torch_xla 2.9 with torch 2.9)"
INSTALL_TORCH_TPU = "pip install 'hftrainer[torch-tpu]' (torch_tpu, for torch 2.11 to 2.15)"
#: Environment variables of machines with a TPU.
_TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")
#: Variable with the network addresses of all TPU processes. It must be the same in each of them.
TPU_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076")


@functools.cache
def count_tpu_chips() -> int:
    """Number of TPU chips on this machine's PCI bus, by the rule of torch_xla (`num_available_chips`).

    Simpler checks give false positives: Google's virtual network cards and disks have the same vendor id, /dev/vfio/*
    also exists for GPUs that are passed through, and /dev/accel* for other accelerators.
    """
    vendors = (path for path in _PCI_DEVICES.glob("*/vendor") if path.read_text().strip() == _GOOGLE)
    return sum((path.parent / "device").read_text().strip() in _TPUS for path in vendors)


def is_xla_requested() -> bool:
    """Whether the machine has an XLA device, or the user requests one. `USE_TORCH_XLA=0` disables it."""
    if not env_flag("USE_TORCH_XLA", True):
        return False
    return any(map(os.environ.get, ("PJRT_DEVICE", *_TPU_VARIABLES))) or count_tpu_chips() > 0


def unused_tpu_message() -> str | None:
    """Advice if a TPU was expected but torch does not find it. None otherwise, and with `USE_TORCH_XLA=0`.

    `_TPU_VARIABLES` are not checked: a machine without a TPU may set them to use a remote one.
    """
    is_requested = os.environ.get("PJRT_DEVICE") == "TPU"
    if not env_flag("USE_TORCH_XLA", True) or not (is_requested or count_tpu_chips()):
        return None
    return (
        f"{'PJRT_DEVICE=TPU asks for a TPU' if is_requested else 'This machine has a TPU'}, but torch finds none: "
        f"{INSTALL_TORCH_XLA}, or, for TPU v4 and later, {INSTALL_TORCH_TPU}. Or set use_cpu=True to train on the CPU."
    )


def has_torch_xla() -> bool:
    """Whether torch_xla is installed. Does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


def uses_xla() -> bool:
    """Whether training runs on XLA, unless `use_cpu` is set."""
    return is_xla_requested() and has_torch_xla()


class _TorchTpu:
    """The API of `torch.cuda`, for torch_tpu.

    `torch.tpu` lacks functions for memory, and most others raise unless `torch.accelerator` calls them.
    """

    _RENAMED = {"current_device": "current_device_index", "set_device": "set_device_index"}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.accelerator, self._RENAMED.get(name, name))

    def is_available(self) -> bool:
        """Whether torch's accelerator is a TPU of torch_tpu."""
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "tpu") else None
        return accelerator is not None and accelerator.type == "tpu" and torch.accelerator.is_available()

    def is_initialized(self) -> bool:
        """Whether this process holds a TPU. No other process can then use it."""
        return self.is_available() and torch.tpu.is_initialized()  # type: ignore[attr-defined]

    def get_rng_state(self) -> torch.Tensor:
        """The state of the device's generator."""
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from `get_rng_state`."""
        self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        # torch.accelerator has no random states, and torch.tpu.get_rng_state raises since torch 2.13.
        return torch.tpu.default_generators[torch.accelerator.current_device_index()]  # type: ignore[attr-defined]


torch_tpu = _TorchTpu()
