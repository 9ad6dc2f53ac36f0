"""States of a model sharded by FSDP or tensor parallelism: gathered by all processes, written by one or by each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from hftrainer.checkpointing import distributed, resume
from hftrainer.checkpointing.states import MakeOptimizer, PartStates
from hftrainer.checkpointing.weights import load_sharded_weights
from hftrainer.compat import peers


class _Plugin(Protocol):
    @property
    def whole(self) -> bool: ...


class ShardedStates(PartStates):
    """The states of a sharded model, gathered while a checkpoint is written.

    Args:
        plugin: decides whether checkpoints hold whole states or parts; that may change during a run. None for a model
            sharded only by tensor parallelism: states are whole, and the weights are not written to a second file.
    """

    def __init__(self, plugin: _Plugin | None) -> None:
        self._plugin = plugin
        self._states: dict[str, Any] = {}

    @property
    def whole(self) -> bool:
        """Whether checkpoints hold whole states."""
        return self._plugin is None or self._plugin.whole

    @property
    def only_parts(self) -> bool:  # type: ignore[override]
        """Whether checkpoints hold the model only in parts."""
        return not self.whole

    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Shard first: each process loads its part."""
        model = shard()
        load()
        return model

    def gather(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather the weights and, unless `optimizer` is None, its state."""
        distributed.share_buffers(model)
        only_trained = peers.is_peft(getattr(model, "_fsdp_wrapped_module", model))
        self._states = {"model": distributed.model_state(model, whole=self.whole, only_trained=only_trained)}
        if optimizer is not None:
            self._states["optimizer"] = distributed.optimizer_state(model, optimizer(), whole=self.whole)

    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of rank 0, as replicas would have them."""
        distributed.share_buffers(model)

    @contextlib.contextmanager
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The weights gathered for the current checkpoint, or weights gathered now."""
        gathered = self._states.get("model") if self.whole else None
        # A copy of the mapping: transformers empties the one that it writes.
        yield dict(gathered) if gathered is not None else distributed.model_state(model, whole=True)

    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """The whole states that were gathered."""
        if self.whole:
            for kind, state in self._states.items():
                if kind == "model" and self._plugin is None:
                    continue
                yield distributed.WHOLES[kind], state

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's parts, if checkpoints hold parts, once rank 0 has created the folder."""
        if not self.whole and self._folder_is_there(processes):
            distributed.save_parts(self._states, folder)

    def finish(self, processes: Any) -> None:
        """Release the states."""
        if not self.whole:
            self._end_writing(processes)
        self._states = {}

    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights of any checkpoint, each process its part."""
        return load_sharded_weights(model, folder, only_trained=only_trained)

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of any checkpoint, each process its part."""
        resume.load_optimizer_and_scheduler(folder, model, optimizer(), scheduler, sharded=True)
