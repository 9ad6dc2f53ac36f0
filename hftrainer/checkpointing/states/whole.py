"""States of a model that is whole in each process: a single one, or a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hftrainer.checkpointing import names, resume
from hftrainer.checkpointing.states import MakeOptimizer, ModelStates
from hftrainer.checkpointing.weights import load_weights


class WholeStates(ModelStates):
    """The states as torch gives them.

    Args:
        saving: a context in which callbacks provide the weights under the names to save, as the engine's `saving`.
    """

    spread = False

    def __init__(self, saving: Callable[[nn.Module], Any]) -> None:
        self._saving = saving

    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Let the strategy prepare the model, which has the checkpoint's weights already."""
        shard()
        return model

    @contextlib.contextmanager
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The model's own weights, unless a callback such as ModelPruning has them under other names."""
        if not saves:
            yield None
            return
        with self._saving(model) as (weights, _):
            yield weights

    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """The optimizer's state."""
        if optimizer is not None:
            yield names.OPTIMIZER_NAME, optimizer().state_dict()

    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights of any checkpoint."""
        return load_weights(model, folder)

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of any checkpoint."""
        resume.load_optimizer_and_scheduler(folder, model, optimizer(), scheduler)
