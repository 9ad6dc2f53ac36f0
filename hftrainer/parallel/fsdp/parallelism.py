"""A model sharded by FSDP1 or FSDP2, or split by tensor parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hftrainer.parallel.fsdp import sharding
from hftrainer.parallel.fsdp.scaler import ShardedScaler
from hftrainer.parallel.fsdp.settings import FsdpPlugin
from hftrainer.parallel.parallelism import Parallelism
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_state import DistributedType


class FsdpParallelism(Parallelism):
    """Each process has a part of each parameter; without `plan.sharding`, by tensor parallelism alone."""

    argument = "fsdp"
    flags: tuple[str, ...] = ("is_fsdp_enabled",)
    card = "FSDP"
    builder = "fsdp"
    shards = True
    needs_group_alone = True

    def __init__(self, plan: LightningPlan) -> None:
        super().__init__(plan)
        self.plugin = None if plan.sharding is None else FsdpPlugin(plan.sharding)
        if self.plugin is None:
            self.argument, self.card, self.flags = "tensor parallelism", "", ()
        self._prepared: nn.Module | None = None

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for it."""
        return super().distributed_type if self.plugin is None else DistributedType.FSDP

    def plugins(self) -> dict[str, Any]:
        """FSDP's plugin."""
        return {"fsdp_plugin": self.plugin}

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; FSDP1's finds infinite gradients in the parts of all processes."""
        first = self.plugin is not None and self.plugin.fsdp_version == 1
        return ShardedScaler(self.device.type) if first and self.plan.precision == "16-mixed" else super().make_scaler()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model, before the optimizer is made."""
        self._prepared = sharding.shard(model, self.plan)
        return self._prepared

    def prepare_another(self, model: nn.Module) -> nn.Module:
        """Shard a model besides the Trainer's; with tensor parallelism alone, replicate it."""
        return super().prepare_another(model) if self.plugin is None else sharding.shard(model, self.plan)

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights by name."""
        return sharding.whole_model_state(model, self.device)

    def whole_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Gather the parameters in the block, where the model's methods do not do it."""
        return super().whole_parameters() if self._prepared is None else sharding.whole_parameters(self._prepared)

    @property
    def gathers_in_forward(self) -> bool:
        """True, except with tensor parallelism alone, where all processes have the same batch."""
        return self.plugin is not None

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the sharded model, whichever parameters are given."""
        if self._prepared is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return sharding.clip_grad_norm(self._prepared, max_norm, norm_type)

    def without_sync(self) -> contextlib.AbstractContextManager[None] | None:
        """A block whose backward passes leave gradients local."""
        return None if self._prepared is None else sharding.without_sync(self._prepared)

    def release(self) -> None:
        """Release the sharded model."""
        self._prepared = None
