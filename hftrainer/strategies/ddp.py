"""`DdpStrategy`: one device, or DDP: a replica of the model in each process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from hftrainer.checkpointing import layout, optimizer_state
from hftrainer.checkpointing.weights import load_weights
from hftrainer.plugins import import_adapter
from hftrainer.strategies.strategy import CallWrite, MakeOptimizer, Strategy


class DdpStrategy(Strategy):
    """Trains on one device, or with DDP: each process has the whole model. The states have torch's format."""

    def make_lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy for one device, or for DDP."""
        return import_adapter("lightning", "strategies").make_ddp_or_single_device(self.initial_plan, settings)

    def no_sync(self, lightning_strategy: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes do not reduce gradients: that of DDP, which wraps the model in a run."""
        block = getattr(lightning_strategy, "block_backward_sync", None)
        return contextlib.nullcontext() if block is None else block()

    @property
    def saves_only_shards(self) -> bool:  # type: ignore[override]
        """Whether checkpoints hold the model only in DCP format, here with a single shard."""
        return self.initial_plan.saves_dcp

    def gather_states(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Keep model and optimizer, since only the process that writes needs their states."""
        self._gathered_states = {"model": model, "optimizer": optimizer}

    def state_files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """Yields the file name and the state of the optimizer."""
        if optimizer is not None and not self.initial_plan.saves_dcp:
            yield layout.OPTIMIZER_NAME, optimizer().state_dict()

    def write_full_states(self, folder: str, write: CallWrite) -> None:
        """Write the states in DCP format, if the plan asks for it."""
        if self.initial_plan.saves_dcp:
            # Import lazily, since this imports torch's FSDP.
            from hftrainer.checkpointing import sharded

            model = self._gathered_states["model"]
            optimizer = self._gathered_states["optimizer"]
            states = sharded.states_for_dcp(model, None if optimizer is None else optimizer(), shards=False)
            write(functools.partial(sharded.save_dcp, folder=folder, is_only_writer=True), states)

    def load_weights(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load the weights of any checkpoint."""
        return load_weights(model, folder)

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of optimizer and scheduler from a checkpoint of any format."""
        optimizer_state.load_optimizer_and_scheduler(folder, model, optimizer(), scheduler)
