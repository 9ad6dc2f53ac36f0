"""The states of a sharded model in a checkpoint: gathered by all processes first, then written by one or by each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from hftrainer import peers
from hftrainer.checkpointing import distributed


class _Plugin(Protocol):
    @property
    def whole(self) -> bool: ...


class ShardedStates:
    """What is gathered of a sharded model while a checkpoint is written.

    Args:
        plugin: says whether checkpoints hold whole states or parts; that may change during a run. None for whole
            ones of a model that is sharded by tensor parallelism alone, whose weights nobody expects in a second file.
    """

    def __init__(self, plugin: _Plugin | None) -> None:
        self._plugin = plugin
        self._states: dict[str, Any] = {}
        self._opened = False

    @property
    def whole(self) -> bool:
        """Whether checkpoints hold whole states."""
        return self._plugin is None or self._plugin.whole

    @property
    def only_parts(self) -> bool:
        """Whether checkpoints hold nothing of the model but parts."""
        return not self.whole

    def gather(self, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Gather weights and, unless it is None, the optimizer's state; all processes must call it."""
        distributed.share_buffers(model)
        only_trained = peers.is_peft(getattr(model, "_fsdp_wrapped_module", model))
        self._states = {"model": distributed.model_state(model, whole=self.whole, only_trained=only_trained)}
        if optimizer is not None:
            self._states["optimizer"] = distributed.optimizer_state(model, optimizer, whole=self.whole)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of the first, before an evaluation."""
        distributed.share_buffers(model)

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights: those that were gathered for the checkpoint in hand, or else gathered now."""
        gathered = self._states.get("model") if self.whole else None
        # A copy of the mapping: transformers empties the one that it is given to write.
        return dict(gathered) if gathered is not None else distributed.model_state(model, whole=True)

    def whole_files(self) -> Iterator[tuple[str, Any]]:
        """File name → contents, of the whole states that were gathered."""
        if self.whole:
            for kind, state in self._states.items():
                if kind == "model" and self._plugin is None:
                    continue
                yield distributed.WHOLES[kind], state

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's parts, if checkpoints hold parts, once the first process has made the folder."""
        if self.whole:
            return
        self._opened = True
        if processes.from_main(lambda: True):
            distributed.save_parts(self._states, folder)

    def save_beside(self, folder: str, processes: Any) -> None:
        """Nothing: `save_model()` writes whole weights."""

    def finish(self, processes: Any) -> None:
        """Let go of what was gathered; others that wait for a folder which could not be made are told."""
        if not self.whole and not self._opened:
            processes.from_main(lambda: False)
        self._opened = False
        self._states = {}
