"""Lightning's strategy for a model that DeepSpeed's engine trains, and its precision plugin."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from hftrainer.parallel.plan import LightningPlan
from hftrainer_deepspeed.engine_holder import EngineHolder
from hftrainer_lightning.precision import PlainPrecision
from hftrainer_lightning.strategies import ShardedModelStrategy


class EnginePrecision(PlainPrecision):
    """Leaves backward, clipping and the step to DeepSpeed's engine.

    Args:
        holder: holds the engine.
    """

    def __init__(self, holder: EngineHolder) -> None:
        super().__init__()
        self._holder = holder

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and at the end of the accumulation window the optimizer step."""
        self._holder.backward(tensor, is_last=model.training_loop.batches.position.is_last, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Notify callbacks and the run. The engine has clipped and stepped in the backward pass."""
        # torch's schedulers count the calls of `optimizer.step`, which does nothing.
        super().optimizer_step(optimizer, model, closure, **kwargs)
        # The engine skips a step whose gradients are not finite.
        self.has_skipped_step = bool(getattr(self._holder.engine.optimizer, "overflow", False))


class DeepSpeedEngineStrategy(ShardedModelStrategy, DeepSpeedStrategy):
    """A model that DeepSpeed's engine trains. The engine is created before Lightning starts."""

    def __init__(self, plan: LightningPlan, holder: EngineHolder) -> None:
        self.plan = plan
        self._holder = holder
        super().__init__(config=holder.config.config, process_group_backend=plan.process_group_backend)
        self.precision_plugin = EnginePrecision(holder)

    def setup_environment(self) -> None:
        """Set up as for DDP. Lightning's DeepSpeed strategy refuses devices other than CUDA."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Set only the ranks: the process group exists already."""
        self.set_world_ranks()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Expose the optimizer to Lightning's callbacks."""
        super(DeepSpeedStrategy, self).setup_optimizers(trainer)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False, as for Lightning's other strategies: the Trainer accumulates gradients."""
        return False

    @property
    def deepspeed_engine(self) -> Any:
        """The run's DeepSpeed engine."""
        return self._holder.engine
