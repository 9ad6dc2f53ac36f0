"""A model that DeepSpeed's engine trains."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from hftrainer.errors import WrongConfig
from hftrainer.parallel.deepspeed.plugin import DeepSpeedPlugin
from hftrainer.parallel.deepspeed.run import DeepSpeedRun, is_engine
from hftrainer.parallel.deepspeed.start import connect
from hftrainer.parallel.parallelism import Parallelism
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_state import DistributedType


class DeepSpeedParallelism(Parallelism):
    """DeepSpeed's engine trains the model; from ZeRO-1 on each process has a part of the optimizer's state.

    `DeepSpeedPreparation` makes that engine, since DeepSpeed needs model, optimizer and schedule together.

    Attributes:
        run: DeepSpeed's engine and its configuration.
    """

    argument = "deepspeed"
    flags = ("is_deepspeed_enabled",)
    card = "DeepSpeed"
    builder = "deepspeed"
    distributed_type = DistributedType.DEEPSPEED
    shards = True
    needs_group_alone = True
    fixes_accumulation = True
    autocasts_own_loops = False

    def __init__(self, plan: LightningPlan) -> None:
        super().__init__(plan)
        self.run = DeepSpeedRun(plan)

    def plugins(self) -> dict[str, Any]:
        """DeepSpeed's plugin."""
        return {"deepspeed_plugin": DeepSpeedPlugin(self.run)}

    def start(self) -> None:
        """Let DeepSpeed use the process group."""
        connect(self.plan.processes, self.device, timedelta(seconds=self.plan.timeout), self.run.config)

    def make_scaler(self) -> None:
        """None: DeepSpeed scales the loss."""

    def prepare_another(self, model: nn.Module) -> nn.Module:
        """Refuse: DeepSpeed's engine trains one model.

        Raises:
            WrongConfig: always.
        """
        raise WrongConfig("accelerator.prepare: deepspeed trains one model, the Trainer's: freeze the others.")

    def module_to_train(self, model: nn.Module) -> nn.Module:
        """DeepSpeed's engine."""
        return self.run.engine

    @property
    def gathers_in_forward(self) -> bool:
        """True with ZeRO-3."""
        return self.run.config.is_zero3()

    def whole_weights(self, model: Any) -> dict[str, Any]:
        """Gather the full weights, of the engine's model or another."""
        return self.run.whole_weights(model.module if is_engine(model) else model)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients, which DeepSpeed's engine has clipped already."""
        if not self.run.is_training:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return self.run.grad_norm()

    def release(self) -> None:
        """Remove DeepSpeed's engine from the model."""
        self.run.destroy()
