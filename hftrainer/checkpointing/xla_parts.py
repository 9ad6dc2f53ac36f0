"""The states of a model that torch_xla has sharded over processes: a file of each, beside the whole weights."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.checkpointing import names
from hftrainer.checkpointing.reading import read_torch
from hftrainer.checkpointing.weights import load_weights
from hftrainer.errors import CheckpointNotFound

logger = logging.getLogger(__name__)

#: What a part holds → the end of its file's name.
FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt"}


#: What torch_xla puts into the name of a parameter that it shards.
_OF_WRAPPERS = re.compile(r"(_fsdp_shard|_fsdp_wrapped_module|_fpw_module)\.")
_DOT = "_FSDP_SHARD_SEPARATOR_"


def _part_name(kind: str, rank: int, size: int) -> str:
    """As transformers names the file of a process."""
    return f"rank{rank}-of-{size}-{FILES[kind]}"


def is_sharded(model: nn.Module) -> bool:
    """Whether torch_xla has sharded a model."""
    return hasattr(model, "get_shard_metadata")


class XlaParts:
    """What is gathered of a model on XLA devices while a checkpoint is written, as `ShardedStates` does for torch's.

    Args:
        processes: the processes of the run.
        on_host: a state in the host's memory.
        whole_weights: gathers the whole weights; all processes must call it.
    """

    #: Whole weights stand beside the parts.
    only_parts = False

    def __init__(
        self,
        processes: Any,
        on_host: Callable[[Any], Any],
        whole_weights: Callable[[nn.Module], dict[str, Any]],
    ) -> None:
        self._processes = processes
        self._on_host = on_host
        self._gather = whole_weights
        self._parts: dict[str, Any] = {}
        self._opened = False
        self._decayed: set[str] = set()

    def note_decay(self, decayed: list[str]) -> None:
        """Remember the parameters with weight decay, while the model is whole and its layers can be told apart."""
        self._decayed = set(decayed)

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Their names in the sharded model; parameters that were joined into one all have it."""
        return [name for name, _ in model.named_parameters() if "flat_param_" in name or self._decays(name)]

    def _decays(self, name: str) -> bool:
        return _OF_WRAPPERS.sub("", name.replace(_DOT, ".")) in self._decayed

    def gather(self, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Take this process's part of the weights and, unless it is None, of the optimizer's state."""
        metadata = model.get_shard_metadata()
        self._parts = {"model": {"model": self._on_host(model.state_dict()), "shard_metadata": metadata}}
        if optimizer is not None:
            state = self._on_host(optimizer.state_dict())
            self._parts["optimizer"] = {"optimizer": state, "shard_metadata": metadata}

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights, in the first process."""
        return self._gather(model)

    def whole_files(self) -> Iterator[tuple[str, Any]]:
        """None: each process writes its part."""
        return iter(())

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's parts, once the first process has made the folder."""
        self._opened = True
        if not processes.from_main(lambda: True):
            return
        for kind, part in self._parts.items():
            torch.save(part, os.path.join(folder, _part_name(kind, processes.rank, processes.world_size)))

    def save_beside(self, folder: str, processes: Any) -> None:
        """Nothing: `save_model()` writes whole weights."""

    def finish(self, processes: Any) -> None:
        """Let go of what was taken; others that wait for a folder which could not be made are told."""
        if not self._opened:
            processes.from_main(lambda: False)
        self._opened = False
        self._parts = {}

    def share_buffers(self, model: nn.Module) -> None:
        """Nothing: each process evaluates with its own, as in transformers."""

    def load_optimizer_and_scheduler(self, folder: str, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Load this process's part of the optimizer's state, and the scheduler's; what is not there is said."""
        path = os.path.join(folder, names.SCHEDULER_NAME)
        if not os.path.isfile(path):
            logger.warning("%s holds no optimizer or scheduler state: both start anew.", folder)
            return
        optimizer.load_state_dict(self._read("optimizer", folder))
        scheduler.load_state_dict(read_torch(path))

    def load_weights(self, model: nn.Module, folder: str) -> Any:
        """Load the weights: whole ones into a model that is still whole, this process's part into its part."""
        if is_sharded(model):
            return model.load_state_dict(self._read("model", folder))
        return load_weights(model, folder)

    def _read(self, kind: str, folder: str) -> dict[str, Any]:
        """What a checkpoint has of this process.

        Raises:
            CheckpointNotFound: when there is none, or one of another number of processes.
        """
        path = os.path.join(folder, _part_name(kind, self._processes.rank, self._processes.world_size))
        if not os.path.isfile(path):
            raise CheckpointNotFound(f"There is no {path}: go on with as many processes as have written {folder}.")
        return read_torch(path)[kind]
