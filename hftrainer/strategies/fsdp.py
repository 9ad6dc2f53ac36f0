"""`FsdpStrategy`: shards a model with FSDP1 or FSDP2, or splits it by tensor parallelism."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hftrainer.checkpointing import layout, optimizer_state, sharded
from hftrainer.compat import libraries
from hftrainer.parallel.fsdp_settings import FsdpPlugin
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_group import cpu_group
from hftrainer.parallel.process_state import DistributedType
from hftrainer.plugins import import_adapter
from hftrainer.strategies import fsdp_sharding as sharding
from hftrainer.strategies.strategy import CallWrite, MakeOptimizer, Strategy


class FsdpStrategy(Strategy):
    """Shards the model with FSDP or, without `plan.sharding`, splits it by tensor parallelism.

    Checkpoints hold full states, or a shard from each process. The plugin decides, and scripts may change it during a
    run. With tensor parallelism alone the states are full, and the weights are not written to a second file.
    """

    argument = "fsdp"
    flags: tuple[str, ...] = ("is_fsdp_enabled",)
    card_name = "FSDP"
    shards_model = True
    needs_single_process_group = True

    def __init__(self, plan: LightningPlan) -> None:
        super().__init__(plan)
        self.plugin = None if plan.sharding is None else FsdpPlugin(plan.sharding)
        if self.plugin is None:
            self.argument, self.card_name, self.flags = "tensor parallelism", "", ()
        self._prepared_model: nn.Module | None = None

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for this strategy."""
        return super().distributed_type if self.plugin is None else DistributedType.FSDP

    def plugins(self) -> dict[str, Any]:
        """FSDP's plugin."""
        return {"fsdp_plugin": self.plugin}

    def make_lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy for FSDP1 or FSDP2."""
        return import_adapter("lightning", "fsdp").make_lightning_strategy(self.initial_plan, settings)

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler. With FSDP1, it checks the gradient shards of all ranks for infinity."""
        is_v1 = self.plugin is not None and self.plugin.fsdp_version == 1
        needs_sharded_scaler = is_v1 and self.initial_plan.precision == "16-mixed"
        return ShardedScaler(self.device.type) if needs_sharded_scaler else super().make_scaler()

    def prepare_model(self, trainer: Any, load_checkpoint: Callable[[], None]) -> None:
        """Shard the model before the optimizer is made, then load this process's weights."""
        trainer.model = trainer.model_wrapped = self._prepared_model = sharding.shard(trainer.model, self.initial_plan)
        load_checkpoint()

    def prepare_evaluation(self, trainer: Any) -> None:
        """Shard the model and broadcast the buffers of rank 0, as with replicas."""
        super().prepare_evaluation(trainer)
        sharded.broadcast_buffers(trainer.model)

    def prepare_extra_model(self, model: nn.Module) -> nn.Module:
        """Shard an additional model, or replicate it with tensor parallelism alone."""
        return super().prepare_extra_model(model) if self.plugin is None else sharding.shard(model, self.initial_plan)

    def gather_full_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights by name."""
        return sharded.model_state(model, full=True)

    def summon_full_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Gather the parameters for the block, unless the model's methods gather them."""
        return sharding.summon_full_parameters(self._prepared_model)

    @property
    def needs_all_ranks_in_forward(self) -> bool:  # type: ignore[override]
        """True, except with tensor parallelism alone, where all processes have the same batch."""
        return self.plugin is not None

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the sharded model, ignoring `parameters`."""
        if self._prepared_model is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return sharding.clip_grad_norm(self._prepared_model, max_norm, norm_type)

    def no_sync(self, lightning_strategy: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes do not reduce gradients."""
        return sharding.no_sync(self._prepared_model)

    def release_model(self) -> None:
        """Release the sharded model."""
        self._prepared_model = None

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    @property
    def writes_shards(self) -> bool:  # type: ignore[override]
        """Whether each process writes its shard."""
        return self.initial_plan.saves_dcp or (self.plugin is not None and not self.plugin.has_full_states)

    saves_only_shards = writes_shards

    def gather_states(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather the weights and, unless `optimizer` is None, the optimizer's state."""
        sharded.broadcast_buffers(model)
        if self.initial_plan.saves_dcp:
            self._gathered_states = sharded.states_for_dcp(model, None if optimizer is None else optimizer())
            return
        is_full = not self.writes_shards
        only_trainable = libraries.is_peft(getattr(model, "_fsdp_wrapped_module", model))
        self._gathered_states = {"model": sharded.model_state(model, full=is_full, only_trainable=only_trainable)}
        if optimizer is not None:
            self._gathered_states["optimizer"] = sharded.optimizer_state(model, optimizer(), full=is_full)

    def checkpoint_weights(self, model: nn.Module) -> dict[str, Any]:
        """The weights gathered for the current checkpoint, or weights gathered now."""
        gathered = None if self.writes_shards else self._gathered_states.get("model")
        # Copy the mapping, since transformers empties the one that it writes.
        return dict(gathered) if gathered is not None else sharded.model_state(model, full=True)

    def state_files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """Yields the file name and the contents of each full state that was gathered."""
        for kind, state in self._gathered_states.items():
            if not (self.writes_shards or (kind == "model" and self.plugin is None)):
                yield layout.FULL_STATE_FILES[kind], state

    def _write_shards(self, folder: str, write: CallWrite) -> None:
        plan = self.initial_plan
        save = sharded.save_dcp if plan.saves_dcp else sharded.save_shards
        group = cpu_group(plan.processes.timeout, is_separate=True) if plan.async_checkpoint else None
        write(functools.partial(save, folder=folder, group=group), self._gathered_states)

    def load_weights(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load this process's shard of the weights of any checkpoint."""
        return sharded.load_sharded_weights(model, folder, only_trainable=only_trainable)

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load this process's shard of the states of any checkpoint."""
        optimizer_state.load_optimizer_and_scheduler(folder, model, optimizer(), scheduler, is_sharded=True)


class ShardedScaler(ShardedGradScaler):
    """Skips a step on all ranks when gradients are infinite on one of them.

    torch counts the ranks with infinite gradients in a tensor of shape `(1,)`, but its fused optimizers need 0 or 1
    of shape `()`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and check whether they are finite on all ranks."""
        super().unscale_(optimizer)
        found_inf = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found_inf.update({device: value.reshape(()).clamp(max=1) for device, value in found_inf.items()})
