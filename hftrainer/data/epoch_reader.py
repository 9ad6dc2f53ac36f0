"""Tracks the position in the data, so that a resumed run reads the same samples."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.compat import libraries
from hftrainer.data.collators import draws_nothing, holds_samples
from hftrainer.data.loaders import PreparedDataLoader, skip_first
from hftrainer.data.randomness import DATA_STATE, RandomGenerators, WorkerBatch
from hftrainer.data.samplers import SkippingBatchSampler, has_exact_length, set_epoch


@dataclass
class EpochStart:
    """Where in an epoch a resumed run begins.

    Attributes:
        finished_micro_batches: their number in the epoch.
        restore_random_states: restores the random states of the checkpoint.
        saved_state: the saved `EpochReader.state_dict`; None in checkpoints of transformers.
    """

    finished_micro_batches: int
    restore_random_states: Callable[[], None]
    saved_state: dict[str, Any] | None


class ReadRecorder:
    """Records the batches that a loader reads in an epoch, and the random states between.

    The loader reads one batch ahead, so a checkpoint needs the state from before that batch, which is read again.
    Workers read further ahead, in turns. A resumed run starts at the beginning of a round, with the states that the
    workers had then, and assigns each worker the same batches again.

    Args:
        loader: the loader.
        generators: the generators that the data uses.

    Attributes:
        wait_seconds: time that the run has waited for batches.
        collate_seconds: the part of it in the collator, if `times_collator` is set and there are no workers.
        transfer_seconds: time in which batches were moved to the device.
        times_collator: whether the collator is timed.
    """

    def __init__(self, loader: PreparedDataLoader, generators: RandomGenerators) -> None:
        self.generators = generators
        self.batch_count = 0
        self.states_before_batch: dict[str, Any] | None = None
        self.stream_state: Any = None
        self.wait_seconds = self.collate_seconds = self.transfer_seconds = self._read_start = 0.0
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
        """Forget the last epoch except persistent workers' states. `draws`: whether reading may draw numbers."""
        self.batch_count = 0
        self.states_before_batch = None
        self.stream_state = None
        self.draws_seed = False
        self._draws = draws
        self._latest_states = self._latest_states if self._keeps_workers else {}
        self._states_before_turn = self._states_before_round = dict(self._latest_states)

    def begin_workers(self, generator: torch.Generator | None, *, draws_seed: bool) -> None:
        """Record the generator state that seeds the workers. `draws_seed`: whether this epoch draws the seeds."""
        self.worker_seed = torch.get_rng_state() if generator is None else generator.get_state()
        self.draws_seed = draws_seed

    def begin_read(self) -> None:
        """Record the states before the next batch."""
        # If workers read the batches, the recorder keeps their states instead.
        if self._draws and not self._workers:
            if self.batch_count == 1:
                self.generators.find_generators()
            self.states_before_batch = self.generators.capture()
            if self._stateful is not None and self.batch_count:
                self.stream_state = self._stateful.state_dict()
        self._read_start = time.perf_counter()

    def end_read(self, batches: Any) -> Any:
        """Count a batch or a round of batches, and return it without the workers' states."""
        self.wait_seconds += time.perf_counter() - self._read_start
        if not self._reads_rounds:
            return self.count_batch(batches)
        return [self.count_batch(batch, is_first=index == 0) for index, batch in enumerate(batches)]

    def time_collate_fn(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, with its time added to `collate_seconds`."""

        def collate(samples: Any) -> Any:
            start = time.perf_counter()
            try:
                return collate_fn(samples)
            finally:
                self.collate_seconds += time.perf_counter() - start

        return collate

    def count_batch(self, batch: Any, *, is_first: bool = True) -> Any:
        """Count a batch, record its worker's states, and return the batch without them.

        Args:
            batch: the batch, from a worker or not.
            is_first: whether it is the first of the batches that are scattered together.
        """
        if not isinstance(batch, WorkerBatch):
            self.batch_count += 1
            return batch
        if self.batch_count % self._workers == 0 and not self._streams:
            self._states_before_turn = dict(self._latest_states)
        if is_first:
            self._states_before_round = self._states_before_turn
        self._latest_states[batch.worker] = batch.states
        self.batch_count += 1
        return batch.batch

    def state_dict(self) -> dict[str, Any]:
        """What was read so far, and the random states, for a checkpoint, in tensors and plain values."""
        state: dict[str, Any] = {"before": self.states_before_batch, "stream": self.stream_state}
        if self._workers:
            worker_states = {"round": self._states_before_round, "latest": self._latest_states}
            state["workers"] = {
                "count": self._workers,
                "seed": self.worker_seed,
                "began_now": self.draws_seed,
                **{
                    name: {worker: pickle.loads(state) for worker, state in states.items()}
                    for name, states in worker_states.items()
                },
            }
        return state

    def resume_at(self, used_batches: int, state: dict[str, Any]) -> tuple[int, dict[int, bytes], torch.Tensor | None]:
        """The states with which the workers of a resumed run start.

        Args:
            used_batches: number of batches of the epoch that were used.
            state: the dict that `state_dict` returned.

        Returns:
            The number of batches to skip without reading; the workers' states; and the generator state from which an
            earlier epoch drew the workers' seeds, None when this epoch draws them.
        """
        workers, states = state["workers"], {}
        if used_batches or self._keeps_workers:
            states = workers["round" if used_batches else "latest"]
        self._latest_states = {worker: pickle.dumps(state) for worker, state in states.items()}
        self._states_before_turn = self._states_before_round = dict(self._latest_states)
        self.batch_count = 0 if self._streams else used_batches - used_batches % self._workers
        has_earlier_seed = self._keeps_workers and not (used_batches and workers["began_now"])
        return self.batch_count, dict(self._latest_states), workers["seed"] if has_earlier_seed else None


def may_draw(loader: PreparedDataLoader) -> bool:
    """Whether reading a batch may draw random numbers. False if samples, sampler and collator draw none.

    Copying the states of Python and NumPy for each batch would take 30 µs.
    """
    draws_none = has_exact_length(loader) and holds_samples(loader.dataset) and draws_nothing(loader.collate_fn)
    return not draws_none or getattr(getattr(loader.batch_sampler, "sampler", loader.sampler), "replacement", False)


def is_stateful(data: Any) -> bool:
    """Whether a dataset or loader can restore its exact position."""
    has_state = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return has_state and not libraries.loses_shuffle_buffer(data)


class EpochReader:
    """Opens the training data for each epoch, and provides its state for checkpoints.

    Args:
        loader: the user's loader, or a `PreparedDataLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._generators = RandomGenerators(loader=loader)
        self._start_states: dict[str, Any] | None = None
        self._wait_seconds = 0.0
        self._recorder: ReadRecorder | None = None
        if isinstance(loader, PreparedDataLoader):
            self._recorder = loader.recorder = ReadRecorder(loader, self._generators)

    def open_epoch(self, epoch: int, start: EpochStart | None = None) -> Iterator[Any]:
        """The batches of an epoch. When resuming, only the remaining ones."""
        saved_state = start.saved_state if start is not None else None
        if start is not None and not start.finished_micro_batches:
            start.restore_random_states()
        elif saved_state is not None:
            # Samplers and workers draw their seeds again.
            self._generators.restore(saved_state["opened"])
        self._start_states = self._generators.capture()
        if self._recorder is not None:
            self._recorder.begin_epoch(draws=may_draw(self.loader))
        if start is None:
            iterator = iter(_set_epoch(self.loader, epoch))
            return iterator if self._recorder is not None else self._time_batches(iterator)
        if isinstance(self.loader, PreparedDataLoader):
            self.loader.resume_at(start.finished_micro_batches, saved_state, start.restore_random_states)
            return iter(_set_epoch(self.loader, epoch))
        iterator = self._resume_plain_loader(epoch, start.finished_micro_batches, saved_state)
        if saved_state is not None and start.finished_micro_batches:
            start.restore_random_states()
        return self._time_batches(iterator)

    def wait_seconds_by_cause(self) -> dict[str, float]:
        """Cause of waiting for batches → seconds."""
        if self._recorder is None:
            return {"the script's loader": self._wait_seconds}
        transfer = {"the transfer to the device": self._recorder.transfer_seconds}
        if self.loader.num_workers:
            return {"the loading processes": self._recorder.wait_seconds, **transfer}
        return {
            "the dataset": self._recorder.wait_seconds - self._recorder.collate_seconds,
            "data_collator": self._recorder.collate_seconds,
            **transfer,
        }

    def time_collator(self) -> None:
        """Time the collator too."""
        if self._recorder is not None:
            self._recorder.times_collator = True

    def _time_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of the script's loader, and adds the time of each to the seconds of waiting."""
        start = time.perf_counter()
        for batch in batches:
            self._wait_seconds += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def close(self) -> None:
        """End persistent workers, since the next run has another loader.

        torch ends them when their iterator is deleted. If the iterator is in a reference cycle, as with a loader in a
        Trainer, torch can no longer signal the workers by then, and waits 5 seconds for each.
        """
        if isinstance(self.loader, PreparedDataLoader):
            self.loader._iterator = None

    def _resume_plain_loader(self, epoch: int, used_batches: int, saved_state: dict[str, Any] | None) -> Iterator[Any]:
        """Resume a loader that is not a `PreparedDataLoader`."""
        loader, skipped_batches = self.loader, 0
        if used_batches and saved_state is not None and saved_state.get("loader") is not None and is_stateful(loader):
            with name_file_in_errors(DATA_STATE):
                loader.load_state_dict(saved_state["loader"])
        elif used_batches:
            loader, skipped_batches = skip_first(loader, used_batches)
        iterator: Iterator[Any] = iter(_set_epoch(loader, epoch))
        if isinstance(getattr(loader, "batch_sampler", None), SkippingBatchSampler):
            loader.batch_sampler.skip_now()
        for _ in range(skipped_batches):
            next(iterator, None)
        return iterator

    def restore_generators(self, saved_state: dict[str, Any]) -> None:
        """Restore the generators of samplers, datasets and collators."""
        with name_file_in_errors(DATA_STATE):
            self._generators.restore_generators(saved_state["held"])

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in tensors and plain values."""
        self._generators.find_generators()
        generator_states = self._generators.generator_states()
        state = {"opened": self._start_states, "held": generator_states, "loader": None, "exhausted": False}
        if self._recorder is not None:
            return state | {"exhausted": self.loader.position.is_last} | self._recorder.state_dict()
        return state | {"loader": self.loader.state_dict() if is_stateful(self.loader) else None}


def _set_epoch(loader: Any, epoch: int) -> Any:
    set_epoch(loader, epoch)
    return loader
