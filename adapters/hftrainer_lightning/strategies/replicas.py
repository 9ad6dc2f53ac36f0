"""Strategies for one device, and for a replica of the model in each process (DDP)."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from hftrainer.parallel.plan import LightningPlan
from hftrainer_lightning.strategies.base import StaysInPlace, StrategySettings
from hftrainer_lightning.strategies.precision import precision_plugin


class SingleDevice(StaysInPlace, SingleDeviceStrategy):
    """One process on one device."""


class Replicas(StaysInPlace, DDPStrategy):
    """A replica of the model in each process.

    Args:
        device: of this process. Lightning counts visible devices, but a launcher may show each process only its own.
        settings: keywords of `DDPStrategy`.
    """

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(**settings)
        self._device = device

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._device

    def determine_ddp_device_ids(self) -> list[int] | None:
        """The index of a GPU; on other devices None, for which Lightning would open a CUDA stream."""
        return super().determine_ddp_device_ids() if self.root_device.type == "cuda" else None

    sync_each_batch = False

    def block_backward_sync(self) -> Any:
        """Skip the all-reduce for all micro-batches of a step but the last, unless `sync_each_batch`."""
        return contextlib.nullcontext() if self.sync_each_batch else super().block_backward_sync()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation within `fit`, by the module itself, as in the Trainer.

        DDP's wrapper would give all processes the buffers of the first.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)


def build(plan: LightningPlan, settings: StrategySettings) -> Strategy:
    """The strategy."""
    device, precision = torch.device(plan.device), precision_plugin(plan, settings.scaler)
    if not plan.processes.several:
        return SingleDevice(device=device, precision_plugin=precision)
    replicas = Replicas(
        device,
        precision_plugin=precision,
        process_group_backend=plan.process_group_backend,
        timeout=timedelta(seconds=plan.timeout),
        **{"find_unused_parameters": settings.find_unused_parameters, **plan.ddp},
    )
    replicas.sync_each_batch = settings.sync_each_batch
    return replicas
