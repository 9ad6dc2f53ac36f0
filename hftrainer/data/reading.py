"""How far the training data has been read, so that a resumed run reads on with the same samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrainer.compat import peers
from hftrainer.data.loaders import PreparedDataLoader, skip_first
from hftrainer.data.randomness import RandomSources
from hftrainer.data.samplers import SkippingBatchSampler
from hftrainer.data.workers import Made


@dataclass
class Continuation:
    """Where in an epoch a resumed run begins.

    Attributes:
        position: micro-batches of the epoch that are done.
        restore_random: brings back the random states that the checkpoint was written with.
        saved: what `EpochReader.state_dict` returned then; None in checkpoints of transformers.
    """

    position: int
    restore_random: Callable[[], None]
    saved: dict[str, Any] | None


class ReadingLog:
    """What is known of the batches that a loader has read in an epoch.

    The loader reads one batch ahead, so a checkpoint needs the state from before that batch: it is read again.
    Loading processes read further ahead. They make batches in turn, so going on from the beginning of a round, with the
    states that they had then, gives each process the batches that it had.

    Args:
        loader: whose batches they are.
        sources: what the data draws from.
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
        self._turn: dict[int, bytes] = {}  # before the last batch of the first process
        self._round: dict[int, bytes] = {}  # likewise, but not within what is used at once

    def begin_epoch(self) -> None:
        """Forget the last epoch, but for loading processes that stay."""
        self.count, self.before, self.stream, self.workers_began_now = 0, None, None, False
        self._latest = self._latest if self._keeps_workers else {}
        self._turn = self._round = dict(self._latest)

    def begin_workers(self, generator: torch.Generator | None, *, now: bool) -> None:
        """Remember what the seeds of new loading processes are drawn from, and whether it is this epoch's draw."""
        self.worker_seed = torch.get_rng_state() if generator is None else generator.get_state()
        self.workers_began_now = now

    def before_read(self) -> None:
        """Remember how the next batch begins."""
        if self._workers:
            return  # it is made elsewhere
        if self.count == 1:
            self.sources.look()
        self.before = self.sources.capture()
        if self._stateful is not None and self.count:
            self.stream = self._stateful.state_dict()

    def after_read(self, made: Any) -> Any:
        """Count a batch, or those of a round; returns them without what their loading processes said."""
        if not self._reads_rounds:
            return self.pass_over(made)
        return [self._count(batch, opens=index == 0) for index, batch in enumerate(made)]

    def pass_over(self, made: Any) -> Any:
        """Count one batch."""
        return self._count(made, opens=True)

    def _count(self, made: Any, *, opens: bool) -> Any:
        """Count a batch; `opens` says that what is used next begins with it."""
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
        """All of it, in tensors and plain values."""
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

    def go_on(self, position: int, saved: dict[str, Any]) -> tuple[int, dict[int, bytes], torch.Tensor | None]:
        """How loading processes begin in a resumed run.

        Args:
            position: batches of the epoch that were used.
            saved: what `state_dict` returned.

        Returns:
            Batches to pass over without reading them; the states of the processes; and what the seeds of processes from
            an earlier epoch were drawn from, None when this epoch draws them.
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
    """Whether a dataset or loader can be brought back to where it was exactly."""
    has_state = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return has_state and not peers.loses_shuffle_buffer(data)


class EpochReader:
    """Opens the training data for each epoch, and knows what a checkpoint must hold of it.

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
        """The batches of an epoch, or those that are left of it."""
        saved = continuation.saved if continuation is not None else None
        if continuation is not None and not continuation.position:
            continuation.restore_random()
        elif saved is not None:
            self._sources.restore(saved["opened"])  # samplers and loading processes draw their seeds again
        self._opened = self._sources.capture()
        if isinstance(self.loader, PreparedDataLoader) and self.loader.log is not None:
            self.loader.log.begin_epoch()
        if continuation is None:
            return iter(_in_epoch(self.loader, epoch))
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.go_on(continuation.position, saved, continuation.restore_random)
            return iter(_in_epoch(self.loader, epoch))
        iterator = self._go_on(epoch, continuation.position, saved)
        if saved is not None and continuation.position:
            continuation.restore_random()
        return iterator

    def close(self) -> None:
        """End loading processes that stay between epochs: the next run has a loader of its own.

        torch ends them when their iterator goes. Where that is in a cycle of garbage, as a loader in a Trainer is, it
        has lost what it would tell them by, and waits 5 seconds for each.
        """
        if isinstance(self.loader, PreparedDataLoader):
            self.loader._iterator = None

    def _go_on(self, epoch: int, position: int, saved: dict[str, Any] | None) -> Iterator[Any]:
        """The batches of a loader that does not read ahead."""
        loader, skipped = self.loader, 0
        if position and saved is not None and saved["loader"] is not None and is_stateful(loader):
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
        """Bring back the generators that samplers, datasets and collators hold."""
        self._sources.restore_held(saved["held"])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, in tensors and plain values."""
        self._sources.look()
        state = {"opened": self._opened, "held": self._sources.held(), "loader": None, "exhausted": False}
        if isinstance(self.loader, PreparedDataLoader):
            assert self.loader.log is not None
            return state | {"exhausted": self.loader.at_end} | self.loader.log.state_dict()
        return state | {"loader": self.loader.state_dict() if is_stateful(self.loader) else None}


def _in_epoch(loader: Any, epoch: int) -> Any:
    if callable(getattr(loader, "set_epoch", None)):
        loader.set_epoch(epoch)
    return loader
