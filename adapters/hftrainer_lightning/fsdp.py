"""Strategies for a model that FSDP shards, or tensor parallelism splits, before Lightning starts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import FSDPStrategy, Strategy as LightningStrategy
from torch.optim import Optimizer

from hftrainer.checkpointing import sharded
from hftrainer.parallel.plan import LightningPlan
from hftrainer_lightning.precision import make_precision_plugin
from hftrainer_lightning.private_api.strategies import PrecisionFromPlan, SharedMeshStrategy
from hftrainer_lightning.strategies import ShardedModelStrategy, StrategySettings


class _FsdpStrategy(ShardedModelStrategy):
    """Base of the strategies for both versions of FSDP."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full weights, on rank 0."""
        assert self.model is not None
        return sharded.model_state(self.model, full=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state by parameter names, on rank 0."""
        assert self.model is not None
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return sharded.optimizer_state(self.model, optimizer, full=True)


class Fsdp1Strategy(PrecisionFromPlan, _FsdpStrategy, FSDPStrategy):
    """A model sharded by FSDP1."""

    def __init__(self, plan: LightningPlan, precision: Precision) -> None:
        self.plan = plan
        super().__init__(process_group_backend=plan.process_group_backend, timeout=plan.processes.timeout)
        self.precision_plugin = precision


class Fsdp2Strategy(_FsdpStrategy, SharedMeshStrategy):
    """A model sharded by FSDP2, or split by tensor parallelism."""

    def __init__(self, plan: LightningPlan, precision: Precision) -> None:
        self.plan = plan
        super().__init__(
            data_parallel_size=plan.processes.data_world_size,
            tensor_parallel_size=plan.processes.tp_size,
            save_distributed_checkpoint=False,
            process_group_backend=plan.process_group_backend,
            timeout=plan.processes.timeout,
        )
        self.precision_plugin = precision


def make_lightning_strategy(plan: LightningPlan, settings: StrategySettings) -> LightningStrategy:
    """The Lightning strategy for a plan with FSDP or tensor parallelism."""
    is_fsdp1 = plan.sharding is not None and plan.sharding.version == 1
    return (Fsdp1Strategy if is_fsdp1 else Fsdp2Strategy)(plan, make_precision_plugin(plan, settings.scaler))
