"""Saving and loading the states of a model and its optimizer: one protocol, and one module for each strategy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

#: Returns the optimizer, made at the first call: some strategies never need it.
MakeOptimizer = Callable[[], torch.optim.Optimizer]


class ModelStates(ABC):
    """How a strategy gathers, saves and loads the weights of a model and the state of its optimizer.

    In distributed runs, all processes call each method, at the same point. The defaults suit a model that is whole in
    each process.
    """

    #: Whether a process may have only a part of the model, or of its optimizer's state.
    spread = True
    #: Whether checkpoints hold the model only in parts, so that there are no other weights to save.
    only_parts = False
    #: Whether the schedule's state is saved and loaded with the optimizer's.
    keeps_scheduler = False

    # ---- Preparing ---------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Shard the model and load a checkpoint into it, in the order that the strategy needs.

        Args:
            model: the model before sharding.
            shard: shards it, or moves it to the device.
            load: loads the weights of the checkpoint that the run resumes from, if any.

        Returns:
            The model that is trained.
        """

    def cast(self, batch: Any, model: nn.Module) -> Any:
        """A batch in the types that the model needs."""
        return batch

    def decay_parameter_names(self, model: nn.Module) -> list[str] | None:
        """The parameters with weight decay, if the sharded layers no longer show them; None if they do."""
        return None

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the same buffers before an evaluation, as replicas would have them."""

    # ---- Saving ------------------------------------------------------------------------------------------------

    def gather(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather the weights for the next checkpoint and, unless `optimizer` is None, the optimizer's state."""

    @contextlib.contextmanager
    @abstractmethod
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The whole weights to write: an empty dict if they stay in parts, None for the model's own state dict.

        Args:
            model: the model that is trained.
            saves: whether this process writes them.
        """

    @abstractmethod
    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """File name → contents, for the files that one process writes besides the weights of `save_model()`.

        Args:
            optimizer: its state is saved; None for a checkpoint of only the model.
        """

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's part into a checkpoint, once rank 0 has created the folder."""

    def save_beside(self, folder: str, processes: Any) -> None:
        """Write what `save_model()` did not write, after it."""

    def finish(self, processes: Any) -> None:
        """Release what was gathered. If the folder could not be created, tell the waiting ranks."""

    # ---- Loading -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights of a checkpoint, in place; returns missing and unexpected keys, or None.

        Args:
            model: the model that is trained.
            folder: the checkpoint.
            only_trained: do not load frozen weights, as with adapters.
        """

    def load_best(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the best checkpoint of a run at its end, as `load_weights` does."""
        return self.load_weights(model, folder, only_trained=only_trained)

    @abstractmethod
    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of optimizer and schedule, in place; logs a warning when the checkpoint has none."""


class PartStates(ModelStates):
    """The common part of strategies in which each process writes its own part."""

    _opened = False

    def _folder_is_there(self, processes: Any) -> bool:
        """Wait until rank 0 has created the checkpoint folder; returns whether it succeeded."""
        self._opened = True
        return bool(processes.from_main(lambda: True))

    def _end_writing(self, processes: Any) -> None:
        """Tell ranks that still wait for the folder that there is none."""
        if not self._opened:
            processes.from_main(lambda: False)
        self._opened = False
