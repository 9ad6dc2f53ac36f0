"""TPUs: whether this machine has one, and the device `tpu` of torch_tpu, the successor of torch_xla."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

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
