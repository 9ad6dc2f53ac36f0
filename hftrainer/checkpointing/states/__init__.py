"""The states of a model and its optimizer, as the strategy keeps them: one protocol, and one module for each way."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

#: Makes the optimizer, or returns the one that is there: some strategies never ask for it.
MakeOptimizer = Callable[[], torch.optim.Optimizer]


class ModelStates(ABC):
    """How a strategy gathers, saves and loads the weights of a model and the state of its optimizer.

    In several processes, all of them call each method, at the same place. A method that is not overridden does what
    suits a model that is whole in each process.
    """

    #: Whether a process may have a part only of the model, or of what its optimizer keeps.
    spread = True
    #: Whether checkpoints hold nothing of the model but parts, so that a checkpoint has no weights to save besides.
    only_parts = False
    #: Whether the schedule's state is saved and loaded with the optimizer's.
    keeps_scheduler = False

    # ---- Preparing ---------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Shard the model and load a checkpoint into it, in the order that the strategy needs.

        Args:
            model: as it is before.
            shard: shards or moves it.
            load: loads the weights of the checkpoint that the run goes on from, if any.

        Returns:
            The model that is trained.
        """

    def cast(self, batch: Any, model: nn.Module) -> Any:
        """A batch as the model takes it."""
        return batch

    def decay_parameter_names(self, model: nn.Module) -> list[str] | None:
        """The parameters with weight decay, where the model's layers no longer tell; None where they do."""
        return None

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the same buffers before an evaluation, where replicas would have them."""

    # ---- Saving ------------------------------------------------------------------------------------------------

    def gather(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather what the next checkpoint holds of the weights and, unless it is None, of the optimizer's state."""

    @contextlib.contextmanager
    @abstractmethod
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The whole weights for the files of the model: an empty dict where they stay in parts, None for its own.

        Args:
            model: the model that is trained.
            saves: whether this process writes them.
        """

    @abstractmethod
    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """File name → contents, of what one process writes into a checkpoint besides the weights of `save_model()`.

        Args:
            optimizer: whose state is saved; None when a checkpoint is to hold the model alone.
        """

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's part into a checkpoint, once the first process has made the folder."""

    def save_beside(self, folder: str, processes: Any) -> None:
        """Write what `save_model()` has not written, after it."""

    def finish(self, processes: Any) -> None:
        """Release what was gathered. Others that wait for a folder which could not be made learn so."""

    # ---- Loading -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights of a checkpoint, in place; returns what did not fit, with `missing_keys`, or None.

        Args:
            model: the model that is trained.
            folder: the checkpoint.
            only_trained: frozen weights stay as they are, as with adapters.
        """

    def load_best(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the best checkpoint of a run at its end, as `load_weights` does."""
        return self.load_weights(model, folder, only_trained=only_trained)

    @abstractmethod
    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of optimizer and schedule, in place; a warning is logged when the checkpoint has none."""


class PartStates(ModelStates):
    """What the ways have in common in which each process writes a part of its own."""

    _opened = False

    def _folder_is_there(self, processes: Any) -> bool:
        """Wait until the first process has made the folder of a checkpoint; whether it could."""
        self._opened = True
        return bool(processes.from_main(lambda: True))

    def _end_writing(self, processes: Any) -> None:
        """Tell the others, if they wait for a folder, that there is none."""
        if not self._opened:
            processes.from_main(lambda: False)
        self._opened = False
