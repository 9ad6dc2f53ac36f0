"""Lightning's strategy for a model in the hands of DeepSpeed's engine, and its precision plugin."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from hftrainer.parallel.deepspeed.run import DeepSpeedRun
from hftrainer.parallel.plan import LightningPlan
from hftrainer_lightning import private_api
from hftrainer_lightning.strategies.make import Prepared
from hftrainer_lightning.strategies.precision import PlainSteps


class EngineSteps(PlainSteps):
    """Leaves backward, clipping and the step to DeepSpeed's engine.

    Args:
        run: with the engine.
    """

    def __init__(self, run: DeepSpeedRun) -> None:
        super().__init__()
        self._run = run

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, and at the end of the window the step."""
        self._run.backward(tensor, closes=model.hooks.micro_batches.window.closes, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Forward and backward; the engine has stepped then."""
        closure()
        private_api.announce_gradients(self, model, optimizer)
        optimizer.step()  # which torch's schedules count
        self.skipped = self._run.skipped


class PartitionedByDeepSpeed(Prepared, DeepSpeedStrategy):
    """A model in the hands of DeepSpeed's engine, which is made before Lightning begins."""

    def __init__(self, plan: LightningPlan, run: DeepSpeedRun) -> None:
        self.plan = plan
        self._run = run
        super().__init__(config=run.config.config, process_group_backend=plan.process_group_backend)
        self.precision_plugin = EngineSteps(run)

    def setup_environment(self) -> None:
        """As for replicas; Lightning's own refuses all but CUDA here."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """The processes have met already."""
        self.set_world_ranks()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Show Lightning's callbacks the optimizer."""
        super(DeepSpeedStrategy, self).setup_optimizers(trainer)

    def block_backward_sync(self) -> Any:
        """Nothing: the engine is told where a window ends."""
        return contextlib.nullcontext()

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Windows of micro-batches are the Trainer's."""
        return False

    @property
    def deepspeed_engine(self) -> Any:
        """The engine."""
        return self._run.engine
