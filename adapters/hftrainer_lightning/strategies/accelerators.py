"""Lightning's accelerator for a device, or our own for devices that Lightning does not know."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from hftrainer.parallel.devices import OTHERS, module_of
from hftrainer.plugins import load


def accelerator(kind: str) -> str | Accelerator:
    """Lightning's accelerator: its name, or one of our own."""
    if kind == "xla":
        return load("xla", "lightning").Accelerator()
    if kind not in OTHERS:
        return kind
    module = module_of(kind)

    class TorchAccelerator(Accelerator):
        """A device type with the API of `torch.cuda` (`torch.xpu`, ...)."""

        def setup_device(self, device: torch.device) -> None:
            module.set_device(device)

        def teardown(self) -> None:
            module.empty_cache()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return module.memory_stats(device)

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return int(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device(kind, index) for index in range(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return module.device_count()

        @staticmethod
        def is_available() -> bool:
            return module.is_available()

        @staticmethod
        def name() -> str:
            return kind

    return TorchAccelerator()
