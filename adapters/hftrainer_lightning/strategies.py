"""Strategies: on which devices the model lives."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from hftrainer_lightning.plan import LightningPlan
from hftrainer_lightning.precision import precision_plugin


class _StaysInPlace(Strategy):
    """Leaves model and optimizer where they are when a run ends, and a model spread by `device_map` when it begins.

    Lightning moves both to the CPU; Trainer users go on to `evaluate()` and `generate()` on the device.
    """

    def model_to_device(self) -> None:
        """Move the model, unless it is spread over devices already."""
        if getattr(getattr(self.lightning_module, "model", None), "hf_device_map", None) is None:
            super().model_to_device()  # type: ignore[safe-super]

    def teardown(self) -> None:
        """Tear down everything else."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class SingleDevice(_StaysInPlace, SingleDeviceStrategy):
    """One process on one device."""


class Replicas(_StaysInPlace, DDPStrategy):
    """A replica of the model in each process."""

    sync_each_batch = False

    def block_backward_sync(self) -> Any:
        """Around the micro-batches of a step but the last: keep the gradients local, unless each is to be averaged."""
        return contextlib.nullcontext() if self.sync_each_batch else super().block_backward_sync()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation within `fit`, by the module itself, as in the Trainer.

        DDP's wrapper would give all processes the buffers of the first.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)


def build_strategy(
    plan: LightningPlan,
    scaler: torch.amp.GradScaler | None,
    find_unused_parameters: bool = False,
    sync_each_batch: bool = False,
) -> Strategy:
    """The strategy that the plan names.

    Args:
        plan: the plan.
        scaler: of its precision plugin.
        find_unused_parameters: whether replicas look for parameters that a step has not used, unless the plan says it.
        sync_each_batch: whether they average their gradients after each micro-batch, rather than once a step.
    """
    precision = precision_plugin(plan, scaler)
    if plan.processes.several:
        replicas = Replicas(
            precision_plugin=precision,
            process_group_backend=plan.process_group_backend,
            timeout=timedelta(seconds=plan.timeout),
            **{"find_unused_parameters": find_unused_parameters, **plan.ddp},
        )
        replicas.sync_each_batch = sync_each_batch
        return replicas
    return SingleDevice(device=torch.device(plan.device), precision_plugin=precision)
