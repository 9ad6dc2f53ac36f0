"""Builds Lightning's strategy: one device, DDP, FSDP; DeepSpeed and XLA are in their own modules."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from hftrainer.parallel.fsdp import sharding
from hftrainer.parallel.plan import LightningPlan
from hftrainer_lightning import private_api
from hftrainer_lightning.strategies.precision import precision_plugin


class StaysInPlace(Strategy):
    """Keeps model and optimizer on their device when a run ends, and leaves a `device_map` model where it is.

    Lightning moves both to the CPU; Trainer users then call `evaluate()` and `generate()` on the device.
    """

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


class Prepared(StaysInPlace, ParallelStrategy):
    """A model that is sharded before Lightning begins, because its optimizer is made before."""

    plan: LightningPlan

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


class _Sharded(Prepared):
    """What both versions of FSDP share."""

    sync_each_batch = False

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Skip the gradients' reduction within an accumulation window, unless `sync_each_batch`."""
        assert self.lightning_module is not None
        with contextlib.nullcontext() if self.sync_each_batch else sharding.without_sync(self.lightning_module.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full weights, on rank 0."""
        assert self.model is not None
        return sharding.whole_model_state(self.model, self.root_device)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state by parameter names, on rank 0."""
        assert self.model is not None
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return sharding.whole_optimizer_state(self.model, optimizer, self.root_device)


class ShardedFirst(private_api.OwnPrecision, _Sharded, FSDPStrategy):
    """A model sharded by FSDP1."""

    def __init__(self, plan: LightningPlan, precision: Precision) -> None:
        self.plan = plan
        super().__init__(process_group_backend=plan.process_group_backend, timeout=timedelta(seconds=plan.timeout))
        self.precision_plugin = precision


class ShardedSecond(_Sharded, ModelParallelStrategy):
    """A model sharded by FSDP2, or split by tensor parallelism."""

    def __init__(self, plan: LightningPlan, precision: Precision) -> None:
        self.plan = plan
        super().__init__(
            data_parallel_size=plan.processes.data_processes,
            tensor_parallel_size=plan.processes.tp_size,
            save_distributed_checkpoint=False,
            process_group_backend=plan.process_group_backend,
            timeout=timedelta(seconds=plan.timeout),
        )
        self.precision_plugin = precision


def build_strategy(
    plan: LightningPlan,
    scaler: torch.amp.GradScaler | None,
    find_unused_parameters: bool = False,
    sync_each_batch: bool = False,
) -> Strategy:
    """The strategy that the plan names.

    Args:
        plan: the plan.
        scaler: the loss scaler of its precision plugin.
        find_unused_parameters: whether DDP looks for parameters that a step has not used, unless the plan sets it.
        sync_each_batch: whether ranks average gradients after each micro-batch, rather than once a step.
    """
    if plan.on_xla:
        from hftrainer_lightning.strategies.xla import build_xla_strategy

        return build_xla_strategy(plan)
    precision = precision_plugin(plan, scaler)
    if plan.sharding is not None or plan.layout.tp_size > 1:
        first = plan.sharding is not None and plan.sharding.version == 1
        sharded = (ShardedFirst if first else ShardedSecond)(plan, precision)
        sharded.sync_each_batch = sync_each_batch
        return sharded
    if plan.processes.several:
        replicas = Replicas(
            torch.device(plan.device),
            precision_plugin=precision,
            process_group_backend=plan.process_group_backend,
            timeout=timedelta(seconds=plan.timeout),
            **{"find_unused_parameters": find_unused_parameters, **plan.ddp},
        )
        replicas.sync_each_batch = sync_each_batch
        return replicas
    return SingleDevice(device=torch.device(plan.device), precision_plugin=precision)
