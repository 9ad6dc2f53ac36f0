"""Lightning's strategies for one device and for DDP, their base classes, and the accelerator."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, Strategy as LightningStrategy

from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, device_module
from hftrainer.parallel.plan import LightningPlan
from hftrainer.plugins import import_adapter
from hftrainer_lightning.precision import make_precision_plugin
from hftrainer_lightning.private_api.strategies import BackwardWithinForwardDDPStrategy


class StrategySettings(NamedTuple):
    """The settings that a strategy needs besides the plan.

    Attributes:
        scaler: the loss scaler of the precision plugin, with float16; it exists as long as the Trainer.
        find_unused_parameters: whether DDP looks for parameters that a step has not used, unless the plan sets it.
    """

    scaler: torch.amp.GradScaler | None
    find_unused_parameters: bool = False


class KeepDeviceStrategy(LightningStrategy):
    """Keeps model and optimizer on their device when a run ends.

    A `device_map` model is never moved. Lightning moves both to the CPU, but Trainer users then call `evaluate()`
    and `generate()` on the device.
    """

    #: Whether each process has only a part of the model or of the optimizer's state.
    shards_model = False

    def model_to_device(self) -> None:
        """Move the model, unless a `device_map` already spreads it over devices."""
        if getattr(getattr(self.lightning_module, "model", None), "hf_device_map", None) is None:
            super().model_to_device()  # type: ignore[safe-super]

    def teardown(self) -> None:
        """Tear down without moving the model, and release wrappers that keep the process group alive."""
        self.precision_plugin.teardown()
        self.model = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class PreparedStrategy(KeepDeviceStrategy):
    """A model that is moved, and maybe sharded, before Lightning starts.

    Its optimizer is created before that, too.
    """

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up all but the model."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()


class PlannedDeviceStrategy(KeepDeviceStrategy):
    """The plan chooses the device. Lightning would count visible devices, but a launcher may show each process one."""

    plan: LightningPlan

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.plan.device)


class ShardedModelStrategy(PlannedDeviceStrategy, PreparedStrategy, ParallelStrategy):
    """A model that is sharded before Lightning starts."""

    shards_model = True


class SingleDevice(KeepDeviceStrategy, SingleDeviceStrategy):
    """One process on one device."""


class TrainerDDPStrategy(PlannedDeviceStrategy, BackwardWithinForwardDDPStrategy):
    """DDP for a run: a replica of the model in each process, which stays on the device of the plan."""

    def determine_ddp_device_ids(self) -> list[int] | None:
        """The index of the GPU; None on other devices.

        Lightning would otherwise open a CUDA stream there.
        """
        return super().determine_ddp_device_ids() if self.root_device.type == "cuda" else None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch within `fit` with the module itself, as the Trainer does.

        DDP's wrapper would broadcast the buffers of rank 0.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)


def make_ddp_or_single_device(plan: LightningPlan, settings: StrategySettings) -> LightningStrategy:
    """The strategy for one device, or for DDP."""
    precision = make_precision_plugin(plan, settings.scaler)
    if not plan.processes.is_distributed:
        return SingleDevice(device=torch.device(plan.device), precision_plugin=precision)
    strategy = TrainerDDPStrategy(
        precision_plugin=precision,
        process_group_backend=plan.process_group_backend,
        timeout=plan.processes.timeout,
        **{"find_unused_parameters": settings.find_unused_parameters, **plan.ddp},
    )
    strategy.plan = plan
    return strategy


class TorchAccelerator(Accelerator):
    """A device type with the API of `torch.cuda` (`torch.xpu`, ...).

    Lightning calls some of these methods on the class, so each device type needs a subclass.
    """

    device_type: ClassVar[str]

    def setup_device(self, device: torch.device) -> None:
        """Make it the current device."""
        device_module(self.device_type).set_device(device)

    def teardown(self) -> None:
        """Release cached memory."""
        device_module(self.device_type).empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The memory statistics of a device."""
        return dict(device_module(self.device_type).memory_stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """The number of devices."""
        return int(devices)

    @classmethod
    def get_parallel_devices(cls, devices: int) -> list[torch.device]:
        """The first `devices` devices."""
        return [torch.device(cls.device_type, index) for index in range(devices)]

    @classmethod
    def auto_device_count(cls) -> int:
        """The number of devices in this machine."""
        return int(device_module(cls.device_type).device_count())

    @classmethod
    def is_available(cls) -> bool:
        """Whether there is a device."""
        return bool(device_module(cls.device_type).is_available())

    @classmethod
    def name(cls) -> str:
        """The device type."""
        return cls.device_type


def make_accelerator(device_type: str) -> Any:
    """Lightning's accelerator: its name, or an object of our class."""
    if device_type == "xla":
        return import_adapter("xla", "lightning").Accelerator()
    if device_type not in UNSUPPORTED_BY_LIGHTNING:
        return device_type
    attributes = {"device_type": device_type, "__module__": __name__}
    return type("TorchAccelerator", (TorchAccelerator,), attributes)()
