"""A model on XLA devices: a replica on each, shards of torch_xla's FSDP, or one process for all devices (SPMD)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hftrainer.parallel.fsdp.settings import FsdpPlugin
from hftrainer.parallel.parallelism import Parallelism
from hftrainer.parallel.process_state import DistributedType
from hftrainer.parallel.xla import devices, sharding


class XlaParallelism(Parallelism):
    """The model on one XLA device, or a replica of it on each."""

    argument = "fsdp"  # for the subclasses, which shard
    builder = "xla"
    distributed_type = DistributedType.XLA
    autocasts_own_loops = False

    def move(self, model: nn.Module, device: torch.device) -> None:
        """Move a model; its tied weights stay tied."""
        devices.move_model(model, device)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        devices.seed(seed)

    def end_batch(self) -> None:
        """Run the recorded operations."""
        devices.sync()

    def to_cpu(self, state: Any) -> Any:
        """A copy of the state in CPU memory."""
        return devices.to_host(state)


class _XlaSharding(XlaParallelism):
    card = "FSDP"

    def plugins(self) -> dict[str, Any]:
        """FSDP's plugin."""
        assert self.plan.sharding is not None
        return {"fsdp_plugin": FsdpPlugin(self.plan.sharding)}

    def prepare_another(self, model: nn.Module) -> nn.Module:
        """Shard a model besides the Trainer's."""
        return sharding.shard(model, self.plan)


class XlaSpmdParallelism(_XlaSharding):
    """One process drives all devices, which shard the model's tensors; the compiler does the rest."""

    flags = ("is_fsdp_xla_enabled", "is_fsdp_xla_v2_enabled")

    def start(self) -> None:
        """Let this process drive all devices."""
        sharding.use_spmd()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place."""
        return sharding.shard(model, self.plan)


class XlaFsdpParallelism(_XlaSharding):
    """Each process has a part of the model, on its device."""

    flags = ("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled")
    shards = True
    _prepared: Any = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model, before the optimizer is made."""
        self._prepared = sharding.shard(model, self.plan)
        return self._prepared

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights by name; only rank 0 gets them."""
        return sharding.whole_model_state(model)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the sharded model, whichever parameters are given."""
        if self._prepared is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return self._prepared.clip_grad_norm_(max_norm, norm_type)

    def without_sync(self) -> contextlib.AbstractContextManager[None] | None:
        """A block whose backward passes leave gradients local."""
        return None if self._prepared is None else self._prepared.no_sync()

    def release(self) -> None:
        """Release the sharded model."""
        self._prepared = None
