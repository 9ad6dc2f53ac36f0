"""Strategies: on which devices the model lives."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from hftrainer_lightning.plan import LightningPlan
from hftrainer_lightning.precision import precision_plugin


class StaysOnDevice(Strategy):
    """Leaves model and optimizer where they are when a run ends.

    Lightning moves both to the CPU; Trainer users go on to `evaluate()` and `generate()` on the device.
    """

    def teardown(self) -> None:
        """Tear down everything else."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class SingleDevice(StaysOnDevice, SingleDeviceStrategy):
    """One process on one device."""


def build_strategy(plan: LightningPlan) -> Strategy:
    """The strategy that the plan names."""
    return SingleDevice(device=torch.device(plan.device), precision_plugin=precision_plugin(plan))
