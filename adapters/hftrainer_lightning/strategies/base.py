"""What our strategies share: model and optimizer stay where the Trainer put them; and which accelerator they use."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, device_module
from hftrainer.parallel.plan import LightningPlan
from hftrainer.plugins import load


class StrategySettings(NamedTuple):
    """What a strategy needs beside the plan.

    Attributes:
        scaler: the loss scaler of the precision plugin, with float16; kept as long as the Trainer.
        find_unused_parameters: whether DDP looks for parameters that a step has not used, unless the plan sets it.
        sync_each_batch: whether ranks average gradients after each micro-batch, rather than once a step.
    """

    scaler: torch.amp.GradScaler | None
    find_unused_parameters: bool = False
    sync_each_batch: bool = False


class StaysInPlace(Strategy):
    """Keeps model and optimizer on their device when a run ends, and leaves a `device_map` model where it is.

    Lightning moves both to the CPU; Trainer users then call `evaluate()` and `generate()` on the device.
    """

    #: Whether each process has only a part of the model or of the optimizer's state.
    shards = False

    def model_to_device(self) -> None:
        """Move the model, unless it is spread over devices already."""
        if getattr(getattr(self.lightning_module, "model", None), "hf_device_map", None) is None:
            super().model_to_device()  # type: ignore[safe-super]

    def teardown(self) -> None:
        """Tear down everything else, and release wrappers, which would keep the process group alive."""
        self.precision_plugin.teardown()
        self.model = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class Prepared(StaysInPlace, ParallelStrategy):
    """A model that is sharded before Lightning begins, because its optimizer is made before."""

    plan: LightningPlan
    shards = True

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up all but the model."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.plan.device)


def accelerator(kind: str) -> str | Accelerator:
    """Lightning's accelerator: its name, or one of our own."""
    if kind == "xla":
        return load("xla", "lightning").Accelerator()
    if kind not in UNSUPPORTED_BY_LIGHTNING:
        return kind
    module = device_module(kind)

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
