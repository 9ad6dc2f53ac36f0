"""TPUs: whether this machine has one, and the device `tpu` of torch_tpu, the successor of torch_xla."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from hftrainer.parallel.config_files import env_flag

INSTALL = "pip install 'hftrainer[tpu]' (torch_xla 2.9, and the torch that it needs, 2.9)"
SUCCESSOR = "pip install 'hftrainer[torch-tpu]' (torch_tpu, for torch 2.11 to 2.15)"
#: Environment variables of machines with a TPU.
_OF_TPUS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")
#: Set before the processes start, the same for all: where each connects to the network of the TPUs.
ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076")


@functools.cache
def chips() -> int:
    """Number of TPU chips on this machine's PCI bus, by the rule of torch_xla (`num_available_chips`).

    Less would find TPUs where there are none: network cards and disks of Google's virtual machines have its vendor id
    too, /dev/vfio/* is also there for GPUs that are passed through, and /dev/accel* for other accelerators.
    """
    vendors = (path for path in _PCI_DEVICES.glob("*/vendor") if path.read_text().strip() == _GOOGLE)
    return sum((path.parent / "device").read_text().strip() in _TPUS for path in vendors)


def _declined() -> bool:
    return not env_flag("USE_TORCH_XLA", True)


def wants_xla() -> bool:
    """Whether the machine or the user indicates an XLA device; `USE_TORCH_XLA=0` means no."""
    if _declined():
        return False
    return bool(os.environ.get("PJRT_DEVICE")) or any(map(os.environ.get, _OF_TPUS)) or chips() > 0


def unused_tpu() -> str | None:
    """What to do if a run on the CPU was meant for a TPU; None if not, or with `USE_TORCH_XLA=0`.

    `_OF_TPUS` do not decide: with them, a machine without a TPU names one that it uses from afar.
    """
    asked = os.environ.get("PJRT_DEVICE") == "TPU"
    if _declined() or not (asked or chips()):
        return None
    return (
        f"{'PJRT_DEVICE=TPU asks for a TPU' if asked else 'This machine has a TPU'}, but torch finds none: {INSTALL}, "
        f"or, for TPU v4 and later, {SUCCESSOR}. Or set use_cpu=True to train on the CPU."
    )


def has_torch_xla() -> bool:
    """Whether torch_xla can be imported; does not import it."""
    return importlib.util.find_spec("torch_xla") is not None


def uses_xla() -> bool:
    """Whether training runs on XLA, unless `use_cpu` is set."""
    return wants_xla() and has_torch_xla()


class _TorchTpu:
    """The API of `torch.cuda`, for torch_tpu.

    `torch.tpu` lacks the functions for memory, and most others raise unless torch itself calls them, as
    `torch.accelerator` does.
    """

    _RENAMED = {"current_device": "current_device_index", "set_device": "set_device_index"}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.accelerator, self._RENAMED.get(name, name))

    def is_available(self) -> bool:
        """Whether there is a TPU, and torch_tpu has given it its name."""
        found = torch.accelerator.current_accelerator() if hasattr(torch, "tpu") else None
        return found is not None and found.type == "tpu" and torch.accelerator.is_available()

    def in_use(self) -> bool:
        """Whether this process holds a TPU, which no other process can use then."""
        return self.is_available() and torch.tpu.is_initialized()  # type: ignore[attr-defined]

    def get_rng_state(self) -> torch.Tensor:
        """The state of the device's generator."""
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `get_rng_state` returned."""
        self._generator().set_state(state)

    def _generator(self) -> torch.Generator:
        # torch.accelerator has no random states in torch 2.13, from which on torch.tpu.get_rng_state raises.
        return torch.tpu.default_generators[torch.accelerator.current_device_index()]  # type: ignore[attr-defined]


module = _TorchTpu()
