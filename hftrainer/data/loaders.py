"""The data loader, with Hugging Face's order of samples and of random draws."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrainer.arguments.accelerator_config import DEFAULT, AcceleratorConfig
from hftrainer.compat.overrides import has_length
from hftrainer.compat.reading import fitting
from hftrainer.data.loader_plan import LoaderPlan, deliver
from hftrainer.data.randomness import PLACE
from hftrainer.data.samplers import SkippingBatchSampler
from hftrainer.data.sharding import (
    ALL,
    DataCollectives,
    EvenBatchSampler,
    ShardedBatchSampler,
    ShardedStream,
    ShardSpec,
    batches_of_rank,
    parts,
    rounds,
)
from hftrainer.data.workers import RestoredWorker, TracedCollator
from hftrainer.trainer_pt_utils import find_batch_size

if TYPE_CHECKING:
    from hftrainer.data.reading import ReadingLog

logger = logging.getLogger(__name__)


#: Counts the iterations of all loaders.
_ITERATIONS = itertools.count(1)


class BatchPosition(NamedTuple):
    """Where in an iteration a batch is.

    Attributes:
        is_last: whether it is the last of the epoch.
        is_filler: whether it only keeps collective operations in step with other ranks.
        counted_samples: number of its samples that are not repeated ones; None for all.
        iteration: number of the iteration, counted over all loaders; 0 outside of one.
    """

    is_last: bool = False
    is_filler: bool = False
    counted_samples: int | None = None
    iteration: int = 0


class PreparedDataLoader(DataLoader):
    """A `DataLoader` that moves batches to the device and reads one batch ahead, in Hugging Face's order.

    It draws from the generators exactly when accelerate's loader does: one batch before that batch is used. So
    datasets and collators that draw random numbers (masking, augmentation) give the same samples.

    Attributes:
        position: that of the last batch yielded.
        log: records what is read, in a training loader.
    """

    device: torch.device
    non_blocking: bool
    skip_batches: int
    drops_last: bool
    iteration: int
    position: BatchPosition = BatchPosition()
    delivery: LoaderPlan
    share: ShardSpec
    log: ReadingLog | None = None
    _continued: tuple[dict[str, Any] | None, Callable[[], None]] | None = None
    _worker_states: Mapping[int, bytes] = MappingProxyType({})
    _worker_seed: torch.Tensor | None = None
    _has_drawn_seed = False

    @classmethod
    def from_loader(
        cls,
        loader: DataLoader,
        device: torch.device,
        *,
        seed: int | None = None,
        config: AcceleratorConfig = DEFAULT,
        share: ShardSpec = ALL,
        messenger: DataCollectives | None = None,
    ) -> PreparedDataLoader:
        """Prepare a plain loader.

        Args:
            loader: the source of dataset, samplers, collator and workers.
            device: where batches are moved to.
            seed: seed of the sample order; None takes torch's initial seed, as accelerate does.
            config: how batches reach the processes in training.
            share: which of the batches this process reads.
            messenger: collective operations of distributed training; without it the loader is for evaluation, which
                reads no sample twice, whatever the config.

        Raises:
            InvalidArgument: when the config does not fit this data.
            UnsupportedArgument: when processes would get different numbers of batches.
        """
        delivery = deliver(loader, config, share, messenger, seed)
        prepared = cls(delivery.dataset, **(_settings(loader) | delivery.settings))
        prepared.device = device
        # On MPS the values would be wrong: https://github.com/pytorch/pytorch/issues/139550
        prepared.non_blocking = config.non_blocking and device.type != "mps"
        prepared.skip_batches = 0
        prepared.drops_last = loader.drop_last
        prepared.iteration = 0
        prepared.delivery, prepared.share = delivery, share
        return prepared

    def _counted_samples(self, batch: Any, *, is_last: bool, is_filler: bool) -> int | None:
        """Samples of a batch that `gather_for_metrics` keeps; None for all. For training see `remainder`."""
        if is_filler:
            return 0
        if not is_last or self.delivery.messenger is not None:
            return None
        if isinstance(self.dataset, IterableDataset):  # its length is unknown
            return find_batch_size(batch)
        if self.drops_last or not has_length(self.dataset) or not (size := self.samples_per_batch):
            return None
        if self.delivery.shards is not None and not self.delivery.shards.owns_last:
            return None
        return len(self.dataset) % size or None  # type: ignore[arg-type]

    @property
    def remainder(self) -> int | None:
        """Samples in the last round of training, over all ranks, if it was filled up; None in all other rounds.

        As in accelerate, `gather_for_metrics` drops the rows after them.
        """
        trains = self.delivery.messenger is not None and not isinstance(self.dataset, IterableDataset)
        if not self.position.is_last or not trains or self.drops_last or not (total := self.total_batch_size):
            return None
        return len(self.dataset) % total or None  # type: ignore[arg-type]

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a round of full batches over all processes; None when unknown."""
        size, delivery = self.samples_per_batch, self.delivery
        return size if size is None or delivery.splits else size * self.share.processes

    @property
    def samples_per_batch(self) -> int | None:
        """Samples in a full batch; None when unknown."""
        return self.batch_size if self.batch_size is not None else getattr(self.batch_sampler, "batch_size", None)

    @property
    def source(self) -> Any:
        """The dataset that the loader was made with; this process may read only a part of it."""
        return self.dataset.dataset if isinstance(self.dataset, ShardedStream) else self.dataset

    def __len__(self) -> int:
        """Batches that this process gets in an epoch."""
        batches, count = super().__len__(), self.delivery.round_size
        if count is None:
            return batches
        return batches // count if self.drops_last else -(-batches // count)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in samplers and dataset."""
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
        """Skip the first batches of the next iteration, in the sampler if there is one."""
        if isinstance(self.batch_sampler, SkippingBatchSampler):
            self.batch_sampler.skipped = batches
        else:
            self.skip_batches = batches

    def resume_at(self, position: int, saved: dict[str, Any] | None, restore_random: Callable[[], None]) -> None:
        """Let the next iteration resume within an epoch.

        Args:
            position: batches of the epoch that were used.
            saved: the log's `state_dict` at that point, if known.
            restore_random: called after the first batch is read, if `saved` allows reading it again.
        """
        read_again, used = 0, position
        position *= self.delivery.round_size or 1
        if saved is not None and self.num_workers:
            assert self.log is not None
            with fitting(PLACE):
                skipped, self._worker_states, self._worker_seed = self.log.resume_at(position, saved)
            read_again, position = position - skipped, skipped
        elif saved is not None and saved.get("stream") is not None:
            with fitting(PLACE):
                self.dataset.load_state_dict(saved["stream"])  # type: ignore[attr-defined]
            position = 0
            if self.share.processes > 1 and not self.drops_last:
                logger.warning(
                    "The stream resumes from its saved state: if the last round of this epoch is not full, it is "
                    "completed with the first samples after that position, not with the first of the epoch."
                )
        self.skip_first(position)
        self.skip_batches += read_again
        if saved is not None and used:
            self._continued = saved.get("before"), restore_random

    def spare_seed(self) -> None:
        """Start the next workers without drawing from torch's generator: the interrupted run has done so."""
        self._worker_seed = torch.Generator().get_state()

    def record_batches(self) -> list[list[int]] | None:
        """A list that the next iteration fills with the indices of the samples in each batch; None for a stream."""
        if not isinstance(self.batch_sampler, SkippingBatchSampler):
            return None
        self.batch_sampler.seen = []
        return self.batch_sampler.seen

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        number = next(_ITERATIONS)
        self.position = self.position._replace(iteration=number)
        try:
            yield from self._batches(number)
        finally:
            self.position = self.position._replace(iteration=0)

    def _batches(self, number: int) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.position = BatchPosition(iteration=number)
        delivery = self.delivery
        delivery.synchronize()
        if delivery.round_size is not None:
            iterator: Iterator[tuple[Any, bool]] = ((batch, False) for batch in self._received())
        else:
            # In an evaluation, every process reads the whole stream.
            share = self.share if delivery.messenger is None and isinstance(self.dataset, IterableDataset) else ALL
            iterator = batches_of_rank(delivery.in_step(self._read(share.processes)), share)
        nothing: Any = object()
        ahead = next(iterator, nothing)
        while ahead is not nothing:
            batch, marked = ahead
            batch = to_device(batch, self.device, self.non_blocking)
            ahead = next(iterator, nothing)
            is_last = ahead is nothing
            is_filler = marked or (is_last and delivery.ends_with_filler)
            counted = self._counted_samples(batch, is_last=is_last, is_filler=is_filler)
            self.position = BatchPosition(is_last, is_filler, counted, number)
            yield batch
        self.position = BatchPosition(is_last=self.position.is_last, iteration=number)
        self.iteration += 1

    def _received(self) -> Iterator[Any]:
        """The part of this process of the batches that the main process reads."""
        messenger, processes = self.delivery.messenger, self.share.processes
        assert messenger is not None
        groups = parts(self._read(1), processes, self.drops_last)
        if self.share.rank:
            next(groups, None)  # opens the data, which draws random numbers in every process
        while (part := messenger.scatter(lambda: next(groups, [None] * processes))) is not None:
            yield part

    def _read(self, times: int) -> Iterator[Any]:
        """The dataset's batches from where this iteration begins; or the rounds to scatter.

        Args:
            times: batches read for each batch that this process uses.
        """
        skipped, self.skip_batches = self.skip_batches * times, 0
        continued, self._continued = self._continued, None
        log, size = self.log, self.delivery.round_size
        if size is not None and self.share.rank:
            self._draw_only()
            if continued is not None:
                continued[1]()
            return
        batches = self._open()
        if isinstance(self.batch_sampler, SkippingBatchSampler):
            self.batch_sampler.catch_up()
        for _ in range(skipped):
            passed_over = next(batches, None)
            if log is not None:
                log.count_skipped(passed_over)
        iterator = batches if size is None else rounds(batches, size, self.drops_last)
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

    def _draw_only(self) -> None:
        """Make the random draws of opening the data, without starting workers: only the main process reads."""
        seed, self._worker_seed = self._worker_seed, None
        if not self.num_workers:
            super().__iter__()
        elif not (self.persistent_workers and self._has_drawn_seed):
            if self.log is not None:
                self.log.begin_workers(None, now=seed is None)
            if seed is None:
                torch.empty((), dtype=torch.int64).random_()
            self._has_drawn_seed = True

    @staticmethod
    def _read_again(
        iterator: Iterator[Any], log: ReadingLog, before: dict[str, Any] | None, restore_random: Callable[[], None]
    ) -> Any:
        """The batch that had been read but not used when the checkpoint was written."""
        if before is not None:
            log.sources.restore(before)
        log.before_read()
        batch = next(iterator, _NOTHING)
        restore_random()
        return batch if batch is _NOTHING else log.after_read(batch)

    def _open(self) -> Iterator[Any]:
        """Begin to read; with a log, new workers send their random states along."""
        states, seed = self._worker_states, self._worker_seed
        self._worker_states, self._worker_seed = {}, None
        if not self.num_workers or (self.persistent_workers and self._iterator is not None):
            return super().__iter__()
        given = self.collate_fn, self.worker_init_fn, self.generator
        if seed is not None:
            self.generator = torch.Generator()
            with fitting(PLACE):
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
    """A loader's settings, except dataset and samplers."""
    return {name: getattr(loader, name) for name in _SETTINGS}


def skip_first(loader: Any, batches: int) -> tuple[Any, int]:
    """A loader whose next iteration skips some batches, and how many the caller must still skip."""
    if isinstance(loader, PreparedDataLoader):
        loader.skip_first(batches)
        return loader, 0
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        sampler = SkippingBatchSampler(loader.batch_sampler, batches)
        return DataLoader(loader.dataset, batch_sampler=sampler, **_settings(loader)), 0
    return loader, batches


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move every tensor in nested mappings, lists and tuples, and any object with a `to` method."""
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
