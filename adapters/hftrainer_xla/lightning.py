"""Strategies and precision plugins for XLA: one device, or a replica or shard on each of several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.plugins import TorchCheckpointIO, XLACheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from torch import distributed
from torch.overrides import TorchFunctionMode

from hftrainer.parallel.plan import LightningPlan
from hftrainer_lightning.precision import ForwardAutocast, PlainPrecision
from hftrainer_lightning.private_api.strategies import LaunchedXLAStrategy, PrecisionFromPlan
from hftrainer_lightning.strategies import PreparedStrategy
from hftrainer_xla import devices as xla


class Accelerator(XLAAccelerator):
    """The XLA devices that the plan names. Lightning's class requests their number from a metadata server."""

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """True: the plan names XLA only if it is available."""
        return True

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        """1: each process has one device."""
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number, unchanged."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """A list of `devices` devices. Strategies get their device from the plan."""
        return [torch.device("xla", index) for index in range(int(devices))]

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The device's memory statistics; empty on torch_xla's CPU, which lacks them."""
        import torch_xla.core.xla_model as xm

        try:
            return {name: float(value) for name, value in xm.get_memory_info(device).items()}
        except RuntimeError:
            return {}


class _ReplicaPrecision(PlainPrecision):
    """Averages the gradients over the replicas before they are clipped."""

    reduce: Callable[[Any], None] | None = None

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients, which are complete by now."""
        if self.reduce is not None:
            self.reduce(optimizer)


class XLAForwardAutocast(_ReplicaPrecision, ForwardAutocast):
    """Autocast to bfloat16 around the model's `forward`, with float32 outputs."""

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """Torch's autocast for XLA, extended to attention."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.autocast("xla", dtype=dtype))
        stack.enter_context(_Attention(dtype))
        return stack


class _Attention(TorchFunctionMode):
    """Casts the inputs of attention. Rotary embeddings may return queries and keys in float32, but not values.

    Args:
        dtype: the dtype to cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            args = tuple(map(self._cast, args))
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_floating else value


class _CpuCheckpointIO(XLACheckpointIO):
    """Writes states from CPU memory. Lightning's class turns tuples, such as random states, into lists."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint."""
        TorchCheckpointIO.save_checkpoint(self, xla.to_host(checkpoint), path, storage_options)


class SingleXla(PrecisionFromPlan, PreparedStrategy, SingleDeviceXLAStrategy):
    """One process on one XLA device, or on all devices by SPMD."""

    def __init__(self, precision: Precision) -> None:
        super().__init__(device=xla.device(), checkpoint_io=_CpuCheckpointIO())
        self.precision_plugin = precision


class XlaReplicas(PrecisionFromPlan, PreparedStrategy, LaunchedXLAStrategy):
    """A replica of the model on each device. torch_xla has started the processes.

    Args:
        plan: has the ranks and the device.
        precision: averages the gradients.
    """

    def __init__(self, plan: LightningPlan, precision: _ReplicaPrecision) -> None:
        super().__init__(checkpoint_io=_CpuCheckpointIO())
        # Lightning gets the ranks from us, as on other devices.
        self.cluster_environment = None
        self._processes = plan.processes
        self.precision_plugin = precision
        precision.reduce = self._average_gradients

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return xla.device()

    def setup(self, trainer: Any) -> None:
        """Broadcast the weights of rank 0, then set up."""
        self._broadcast_weights()
        super().setup(trainer)

    def _broadcast_weights(self) -> None:
        """Broadcast the weights of rank 0."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            value = tensor.detach().cpu()
            distributed.broadcast(value, 0)
            tensor.data.copy_(value)

    def setup_distributed(self) -> None:
        """Do nothing: the Trainer has connected the processes."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader unchanged: it moves its batches."""
        return dataloader

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        self._processes.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank 0."""
        return self._processes.broadcast_from_main(lambda: obj)

    def reduce(self, output: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor or number, reduced over all ranks."""
        kind = {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower())
        return self._processes.reduce(torch.as_tensor(output), kind)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, without gradients: `(processes, ...)`."""
        return self._processes.gather(tensor.detach().unsqueeze(0))

    def _average_gradients(self, optimizer: Any) -> None:
        import torch_xla.core.xla_model as xm

        xm.reduce_gradients(optimizer)


class ShardedXla(XlaReplicas):
    """A model sharded by torch_xla's FullyShardedDataParallel, whose backward pass averages the gradients."""

    shards_model = True

    def __init__(self, plan: LightningPlan, precision: _ReplicaPrecision) -> None:
        super().__init__(plan, precision)
        precision.reduce = None

    def _broadcast_weights(self) -> None:
        """Do nothing: each rank has its own shard."""


def make_lightning_strategy(plan: LightningPlan, *, shards_model: bool) -> LightningStrategy:
    """Build the strategy.

    Gradients of replicas are averaged once per step, without DDP, those of shards in the backward pass.
    """
    is_mixed = plan.precision == "bf16-mixed"
    precision: Any = XLAForwardAutocast("bf16-mixed", "xla") if is_mixed else _ReplicaPrecision()
    if shards_model:
        return ShardedXla(plan, precision)
    return XlaReplicas(plan, precision) if plan.processes.is_distributed else SingleXla(precision)
