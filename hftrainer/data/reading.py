"""Tracks the reading position in the training data, so that a resumed run continues with the same samples."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrainer.compat import peers
from hftrainer.compat.reading import fitting
from hftrainer.data.collators import draws_nothing, holds_samples
from hftrainer.data.loaders import PreparedDataLoader, skip_first
from hftrainer.data.randomness import DATA_STATE, RandomSources, WorkerBatch
from hftrainer.data.samplers import SkippingBatchSampler, has_exact_length, set_epoch


@dataclass
class ResumePoint:
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
    Workers read further ahead, in turns. A resumed run starts at the beginning of a round, with the states that the
    workers had then, and gives each worker the same batches again.

    Args:
        loader: the loader.
        sources: the generators that the data uses.

    Attributes:
        waited: seconds that the run has waited for batches.
        collating: those of them in the collator, if `times_collator`; only without loading processes.
        transferring: seconds in which batches were moved to the device.
        times_collator: whether the collator is timed.
    """

    def __init__(self, loader: PreparedDataLoader, sources: RandomSources) -> None:
        self.sources = sources
        self.count = 0
        self.before: dict[str, Any] | None = None
        self.stream: Any = None
        self.waited = self.collating = self.transferring = self._asked = 0.0
        self.times_collator = False
        self.worker_seed: torch.Tensor | None = None
        self.draws_seed = False
        self._workers, self._keeps_workers = loader.num_workers, loader.persistent_workers
        self._reads_rounds = loader.loader_plan.round_size is not None
        self._draws = True
        self._streams = isinstance(loader.dataset, IterableDataset)
        saves_stream = self._streams and not self._workers and is_stateful(loader.source)
        self._stateful: Any = loader.source if saves_stream else None
        self._latest_states: dict[int, bytes] = {}
        #: States before the first worker made its last batch.
        self._states_before_turn: dict[int, bytes] = {}
        #: The same, for the first of the batches that are scattered together (`dispatch_batches`).
        self._states_before_round: dict[int, bytes] = {}

    def begin_epoch(self, *, draws: bool) -> None:
        """Forget the last epoch, except the states of persistent workers. `draws`: whether reading may draw numbers."""
        self.count, self.before, self.stream, self.draws_seed = 0, None, None, False
        self._draws = draws
        self._latest_states = self._latest_states if self._keeps_workers else {}
        self._states_before_turn = self._states_before_round = dict(self._latest_states)

    def begin_workers(self, generator: torch.Generator | None, *, draws_seed: bool) -> None:
        """Record the generator state before workers draw their seeds. `draws_seed`: whether this epoch draws them."""
        self.worker_seed = torch.get_rng_state() if generator is None else generator.get_state()
        self.draws_seed = draws_seed

    def before_read(self) -> None:
        """Record the states before the next batch."""
        # With workers, their states are recorded instead.
        if self._draws and not self._workers:
            if self.count == 1:
                self.sources.find_generators()
            self.before = self.sources.capture()
            if self._stateful is not None and self.count:
                self.stream = self._stateful.state_dict()
        self._asked = time.perf_counter()

    def after_read(self, made: Any) -> Any:
        """Count a batch, or the batches of a round; returns them without the workers' states."""
        self.waited += time.perf_counter() - self._asked
        if not self._reads_rounds:
            return self.count_batch(made)
        return [self.count_batch(batch, is_first=index == 0) for index, batch in enumerate(made)]

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, timed."""

        def collate(samples: Any) -> Any:
            start = time.perf_counter()
            try:
                return collate_fn(samples)
            finally:
                self.collating += time.perf_counter() - start

        return collate

    def count_batch(self, made: Any, *, is_first: bool = True) -> Any:
        """Count a batch, and record the states that its worker sent with it; returns the batch alone.

        Args:
            made: the batch, from a worker or not.
            is_first: whether it is the first of those that are scattered together.
        """
        if not isinstance(made, WorkerBatch):
            self.count += 1
            return made
        if self.count % self._workers == 0 and not self._streams:
            self._states_before_turn = dict(self._latest_states)
        if is_first:
            self._states_before_round = self._states_before_turn
        self._latest_states[made.worker] = made.states
        self.count += 1
        return made.batch

    def state_dict(self) -> dict[str, Any]:
        """The log for a checkpoint, in tensors and plain values."""
        state: dict[str, Any] = {"before": self.before, "stream": self.stream}
        if self._workers:
            kept = {"round": self._states_before_round, "latest": self._latest_states}
            state["workers"] = {
                "count": self._workers,
                "seed": self.worker_seed,
                "began_now": self.draws_seed,
                **{
                    name: {worker: pickle.loads(each) for worker, each in states.items()}
                    for name, states in kept.items()
                },
            }
        return state

    def resume_at(self, position: int, saved: dict[str, Any]) -> tuple[int, dict[int, bytes], torch.Tensor | None]:
        """The states with which the workers of a resumed run start.

        Args:
            position: batches of the epoch that were used.
            saved: what `state_dict` returned.

        Returns:
            Batches to skip without reading them; the workers' states; and the generator state from which the seeds of
            an earlier epoch's workers were drawn, None when this epoch draws them.
        """
        workers, states = saved["workers"], {}
        if position or self._keeps_workers:
            states = workers["round" if position else "latest"]
        self._latest_states = {worker: pickle.dumps(state) for worker, state in states.items()}
        self._states_before_turn = self._states_before_round = dict(self._latest_states)
        self.count = 0 if self._streams else position - position % self._workers
        earlier = self._keeps_workers and not (position and workers["began_now"])
        return self.count, dict(self._latest_states), workers["seed"] if earlier else None


def may_draw(loader: PreparedDataLoader) -> bool:
    """Whether reading a batch may draw random numbers: not with samples, samplers and collators known to draw none.

    Copying the states of Python and NumPy for each batch would take 30 µs.
    """
    known = has_exact_length(loader) and holds_samples(loader.dataset) and draws_nothing(loader.collate_fn)
    return not known or getattr(getattr(loader.batch_sampler, "sampler", loader.sampler), "replacement", False)


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
        self._waited = 0.0
        self._log: ReadingLog | None = None
        if isinstance(loader, PreparedDataLoader):
            self._log = loader.log = ReadingLog(loader, self._sources)

    def open(self, epoch: int, resume_point: ResumePoint | None = None) -> Iterator[Any]:
        """The batches of an epoch; when resuming, only the remaining ones."""
        saved = resume_point.saved if resume_point is not None else None
        if resume_point is not None and not resume_point.position:
            resume_point.restore_random()
        elif saved is not None:
            self._sources.restore(saved["opened"])  # samplers and workers draw their seeds again
        self._opened = self._sources.capture()
        if self._log is not None:
            self._log.begin_epoch(draws=may_draw(self.loader))
        if resume_point is None:
            iterator = iter(_set_epoch(self.loader, epoch))
            return iterator if self._log is not None else self._timed(iterator)
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.resume_at(resume_point.position, saved, resume_point.restore_random)
            return iter(_set_epoch(self.loader, epoch))
        iterator = self._resume_plain_loader(epoch, resume_point.position, saved)
        if saved is not None and resume_point.position:
            resume_point.restore_random()
        return self._timed(iterator)

    def waits(self) -> dict[str, float]:
        """What the run has waited for to get its batches → seconds."""
        if self._log is None:
            return {"the script's loader": self._waited}
        transfer = {"the transfer to the device": self._log.transferring}
        if self.loader.num_workers:
            return {"the loading processes": self._log.waited, **transfer}
        return {"the dataset": self._log.waited - self._log.collating, "data_collator": self._log.collating, **transfer}

    def time_collator(self) -> None:
        """Time the collator too."""
        if self._log is not None:
            self._log.times_collator = True

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader of the script, with the time that each takes added to `waits`."""
        start = time.perf_counter()
        for batch in batches:
            self._waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def close(self) -> None:
        """End persistent workers: the next run has its own loader.

        torch ends them when their iterator is deleted. If the iterator is in a reference cycle, as with a loader in a
        Trainer, torch can no longer signal the workers by then, and waits 5 seconds for each.
        """
        if isinstance(self.loader, PreparedDataLoader):
            self.loader._iterator = None

    def _resume_plain_loader(self, epoch: int, position: int, saved: dict[str, Any] | None) -> Iterator[Any]:
        """Resume a loader that is not a `PreparedDataLoader`."""
        loader, skipped = self.loader, 0
        if position and saved is not None and saved.get("loader") is not None and is_stateful(loader):
            with fitting(DATA_STATE):
                loader.load_state_dict(saved["loader"])
        elif position:
            loader, skipped = skip_first(loader, position)
        iterator: Iterator[Any] = iter(_set_epoch(loader, epoch))
        if isinstance(getattr(loader, "batch_sampler", None), SkippingBatchSampler):
            loader.batch_sampler.skip_now()
        for _ in range(skipped):
            next(iterator, None)
        return iterator

    def restore_held(self, saved: dict[str, Any]) -> None:
        """Restore the generators of samplers, datasets and collators."""
        with fitting(DATA_STATE):
            self._sources.restore_held(saved["held"])

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in tensors and plain values."""
        self._sources.find_generators()
        state = {"opened": self._opened, "held": self._sources.generator_states(), "loader": None, "exhausted": False}
        if self._log is not None:
            return state | {"exhausted": self.loader.position.is_last} | self._log.state_dict()
        return state | {"loader": self.loader.state_dict() if is_stateful(self.loader) else None}


def _set_epoch(loader: Any, epoch: int) -> Any:
    set_epoch(loader, epoch)
    return loader
