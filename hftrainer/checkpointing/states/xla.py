"""States of a model sharded by torch_xla: a file from each process, beside the whole weights."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.checkpointing import names
from hftrainer.checkpointing.states import MakeOptimizer, PartStates
from hftrainer.checkpointing.weights import load_weights
from hftrainer.compat.reading import read_torch
from hftrainer.errors import CheckpointNotFound

logger = logging.getLogger(__name__)

#: Kind of state → suffix of a part's file name.
FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt"}


#: What torch_xla adds to the name of a parameter that it shards.
_OF_WRAPPERS = re.compile(r"(_fsdp_shard|_fsdp_wrapped_module|_fpw_module)\.")
_DOT = "_FSDP_SHARD_SEPARATOR_"


def _part_name(kind: str, rank: int, size: int) -> str:
    """The file name of a process's part, as in transformers."""
    return f"rank{rank}-of-{size}-{FILES[kind]}"


def is_sharded(model: nn.Module) -> bool:
    """Whether torch_xla has sharded a model."""
    return hasattr(model, "get_shard_metadata")


def name_in_whole_model(name: str) -> str:
    """The name that a parameter has before torch_xla shards the model."""
    return _OF_WRAPPERS.sub("", name.replace(_DOT, "."))


class XlaStates(PartStates):
    """The states of a model on XLA devices, gathered while a checkpoint is written.

    Args:
        processes: the processes of the run.
        to_cpu: copies a state to CPU memory.
        whole_weights: gathers the whole weights; all processes must call it.
        decayed: finds the parameters with weight decay in a model that is not yet sharded.
    """

    def __init__(
        self,
        processes: Any,
        to_cpu: Callable[[Any], Any],
        whole_weights: Callable[[nn.Module], dict[str, Any]],
        decayed: Callable[[nn.Module], list[str]],
    ) -> None:
        self._processes = processes
        self._to_cpu = to_cpu
        self._gather = whole_weights
        self._find_decayed = decayed
        self._parts: dict[str, Any] = {}
        self._decayed: set[str] = set()

    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Load and find the parameters with weight decay while the model is whole, then shard."""
        if not is_sharded(model):
            self._decayed = set(self._find_decayed(model))
        load()
        return shard()

    def decay_parameter_names(self, model: nn.Module) -> list[str] | None:
        """Their names in the sharded model; flattened parameters always have weight decay."""
        if not is_sharded(model):
            return None
        names = [name for name, _ in model.named_parameters()]
        return [name for name in names if "flat_param_" in name or name_in_whole_model(name) in self._decayed]

    def gather(self, model: Any, optimizer: MakeOptimizer | None) -> None:
        """Take this process's part of the weights and, unless `optimizer` is None, of its state."""
        metadata = model.get_shard_metadata()
        self._parts = {"model": {"model": self._to_cpu(model.state_dict()), "shard_metadata": metadata}}
        if optimizer is not None:
            state = self._to_cpu(optimizer().state_dict())
            self._parts["optimizer"] = {"optimizer": state, "shard_metadata": metadata}

    @contextlib.contextmanager
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The whole weights, on rank 0."""
        yield self._gather(model)

    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """None: each process writes its part."""
        return iter(())

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's parts, once rank 0 has created the folder."""
        if not self._folder_is_there(processes):
            return
        for kind, part in self._parts.items():
            torch.save(part, os.path.join(folder, _part_name(kind, processes.rank, processes.world_size)))

    def finish(self, processes: Any) -> None:
        """Release the parts."""
        self._end_writing(processes)
        self._parts = {}

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load this process's part of the optimizer's state, and the schedule's."""
        path = os.path.join(folder, names.SCHEDULER_NAME)
        if not os.path.isfile(path):
            logger.warning("%s lacks the optimizer or scheduler state: both start from scratch.", folder)
            return
        optimizer().load_state_dict(self._read("optimizer", folder))
        scheduler.load_state_dict(read_torch(path))

    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load whole weights into a whole model, or this process's part into its part of a sharded model."""
        if is_sharded(model):
            return model.load_state_dict(self._read("model", folder))
        return load_weights(model, folder)

    def _read(self, kind: str, folder: str) -> dict[str, Any]:
        """Read the part of this process in a checkpoint.

        Raises:
            CheckpointNotFound: when there is none for this rank and number of processes.
        """
        path = os.path.join(folder, _part_name(kind, self._processes.rank, self._processes.world_size))
        if not os.path.isfile(path):
            raise CheckpointNotFound(f"{path} not found: resume with the number of processes that wrote {folder}.")
        return read_torch(path)[kind]
