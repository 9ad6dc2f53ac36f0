"""Seeds of a process and of its data workers, which send their random states to the main process with each batch."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
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


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices); `deterministic` also restricts torch to deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and allow deterministic kernels only.

    Sets the environment variables that CUDA and flash attention read.

    Args:
        seed: seed of all generators.
        warn_only: warn about an operation without a deterministic kernel instead of raising.
    """
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:  # noqa: ARG001 - torch passes the id
    """Seed a loading process; the `worker_init_fn` of the training loader."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
