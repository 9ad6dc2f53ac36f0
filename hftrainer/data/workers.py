"""Workers that send their random states to the main process with each batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from hftrainer.data.randomness import RandomSources


class Made(NamedTuple):
    """What a worker sends. A named tuple, so that `pin_memory` reaches the batch in it.

    Attributes:
        batch: the batch.
        worker: index of the worker.
        states: its random states after the batch, pickled.
    """

    batch: Any
    worker: int
    states: bytes


class TracedCollator:
    """Collates in a worker, and sends the worker's random states along.

    Args:
        collate_fn: makes the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._sources: RandomSources | None = None

    def sources(self) -> RandomSources:
        """The generators that the worker uses."""
        if self._sources is None:
            info = get_worker_info()
            assert info is not None
            self._sources = RandomSources(dataset=info.dataset, collate_fn=self.collate_fn)
        return self._sources

    def __call__(self, samples: Any) -> Made:
        """Collate."""
        batch, info = self.collate_fn(samples), get_worker_info()
        assert info is not None
        self.sources().look()
        return Made(batch, info.id, pickle.dumps(self.sources().capture()))


class RestoredWorker:
    """A `worker_init_fn` that restores each worker's random states from the run that is resumed.

    Args:
        worker_init_fn: the user's, called first.
        collator: the workers' collator.
        states: random states by worker index; a worker without one starts with a new seed.
    """

    def __init__(
        self,
        worker_init_fn: Callable[[int], None] | None,
        collator: TracedCollator,
        states: Mapping[int, bytes],
    ) -> None:
        self.worker_init_fn = worker_init_fn
        self.collator = collator
        self.states = states

    def __call__(self, worker: int) -> None:
        """Initialize one worker."""
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        if worker in self.states:
            self.collator.sources().restore(pickle.loads(self.states[worker]))
