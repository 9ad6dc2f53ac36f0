"""A model on one device, or a replica of it in each process (DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hftrainer.checkpointing import names, resume
from hftrainer.checkpointing.weights import load_weights
from hftrainer.plugins import load
from hftrainer.strategies.strategy import MakeOptimizer, Strategy


class ReplicasStrategy(Strategy):
    """The whole model in each process; its states are as torch gives them."""

    def lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy for one device, or for DDP."""
        return load("lightning", "strategies.replicas").build(self.plan, settings)

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
