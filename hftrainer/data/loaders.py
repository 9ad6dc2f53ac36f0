"""The data loader in Hugging Face's order of samples, and of draws from the random generators."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from hftrainer.data.sharding import ALL, EvenBatchSampler, ShardedBatchSampler, Share, shared_out
from hftrainer.data.workers import RestoredWorker, TracedCollator
from hftrainer.trainer_utils import has_length

if TYPE_CHECKING:
    from hftrainer.data.reading import ReadingLog


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends on seed and epoch alone, not on what was drawn before.

    Args:
        data_source: the dataset.
        seed: the permutation of epoch `e` comes from a generator seeded `seed + e`.
    """

    seeds_itself = True  # its generator has no state worth keeping

    def __init__(self, data_source: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(data_source, **kwargs)
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of `epoch`."""
        self.epoch = epoch


class SkippingBatchSampler(BatchSampler):
    """A batch sampler that passes over its first batches once, so that their samples are never loaded.

    Args:
        batch_sampler: the sampler that gives the indices.
        skipped: batches to pass over at the next iteration.

    Attributes:
        seen: gets the indices of each batch that is given, if it is a list.
    """

    def __init__(self, batch_sampler: Any, skipped: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skipped = skipped
        self.seen: list[list[int]] | None = None
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = iter(self.batch_sampler)
        return self._indices(self._batches)

    def _indices(self, batches: Iterator[Any]) -> Iterator[list[int]]:
        self.catch_up()  # not before the first batch is asked for: a loader draws its seed in between
        for batch in batches:
            if self.seen is not None:
                self.seen.append(list(batch))
            yield batch

    def catch_up(self) -> None:
        """Pass over the batches now, if they have not been."""
        skipped, self.skipped = self.skipped, 0
        for _ in range(skipped):
            next(self._batches, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_batches": None}  # for loading processes that are started anew; they do not iterate

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


#: Numbers the iterations of all loaders.
_STARTS = itertools.count(1)


class PreparedDataLoader(DataLoader):
    """A `DataLoader` on the training device, one batch ahead, in Hugging Face's order.

    It draws from the generators exactly when accelerate's loader does, which is one batch before its own is used; so
    datasets and collators that draw random numbers (masking, augmentation) give the same samples.

    Attributes:
        at_end: whether the batch given last is the last.
        filler: whether the batch given last only keeps step with the other processes.
        log: told of what is read, in a loader that is trained on.
        started: number of the iteration that goes on, among those of all loaders; 0 when there is none.
    """

    device: torch.device
    non_blocking: bool
    skip_batches: int
    drops_last: bool
    iteration: int
    at_end: bool
    filler: bool
    shards: ShardedBatchSampler | None
    share: Share
    log: ReadingLog | None = None
    started: int = 0
    _continued: tuple[dict[str, Any] | None, Callable[[], None]] | None = None
    _worker_states: Mapping[int, bytes] = MappingProxyType({})
    _worker_seed: torch.Tensor | None = None

    @classmethod
    def from_loader(
        cls,
        loader: DataLoader,
        device: torch.device,
        *,
        seed: int | None = None,
        non_blocking: bool = False,
        share: Share = ALL,
        training: bool = False,
    ) -> PreparedDataLoader:
        """Prepare a plain loader; a random sampler becomes seedable.

        Args:
            loader: the loader to take dataset, samplers, collator and workers from.
            device: where batches are moved to.
            seed: seed of the sample order; None takes torch's initial seed, as accelerate does.
            non_blocking: whether the move may run beside the computation.
            share: which of the batches are this process's.
            training: give all processes as many batches, rather than no sample twice.
        """
        dataset, settings, shards = loader.dataset, _settings(loader), None
        if isinstance(dataset, IterableDataset):
            sampling: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            batches = loader.sampler if loader.batch_sampler is None else _seedable(loader.batch_sampler, seed)
            if share.processes > 1 and training:
                batches = EvenBatchSampler(batches, share)
            elif share.processes > 1:
                batches = shards = ShardedBatchSampler(batches, share)
            if loader.batch_sampler is None:  # the sampler gives what the dataset makes a whole batch of
                sampling = {"batch_size": None, "sampler": batches}
            else:
                sampling = {"batch_sampler": SkippingBatchSampler(batches)}
        prepared = cls(dataset, **settings, **sampling)
        prepared.device = device
        prepared.non_blocking = non_blocking
        prepared.skip_batches = 0
        prepared.drops_last = loader.drop_last
        prepared.iteration = 0
        prepared.at_end = prepared.filler = False
        prepared.shards, prepared.share = shards, share
        return prepared

    @property
    def remainder(self) -> int | None:
        """Samples in the last batch when it is not full, -1 for a stream, which does not know, else None."""
        if isinstance(self.dataset, IterableDataset):
            return -1
        if self.drops_last or not has_length(self.dataset) or not (size := self.samples_per_batch):
            return None
        if self.shards is not None and not self.shards.owns_last:
            return None
        return len(self.dataset) % size or None  # type: ignore[arg-type]

    @property
    def samples_per_batch(self) -> int | None:
        """Samples in a full batch, when it is known."""
        return self.batch_size if self.batch_size is not None else getattr(self.batch_sampler, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset which epoch the next iteration is."""
        self.iteration = epoch
        for part in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            inner: Any = part
            while isinstance(inner, (SkippingBatchSampler, ShardedBatchSampler, EvenBatchSampler)):
                inner = inner.batch_sampler
            if callable(getattr(inner, "set_epoch", None)):
                inner.set_epoch(epoch)
        dataset: Any = self.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)

    def skip_first(self, batches: int) -> None:
        """Pass over the first batches of the next iteration, at the sampler if there is one."""
        if isinstance(self.batch_sampler, SkippingBatchSampler):
            self.batch_sampler.skipped = batches
        else:
            self.skip_batches = batches

    def go_on(self, position: int, saved: dict[str, Any] | None, restore_random: Callable[[], None]) -> None:
        """Let the next iteration go on within an epoch.

        Args:
            position: batches of the epoch that were used.
            saved: what the log's `state_dict` returned then, if it is known.
            restore_random: called when the first batch has been read, if it is known how it is read again.
        """
        read_again, used = 0, position
        if saved is not None and self.num_workers:
            assert self.log is not None
            skipped, self._worker_states, self._worker_seed = self.log.go_on(position, saved)
            read_again, position = position - skipped, skipped
        elif saved is not None and saved["stream"] is not None:
            self.dataset.load_state_dict(saved["stream"])  # type: ignore[attr-defined]
            position = 0
        self.skip_first(position)
        self.skip_batches += read_again
        if saved is not None and used:
            self._continued = saved["before"], restore_random

    def spare_seed(self) -> None:
        """Start the next loading processes without drawing from torch's generator: the run before has done so."""
        self._worker_seed = torch.Generator().get_state()

    def record_batches(self) -> list[list[int]] | None:
        """A list that the next iteration fills with the indices of the samples in each batch; None for a stream."""
        if not isinstance(self.batch_sampler, SkippingBatchSampler):
            return None
        self.batch_sampler.seen = []
        return self.batch_sampler.seen

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.started = next(_STARTS)
        try:
            yield from self._batches()
        finally:
            self.started = 0

    def _batches(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.at_end = False
        share = self.share if isinstance(self.dataset, IterableDataset) else ALL
        iterator = shared_out(self._read(share), share)
        nothing: Any = object()
        ahead = next(iterator, nothing)
        while ahead is not nothing:
            batch, marked = ahead
            batch = to_device(batch, self.device, self.non_blocking)
            ahead = next(iterator, nothing)
            self.at_end = ahead is nothing
            self.filler = marked or (self.at_end and self.shards is not None and self.shards.ends_with_filler)
            yield batch
        self.filler = False
        self.iteration += 1

    def _read(self, share: Share) -> Iterator[Any]:
        """The batches as the dataset gives them, from where this iteration is to begin."""
        skipped, self.skip_batches = self.skip_batches * share.processes, 0
        continued, self._continued = self._continued, None
        iterator, log = self._open(), self.log
        if isinstance(self.batch_sampler, SkippingBatchSampler):
            self.batch_sampler.catch_up()
        for _ in range(skipped):
            passed_over = next(iterator, None)
            if log is not None:
                log.after_read(passed_over)
        if log is None:
            yield from iterator
            return
        if continued is not None:
            first = self._read_again(iterator, log, *continued)
            if first is _NOTHING:
                return
            yield first
        log.before_read()
        for batch in iterator:
            yield log.after_read(batch)
            log.before_read()

    @staticmethod
    def _read_again(
        iterator: Iterator[Any], log: ReadingLog, before: dict[str, Any] | None, restore_random: Callable[[], None]
    ) -> Any:
        """The batch that had been read when the checkpoint was written, but not been used."""
        if before is not None:
            log.sources.restore(before)
        log.before_read()
        batch = next(iterator, _NOTHING)
        restore_random()
        return batch if batch is _NOTHING else log.after_read(batch)

    def _open(self) -> Iterator[Any]:
        """Begin to read; with a log, new loading processes tell their random states."""
        states, seed = self._worker_states, self._worker_seed
        self._worker_states, self._worker_seed = {}, None
        if not self.num_workers or (self.persistent_workers and self._iterator is not None):
            return super().__iter__()
        given = self.collate_fn, self.worker_init_fn, self.generator
        if seed is not None:
            self.generator = torch.Generator()
            self.generator.set_state(seed)
        if self.log is not None:
            self.collate_fn = collator = TracedCollator(self.collate_fn)
            self.worker_init_fn = RestoredWorker(self.worker_init_fn, collator, dict(states))
            self.log.begin_workers(self.generator, now=seed is None)
        try:
            return super().__iter__()
        finally:
            self.collate_fn, self.worker_init_fn, self.generator = given


_NOTHING: Any = object()

_SETTINGS = """
    num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor
    persistent_workers in_order
""".split()


def _settings(loader: DataLoader) -> dict[str, Any]:
    """What a loader does with the samples that its sampler gives it."""
    return {name: getattr(loader, name) for name in _SETTINGS}


def skip_first(loader: Any, batches: int) -> tuple[Any, int]:
    """A loader whose next iteration begins behind some batches, and how many are left to pass over by hand."""
    if isinstance(loader, PreparedDataLoader):
        loader.skip_first(batches)
        return loader, 0
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        sampler = SkippingBatchSampler(loader.batch_sampler, batches)
        return DataLoader(loader.dataset, batch_sampler=sampler, **_settings(loader)), 0
    return loader, batches


def _seedable(batch_sampler: Any, seed: int | None) -> Any:
    """The batch sampler, its random sampler replaced by a seedable one. The user's own object is left alone."""
    sampler = getattr(batch_sampler, "sampler", None)
    if not isinstance(sampler, RandomSampler):
        return batch_sampler
    seedable = SeedableRandomSampler(
        sampler.data_source,
        seed if seed is not None else torch.initial_seed(),
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
    )
    replaced = copy.copy(batch_sampler)
    replaced.sampler = seedable
    return replaced


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move every tensor in nested mappings, lists and tuples; anything with its own `to` moves itself."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, non_blocking) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    if callable(getattr(data, "to", None)):
        return data.to(device)
    return data
