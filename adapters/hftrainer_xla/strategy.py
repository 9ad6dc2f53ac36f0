"""Strategies for XLA devices: a replica on each, shards of torch_xla's FSDP, or one process for all devices (SPMD)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.base.safe_loading import load_torch_file
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.weights import load_weights
from hftrainer.errors import CheckpointNotFound
from hftrainer.parallel.fsdp_settings import FsdpPlugin
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_state import DistributedType
from hftrainer.strategies.ddp import DdpStrategy
from hftrainer.strategies.strategy import CallWrite, MakeOptimizer, Strategy
from hftrainer_xla import devices, sharding

logger = logging.getLogger(__name__)

#: Kind of state → suffix of a shard's file name.
FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt"}
#: Parts that torch_xla's wrappers add to parameter names.
_WRAPPER_PARTS = re.compile(r"(_fsdp_shard|_fsdp_wrapped_module|_fpw_module)\.")


class XlaStrategy(DdpStrategy):
    """The model on one XLA device, or a replica of it on each."""

    distributed_type = DistributedType.XLA
    autocasts_own_loops = False

    def make_lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy for one XLA device, or for several."""
        from hftrainer_xla.lightning import make_lightning_strategy

        return make_lightning_strategy(self.initial_plan, shards_model=self.shards_model)

    def move_model(self, model: nn.Module, device: torch.device) -> None:
        """Move a model. Its tied weights stay tied."""
        devices.move_model(model, device)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        devices.import_torch_xla().manual_seed(seed)

    def run_recorded_xla_operations(self) -> None:
        """Compile and run the recorded operations, without waiting for them.

        XLA compiles all operations between two calls as one graph, so call this once per step.
        """
        devices.import_torch_xla().sync()

    def to_cpu(self, state: Any) -> Any:
        """A copy of the state in CPU memory."""
        return devices.to_host(state)


class XlaSpmdStrategy(XlaStrategy):
    """One process drives all devices, over which the model's tensors are sharded (SPMD)."""

    argument = "fsdp"
    card_name = "FSDP"
    flags = ("is_fsdp_xla_enabled", "is_fsdp_xla_v2_enabled")

    def plugins(self) -> dict[str, Any]:
        """FSDP's plugin."""
        assert self.initial_plan.sharding is not None
        return {"fsdp_plugin": FsdpPlugin(self.initial_plan.sharding)}

    def start(self) -> None:
        """Let this process drive all devices."""
        sharding.use_spmd()

    def prepare_model(self, trainer: Any, load_checkpoint: Callable[[], None]) -> None:
        """Shard the model in place."""
        sharding.shard(trainer.model, self.initial_plan)

    def prepare_extra_model(self, model: nn.Module) -> nn.Module:
        """Shard a model besides the Trainer's."""
        return sharding.shard(model, self.initial_plan)


class XlaFsdpStrategy(XlaSpmdStrategy):
    """Each process has a shard of the model. Checkpoints hold the shards and the full weights."""

    flags = ("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled")
    shards_model = True
    writes_shards = True

    def __init__(self, plan: LightningPlan) -> None:
        super().__init__(plan)
        self._sharded_model: Any = None
        self._decay_names: set[str] = set()

    def start(self) -> None:
        """Do nothing: torch_xla has started a process for each device."""

    def prepare_model(self, trainer: Any, load_checkpoint: Callable[[], None]) -> None:
        """Load the model, find its parameters with weight decay, and then shard it."""
        if not sharding.is_sharded(trainer.model):
            self._decay_names = set(trainer.get_decay_parameter_names(trainer.model))
        load_checkpoint()
        trainer.model = trainer.model_wrapped = self._sharded_model = sharding.shard(trainer.model, self.initial_plan)

    def decay_parameter_names(self, model: nn.Module) -> list[str] | None:
        """The names of parameters with weight decay in the sharded model, including all flattened ones."""
        if not sharding.is_sharded(model):
            return None
        parameters = [name for name, _ in model.named_parameters()]
        return [name for name in parameters if "flat_param_" in name or name_in_full_model(name) in self._decay_names]

    def gather_full_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights by name. Only rank 0 gets them."""
        return sharding.gather_full_model_state(model)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the sharded model. `parameters` is ignored."""
        if self._sharded_model is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return self._sharded_model.clip_grad_norm_(max_norm, norm_type)

    def no_sync(self, lightning_strategy: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes do not reduce gradients."""
        return super().no_sync(lightning_strategy) if self._sharded_model is None else self._sharded_model.no_sync()

    def release_model(self) -> None:
        """Release the sharded model."""
        self._sharded_model = None

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def gather_states(self, model: Any, optimizer: MakeOptimizer | None) -> None:
        """Copy this process's shards of the weights and of the optimizer state, unless `optimizer` is None."""
        metadata = model.get_shard_metadata()
        self._gathered_states = {"model": {"model": self.to_cpu(model.state_dict()), "shard_metadata": metadata}}
        if optimizer is not None:
            state = self.to_cpu(optimizer().state_dict())
            self._gathered_states["optimizer"] = {"optimizer": state, "shard_metadata": metadata}

    def checkpoint_weights(self, model: nn.Module) -> dict[str, Any]:
        """The full weights, on rank 0."""
        return self.gather_full_weights(model)

    def state_files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """No files: each process writes its shard."""
        return iter(())

    def _write_shards(self, folder: str, write: CallWrite) -> None:
        for kind, shard in self._gathered_states.items():
            torch.save(shard, os.path.join(folder, self._shard_name(kind)))

    def _shard_name(self, kind: str) -> str:
        """The file name of this process's shard, as in transformers."""
        return f"rank{self.initial_plan.processes.rank}-of-{self.initial_plan.processes.world_size}-{FILES[kind]}"

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load this process's shard of the optimizer state, and the scheduler's state."""
        path = os.path.join(folder, layout.SCHEDULER_NAME)
        if not os.path.isfile(path):
            logger.warning("%s lacks the optimizer or scheduler state: both start from scratch.", folder)
            return
        optimizer().load_state_dict(self._read_shard("optimizer", folder))
        scheduler.load_state_dict(load_torch_file(path))

    def load_weights(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load full weights into a full model, or this process's shard into a sharded model."""
        if sharding.is_sharded(model):
            return model.load_state_dict(self._read_shard("model", folder))
        return load_weights(model, folder)

    def _read_shard(self, kind: str, folder: str) -> dict[str, Any]:
        """Read this process's shard from a checkpoint.

        Raises:
            CheckpointNotFound: if the checkpoint has no shard for this rank and world size.
        """
        path = os.path.join(folder, self._shard_name(kind))
        if not os.path.isfile(path):
            raise CheckpointNotFound(f"{path} not found: resume with the number of processes that wrote {folder}.")
        return load_torch_file(path)[kind]


def name_in_full_model(name: str) -> str:
    """The name that a parameter has before torch_xla shards the model."""
    return _WRAPPER_PARTS.sub("", name.replace("_FSDP_SHARD_SEPARATOR_", "."))


def make_strategy(plan: LightningPlan) -> Strategy:
    """The strategy for a plan."""
    if plan.uses_spmd:
        return XlaSpmdStrategy(plan)
    return XlaStrategy(plan) if plan.sharding is None else XlaFsdpStrategy(plan)
