"""`accelerator.gradient_state`: where accelerate tells whether gradients are exchanged, and how far a loader is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class GradientState:
    """What accelerate's `GradientState` tells, of the loaders that were prepared.

    Args:
        loaders: those that are still there.
        processes: those with batches of their own.
        num_steps: micro-batches per optimizer step.
        closes: whether the micro-batch in hand ends an optimizer step.
    """

    def __init__(self, loaders: Iterable[Any], processes: int, num_steps: int, closes: Callable[[], bool]) -> None:
        self._loaders = loaders
        self._processes = processes
        self._closes = closes
        self.num_steps = num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch in hand ends an optimizer step."""
        return self._closes()

    @property
    def active_dataloader(self) -> Any:
        """The loader whose iteration began last, of those that go on; None when there is none."""
        return max((loader for loader in self._loaders if loader.started), key=lambda each: each.started, default=None)

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.at_end

    @property
    def remainder(self) -> int:
        """Samples in the last round of all processes, 0 when it is full; -1 when that is not known."""
        loader = self.active_dataloader
        size = None if loader is None else loader.samples_per_batch
        try:
            return -1 if size is None else len(loader.dataset) % (size * self._processes)
        except TypeError:  # a stream
            return -1
