"""`DeepSpeedStrategy`, the strategy for a model that DeepSpeed's engine trains."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from torch import nn

from hftrainer.checkpointing.optimizer_state import load_scheduler_or_scaler
from hftrainer.checkpointing.sharded import load_sharded_weights, prepare_for_saving
from hftrainer.compat import libraries
from hftrainer.errors import InvalidConfig, UnsupportedArgument
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_state import DistributedType
from hftrainer.strategies.strategy import CallWrite, MakeOptimizer, Strategy, cast_floating, is_deepspeed_engine
from hftrainer_deepspeed.engine_holder import EngineHolder
from hftrainer_deepspeed.settings import DeepSpeedPlugin
from hftrainer_deepspeed.start import connect

logger = logging.getLogger(__name__)


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's engine trains the model. From ZeRO-1 on, the optimizer's state is sharded.

    DeepSpeed needs model, optimizer and scheduler together, so the engine is created with them. It loads its shard of a
    checkpoint, which also holds the full weights.

    Attributes:
        holder: DeepSpeed's engine and its configuration.
    """

    argument = "deepspeed"
    flags = ("is_deepspeed_enabled",)
    card_name = "DeepSpeed"
    distributed_type = DistributedType.DEEPSPEED
    shards_model = True
    writes_shards = True
    needs_single_process_group = True
    has_fixed_accumulation = True
    autocasts_own_loops = False

    def __init__(self, plan: LightningPlan) -> None:
        super().__init__(plan)
        self.holder = EngineHolder(plan)
        self._plugin = DeepSpeedPlugin(self.holder.config)
        self._has_script_optimizer = self._saves_states = False

    def plugins(self) -> dict[str, Any]:
        """DeepSpeed's plugin."""
        return {"deepspeed_plugin": self._plugin}

    def make_lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy. DeepSpeed's engine controls scaling and all-reduce."""
        from hftrainer_deepspeed.lightning import DeepSpeedEngineStrategy

        return DeepSpeedEngineStrategy(self.initial_plan, self.holder)

    def check_optimizers(self, optimizer: Any, scheduler: Any) -> None:
        """Refuse the script's optimizer or scheduler if the configuration defines one.

        Raises:
            UnsupportedArgument: the error names the section.
        """
        self._has_script_optimizer = optimizer is not None
        sections = [name for name in ("optimizer", "scheduler") if name in self.holder.config.config]
        if (optimizer is not None and self.holder.has_config_optimizer) or (scheduler is not None and sections):
            raise UnsupportedArgument(
                f"optimizers=(...) and the {' and '.join(sections)} of the deepspeed configuration set the same: use "
                "only one. A scheduler from the script needs the script's or the Trainer's optimizer."
            )

    def start(self) -> None:
        """Let DeepSpeed use the process group."""
        connect(self.initial_plan.processes, self.device, self.initial_plan.processes.timeout, self.holder.config)

    def make_scaler(self) -> None:
        """Return None: DeepSpeed scales the loss."""

    # ---- The model ---------------------------------------------------------------------------------------------

    def prepare_evaluation(self, trainer: Any) -> None:
        """Create an engine for partitioned parameters, else move the model. Does nothing in training."""
        if self.holder.is_training:
            return
        if self.holder.config.is_zero3():
            self._complete(trainer, 0)
            trainer.model_wrapped = trainer.deepspeed = self.holder.initialize_inference(trainer.model)
        else:
            trainer._move_model_to_device(trainer.model, trainer.args.device)

    def prepare_optimizer(self, trainer: Any, max_steps: int, folder: str | None, *, makes_both: bool) -> None:
        """Create the engine with its optimizer and scheduler, and load its checkpoint.

        Optimizer and scheduler come from the configuration or the Trainer.

        Raises:
            UnsupportedArgument: if an earlier engine has used the script's optimizer.
        """
        holder = self.holder
        self._complete(trainer, max_steps)
        if trainer.deepspeed is not None and holder.is_training:
            if self._has_script_optimizer:
                raise UnsupportedArgument(
                    "optimizers: in an earlier train(), DeepSpeed removed the parameters from this optimizer: pass "
                    "optimizer_cls_and_kwargs, or create a new Trainer."
                )
            trainer.optimizer = None
        if makes_both and not (holder.has_config_optimizer or holder.has_config_scheduler):
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        elif not holder.has_config_optimizer:
            trainer.create_optimizer()
        trainer.optimizer, scheduler = holder.initialize(
            trainer.model,
            None if holder.has_config_optimizer else trainer.optimizer,
            lambda optimizer: trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer),
        )
        trainer.model_wrapped = trainer.deepspeed = holder.engine
        if scheduler is not None:
            trainer.lr_scheduler = scheduler
        else:
            # Create it after `initialize`, which drops empty parameter groups.
            trainer.create_scheduler(num_training_steps=max_steps)
        config = json.dumps(holder.config.config, indent=2, default=str)
        logger.info("DeepSpeed trains with this configuration:\n%s", config)
        if folder is not None:
            holder.load(folder, strict=not libraries.is_peft(trainer.model))
        trainer.accelerator.prepare_model(trainer.model)

    def _complete(self, trainer: Any, max_steps: int) -> None:
        """Fill in the configuration's values that depend on the run's length."""
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self.holder.complete(trainer.args, model, max_steps)
        self._plugin.hf_ds_config, self._plugin.deepspeed_config = self.holder.config, self.holder.config.config

    def prepare_extra_model(self, model: nn.Module) -> nn.Module:
        """Refuse: DeepSpeed's engine trains one model.

        Raises:
            InvalidConfig: always.
        """
        raise InvalidConfig("accelerator.prepare: DeepSpeed trains only the Trainer's model. Freeze the others.")

    @property
    def needs_all_ranks_in_forward(self) -> bool:  # type: ignore[override]
        """True with ZeRO-3."""
        return bool(self.holder.config.is_zero3())

    def gather_full_weights(self, model: Any) -> dict[str, Any]:
        """Gather the full weights of a model, or of an engine's model."""
        return self.holder.gather_full_weights(model.module if is_deepspeed_engine(model) else model)

    def cast_batch(self, batch: Any, model: nn.Module) -> Any:
        """Cast floating-point tensors of a batch to the dtype of the weights, which DeepSpeed has chosen."""
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        return cast_floating(batch, dtype)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients before clipping. DeepSpeed's engine has already clipped them."""
        if not self.holder.is_training:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return self.holder.grad_norm()

    def release_model(self) -> None:
        """Remove DeepSpeed's engine from the model."""
        self.holder.destroy()

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    @property
    def owns_scheduler(self) -> bool:  # type: ignore[override]
        """Whether the engine steps the scheduler, and saves it in its checkpoints."""
        return self.holder.has_config_scheduler or self.holder.has_config_optimizer

    def gather_states(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather partitioned weights. Without an optimizer, no states are written."""
        self._saves_states = optimizer is not None
        if self.holder.config.is_zero3():
            self._gathered_states = {"model": self._full_weights(model)}

    def checkpoint_weights(self, model: nn.Module) -> dict[str, Any]:
        """The full weights, gathered now if they were not; empty if they stay partitioned."""
        return dict(self._gathered_states["model"]) if "model" in self._gathered_states else self._full_weights(model)

    def _full_weights(self, model: nn.Module) -> dict[str, Any]:
        adapters = libraries.is_peft(model)
        if not (self.holder.saves_full_weights or adapters):
            return {}
        return prepare_for_saving(self.holder.gather_full_weights(model, only_trainable=adapters), model)

    def _write_shards(self, folder: str, write: CallWrite) -> None:
        if self._saves_states:
            self.holder.save(folder, self.initial_plan.processes)

    def save_remaining_shards(self, folder: str) -> None:
        """Write the partitioned weights too, if full weights are not saved in training."""
        if self.holder.saves_full_weights or not self.holder.is_training:
            return
        self.holder.save(folder, self.initial_plan.processes)
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is not set, so %s holds partitioned weights: merge them into "
            "one file by running python zero_to_fp32.py . in that folder.",
            folder,
        )

    def load_weights(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load the weights of any checkpoint."""
        return load_sharded_weights(model, folder, only_trainable=only_trainable)

    def load_best_model(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load the weights, and their copies in DeepSpeed's optimizer."""
        self.holder.load(folder, strict=not libraries.is_peft(model))

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the scheduler's state. The engine has loaded the optimizer's state with the weights."""
        if not self.owns_scheduler:
            load_scheduler_or_scaler(scheduler, folder, "scheduler")


def make_strategy(plan: LightningPlan) -> Strategy:
    """The strategy for a plan."""
    return DeepSpeedStrategy(plan)
