"""The reading position in the training data, so that a resumed run continues with the same samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrainer.compat import peers
from hftrainer.compat.reading import fitting
from hftrainer.data.loaders import PreparedDataLoader, skip_first
from hftrainer.data.randomness import PLACE, RandomSources
from hftrainer.data.samplers import SkippingBatchSampler
from hftrainer.data.workers import Made


@dataclass
class Continuation:
    """Where in an epoch a resumed run begins.

    Attributes:
        position: micro-batches of the epoch that are done.
        restore_random: restores the random states of the checkpoint.
        saved: the saved `EpochReader.state_dict`; None in checkpoints of transformers.
    """

    position: int
    restore_random: Callable[[], None]
    saved: dict[str, Any] | None


class ReadingLog:
    """Records the batches that a loader has read in an epoch, and the random states between them.

    The loader reads one batch ahead, so a checkpoint needs the state from before that batch: it is read again.
    Workers read further ahead. They take turns, so resuming at the beginning of a round, with the states that they
    had then, gives each worker the same batches again.

    Args:
        loader: the loader.
        sources: the generators that the data uses.
    """

    def __init__(self, loader: PreparedDataLoader, sources: RandomSources) -> None:
        self.sources = sources
        self.count = 0
        self.before: dict[str, Any] | None = None
        self.stream: Any = None
        self.worker_seed: torch.Tensor | None = None
        self.workers_began_now = False
        self._workers = loader.num_workers
        self._keeps_workers = loader.persistent_workers
        self._reads_rounds = loader.delivery.round_size is not None
        streams = isinstance(loader.dataset, IterableDataset)
        self._streams = streams
        self._stateful: Any = loader.source if streams and not self._workers and is_stateful(loader.source) else None
        self._latest: dict[int, bytes] = {}
        self._turn: dict[int, bytes] = {}  # before the last batch of the first worker
        self._round: dict[int, bytes] = {}  # the same, but only at the start of a round that is used at once

    def begin_epoch(self) -> None:
        """Forget the last epoch, except the states of persistent workers."""
        self.count, self.before, self.stream, self.workers_began_now = 0, None, None, False
        self._latest = self._latest if self._keeps_workers else {}
        self._turn = self._round = dict(self._latest)

    def begin_workers(self, generator: torch.Generator | None, *, now: bool) -> None:
        """Record the generator state that new workers' seeds come from, and whether this epoch draws them."""
        self.worker_seed = torch.get_rng_state() if generator is None else generator.get_state()
        self.workers_began_now = now

    def before_read(self) -> None:
        """Record the states before the next batch."""
        if self._workers:
            return  # a worker makes the batch
        if self.count == 1:
            self.sources.look()
        self.before = self.sources.capture()
        if self._stateful is not None and self.count:
            self.stream = self._stateful.state_dict()

    def after_read(self, made: Any) -> Any:
        """Count a batch, or those of a round; returns them without the workers' states."""
        if not self._reads_rounds:
            return self.count_skipped(made)
        return [self._count(batch, opens=index == 0) for index, batch in enumerate(made)]

    def count_skipped(self, made: Any) -> Any:
        """Count one batch."""
        return self._count(made, opens=True)

    def _count(self, made: Any, *, opens: bool) -> Any:
        """Count a batch; `opens` if it is the first of what is used at once."""
        if not isinstance(made, Made):
            self.count += 1
            return made
        if self.count % self._workers == 0 and not self._streams:
            self._turn = dict(self._latest)
        if opens:
            self._round = self._turn
        self._latest[made.worker] = made.states
        self.count += 1
        return made.batch

    def state_dict(self) -> dict[str, Any]:
        """The record, in tensors and plain values."""
        state: dict[str, Any] = {"before": self.before, "stream": self.stream}
        if self._workers:
            state["workers"] = {
                "count": self._workers,
                "seed": self.worker_seed,
                "began_now": self.workers_began_now,
                "round": _unpacked(self._round),
                "latest": _unpacked(self._latest),
            }
        return state

    def resume_at(self, position: int, saved: dict[str, Any]) -> tuple[int, dict[int, bytes], torch.Tensor | None]:
        """How workers begin in a resumed run.

        Args:
            position: batches of the epoch that were used.
            saved: what `state_dict` returned.

        Returns:
            Batches to skip without reading them; the workers' states; and the generator state from which the seeds of
            an earlier epoch's workers were drawn, None when this epoch draws them.
        """
        workers = saved["workers"]
        self._latest = _packed(workers["round" if position else "latest"]) if position or self._keeps_workers else {}
        self._turn = self._round = dict(self._latest)
        self.count = 0 if self._streams else position - position % self._workers
        earlier = self._keeps_workers and not (position and workers["began_now"])
        return self.count, dict(self._latest), workers["seed"] if earlier else None


def _packed(states: dict[int, Any]) -> dict[int, bytes]:
    return {worker: pickle.dumps(state) for worker, state in states.items()}


def _unpacked(states: dict[int, bytes]) -> dict[int, Any]:
    return {worker: pickle.loads(state) for worker, state in states.items()}


def is_stateful(data: Any) -> bool:
    """Whether a dataset or loader can restore its exact position."""
    has_state = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return has_state and not peers.loses_shuffle_buffer(data)


class EpochReader:
    """Opens the training data for each epoch, and provides its state for checkpoints.

    Args:
        loader: the user's loader, or a `PreparedDataLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._sources = RandomSources(loader=loader)
        self._opened: dict[str, Any] | None = None
        if isinstance(loader, PreparedDataLoader):
            loader.log = ReadingLog(loader, self._sources)

    def open(self, epoch: int, continuation: Continuation | None = None) -> Iterator[Any]:
        """The batches of an epoch, or the rest of them when resuming."""
        saved = continuation.saved if continuation is not None else None
        if continuation is not None and not continuation.position:
            continuation.restore_random()
        elif saved is not None:
            self._sources.restore(saved["opened"])  # samplers and workers draw their seeds again
        self._opened = self._sources.capture()
        if isinstance(self.loader, PreparedDataLoader) and self.loader.log is not None:
            self.loader.log.begin_epoch()
        if continuation is None:
            return iter(_in_epoch(self.loader, epoch))
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.resume_at(continuation.position, saved, continuation.restore_random)
            return iter(_in_epoch(self.loader, epoch))
        iterator = self._resumed(epoch, continuation.position, saved)
        if saved is not None and continuation.position:
            continuation.restore_random()
        return iterator

    def close(self) -> None:
        """End persistent workers: the next run has its own loader.

        torch ends them when their iterator is deleted. If the iterator is in a reference cycle, as with a loader in a
        Trainer, torch can no longer signal the workers by then, and waits 5 seconds for each.
        """
        if isinstance(self.loader, PreparedDataLoader):
            self.loader._iterator = None

    def _resumed(self, epoch: int, position: int, saved: dict[str, Any] | None) -> Iterator[Any]:
        """The batches of a loader that does not read ahead."""
        loader, skipped = self.loader, 0
        if position and saved is not None and saved.get("loader") is not None and is_stateful(loader):
            with fitting(PLACE):
                loader.load_state_dict(saved["loader"])
        elif position:
            loader, skipped = skip_first(loader, position)
        iterator = iter(_in_epoch(loader, epoch))
        if isinstance(getattr(loader, "batch_sampler", None), SkippingBatchSampler):
            loader.batch_sampler.catch_up()
        for _ in range(skipped):
            next(iterator, None)
        return iterator

    def restore_held(self, saved: dict[str, Any]) -> None:
        """Restore the generators of samplers, datasets and collators."""
        with fitting(PLACE):
            self._sources.restore_held(saved["held"])

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in tensors and plain values."""
        self._sources.look()
        state = {"opened": self._opened, "held": self._sources.held(), "loader": None, "exhausted": False}
        if isinstance(self.loader, PreparedDataLoader):
            assert self.loader.log is not None
            return state | {"exhausted": self.loader.position.is_last} | self.loader.log.state_dict()
        return state | {"loader": self.loader.state_dict() if is_stateful(self.loader) else None}


def _in_epoch(loader: Any, epoch: int) -> Any:
    if callable(getattr(loader, "set_epoch", None)):
        loader.set_epoch(epoch)
    return loader
