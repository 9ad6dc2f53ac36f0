"""The data loader, with the order of samples and random draws of transformers."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrainer.arguments.accelerator_config import DEFAULT, AcceleratorConfig
from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.base.nested import find_batch_size, rebuild_container
from hftrainer.base.tracebacks import add_note, read_variable
from hftrainer.compat.libraries import has_length
from hftrainer.data import samplers
from hftrainer.data.collators import describe_columns
from hftrainer.data.loader_plan import group_batches, plan_loader, samples_per_batch, split_groups
from hftrainer.data.mixture import MixtureBatchSampler
from hftrainer.data.randomness import DATA_STATE, StateSendingCollator, init_worker
from hftrainer.parallel.processes import Processes

if TYPE_CHECKING:
    from hftrainer.data.epoch_reader import ReadRecorder

logger = logging.getLogger(__name__)


#: Counts the iterations of all loaders.
_ITERATIONS = itertools.count(1)


class BatchPosition(NamedTuple):
    """The position of a batch in an iteration.

    Attributes:
        is_last: whether the batch is the last of the epoch.
        is_filler: whether the batch only keeps collective operations in step with other ranks.
        counted_samples: number of samples in the batch that are not repetitions; None for all.
        iteration: number of the iteration, counted over all loaders; 0 outside of iterations.
    """

    is_last: bool = False
    is_filler: bool = False
    counted_samples: int | None = None
    iteration: int = 0


@dataclass
class _IterationStart:
    """The start of the next iteration, which is within the epoch when resuming.

    Attributes:
        skipped_batches: number of batches that are read and dropped.
        restore_random: called once the batch that was read ahead has been read again; None without such a batch.
        states_before_batch: the random states before that batch, if known.
        worker_states: random states by worker index.
        worker_seed: the generator state from which workers draw their seeds; None for the current one.
    """

    skipped_batches: int = 0
    restore_random: Callable[[], None] | None = None
    states_before_batch: dict[str, Any] | None = None
    worker_states: Mapping[int, bytes] = field(default_factory=dict)
    worker_seed: torch.Tensor | None = None


class PreparedDataLoader(DataLoader[Any]):
    """A `DataLoader` that moves batches to the device and reads one batch ahead.

    It draws from the generators exactly when accelerate's loader does, one batch before that batch is used. So datasets
    and collators that draw random numbers (masking, augmentation) return the same samples.

    Args:
        loader: the source of dataset, samplers, collator and workers.
        device: the device to which batches are moved.
        seed: seed of the sample order; None uses torch's initial seed, as accelerate does.
        config: how batches reach the processes in training.
        shard_spec: the batches that this process reads.
        processes: the processes of distributed training. Without them the loader is for evaluation, which reads no
            sample twice, with any config.
        global_batch: with `elastic`, the samples of an optimizer step; an epoch then has only complete ones.

    Attributes:
        position: position of the last batch that was yielded.
        recorder: records the batches that a training loader reads.

    Raises:
        InvalidArgument: when the config does not fit this data.
        UnsupportedArgument: when processes would get different numbers of batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        *,
        seed: int | None = None,
        config: AcceleratorConfig = DEFAULT,
        shard_spec: samplers.ShardSpec = samplers.UNSHARDED,
        processes: Processes | None = None,
        global_batch: int | None = None,
    ) -> None:
        plan = plan_loader(loader, config, shard_spec, processes, seed, global_batch)
        super().__init__(plan.dataset, **(samplers.settings_of(loader) | plan.settings))
        self.device = device
        # On MPS the values would be wrong: https://github.com/pytorch/pytorch/issues/139550
        self.non_blocking = config.non_blocking and device.type != "mps"
        self.drops_last = loader.drop_last
        self.loader_plan, self.shard_spec = plan, shard_spec
        self.is_elastic = global_batch is not None
        self.iteration = 0
        self.position = BatchPosition()
        self.recorder: ReadRecorder | None = None
        self._start = _IterationStart()
        self._has_drawn_seed = False
        self._read_indices: collections.deque[Any] = collections.deque(maxlen=0)

    def _counted_samples(self, batch: Any) -> int | None:
        """Samples of the last batch that `gather_for_metrics` keeps; None for all. For training see `remainder`."""
        if self.loader_plan.processes is not None:
            return None
        # The length of a stream is unknown.
        if isinstance(self.dataset, IterableDataset):
            return find_batch_size(batch)
        if self.drops_last or not has_length(self.dataset) or not (size := self.samples_per_batch):
            return None
        sampler = self.loader_plan.evaluation_sampler
        if sampler is not None and not sampler.owns_last:
            return None
        return len(self.dataset) % size or None  # type: ignore[arg-type]

    @property
    def remainder(self) -> int | None:
        """Samples of all ranks in the last round, if repeated samples complete it, else None.

        As in accelerate, `gather_for_metrics` drops the rows after these samples.
        """
        trains = self.loader_plan.processes is not None and not isinstance(self.dataset, IterableDataset)
        # An epoch of a mixture has complete steps.
        trains = trains and not isinstance(samplers.innermost(self.batch_sampler), MixtureBatchSampler)
        if not self.position.is_last or not trains or self.drops_last or not (total := self.total_batch_size):
            return None
        return len(self.dataset) % total or None  # type: ignore[arg-type]

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a round of full batches over all processes; None when unknown."""
        size = self.samples_per_batch
        return size if size is None or self.loader_plan.splits else size * self.shard_spec.processes

    @property
    def samples_per_batch(self) -> int | None:
        """Samples in a full batch; None when unknown."""
        return samples_per_batch(self)

    @property
    def source(self) -> Any:
        """The dataset of the original loader. This process may read only a part of it."""
        source: Any = self.dataset
        while isinstance(source, samplers.StreamWrapper):
            source = source.dataset
        return source

    def __len__(self) -> int:
        """Number of batches that this process receives in an epoch."""
        batches, count = super().__len__(), self.loader_plan.round_size
        if count is None:
            return batches
        return batches // count if self.drops_last else -(-batches // count)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in samplers and dataset."""
        self.iteration = epoch
        inner = samplers.innermost(self.batch_sampler)
        parts: tuple[Any, ...] = inner, getattr(inner, "sampler", None), self.dataset
        for part in parts:
            samplers.set_epoch(part, epoch)

    def skip_first(self, batches: int) -> None:
        """Skip the first batches of the next iteration, in the batch sampler if possible."""
        if isinstance(self.batch_sampler, samplers.SkippingBatchSampler):
            self.batch_sampler.skipped = batches
        else:
            self._start.skipped_batches = batches

    def resume_at(self, used_batches: int, saved: dict[str, Any] | None, restore_random: Callable[[], None]) -> None:
        """Let the next iteration resume within an epoch.

        Args:
            used_batches: number of batches of the epoch that were used.
            saved: the recorder's `state_dict` at that point, if known.
            restore_random: called after the first batch is read, if `saved` allows reading it again.
        """
        start, read_again, batches = self._start, 0, used_batches * (self.loader_plan.round_size or 1)
        if saved is not None and self.num_workers and "workers" in saved:
            assert self.recorder is not None
            with name_file_in_errors(DATA_STATE):
                skipped, start.worker_states, start.worker_seed = self.recorder.resume_at(batches, saved)
            read_again, batches = batches - skipped, skipped
        # At the end of an epoch the state may be that of a stream that has no more samples.
        elif batches and saved is not None and saved.get("stream") is not None:
            dataset: Any = self.dataset
            with name_file_in_errors(DATA_STATE):
                dataset.load_state_dict(saved["stream"])
            batches = 0
            if self.shard_spec.processes > 1 and not self.drops_last and not self.is_elastic:
                logger.warning(
                    "The stream resumes from its saved state: if the last round of this epoch is incomplete, the first "
                    "samples after that position complete it, not the first of the epoch."
                )
        self.skip_first(batches)
        start.skipped_batches += read_again
        if saved is not None and used_batches:
            start.states_before_batch, start.restore_random = saved.get("before"), restore_random

    def skip_worker_seed_draw(self) -> None:
        """Do not draw a worker seed: the interrupted run already did."""
        self._start.worker_seed = torch.Generator().get_state()

    def record_batches(self) -> list[list[int]] | None:
        """A list that the next iteration fills with each batch's sample indices; None for streams."""
        if not isinstance(self.batch_sampler, samplers.SkippingBatchSampler):
            return None
        self.batch_sampler.recorded_indices = []
        return self.batch_sampler.recorded_indices

    def keep_indices(self) -> None:
        """From now on, keep the sample indices of the latest batches for `last_indices`."""
        self._read_indices = collections.deque(maxlen=1024)

    def last_indices(self, batches: int) -> list[list[Any]] | None:
        """The sample indices of the last batches that this process received; None if unknown."""
        # One batch is read ahead.
        indices = list(self._read_indices)[: None if self.position.is_last else -1]
        if self.loader_plan.round_size is not None or len(indices) < batches:
            return None
        return [list(batch) for batch in indices[-batches:]]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        number = next(_ITERATIONS)
        unread = getattr(self.batch_sampler, "unread", None)
        try:
            yield from self._iterate_epoch(number)
        except Exception as error:
            # Any other error means that a worker has ended, and it may have read a later batch.
            is_worker_error = self.in_order and "in DataLoader worker process" in str(error)
            if unread and (not self.num_workers or is_worker_error):
                indices = list(map(str, unread[0]))
                indices[16:] = ["..."] if len(indices) > 16 else []
                index, samples = read_variable(error, "idx"), read_variable(error, "data")
                what = f"sample {index!r} was read"
                if index is None:
                    what = f"the samples [{', '.join(indices)}] were read and collated"
                    items = zip(unread[0], samples if isinstance(samples, list) else (), strict=False)
                    if empty := [name for name, sample in items if sample is None]:
                        what += f"; sample {empty[0]!r} is None"
                    elif isinstance(error, (KeyError, AttributeError)):
                        what += describe_columns(samples, self.dataset, self.collate_fn)
                add_note(error, f"This happened while {what}.")
            raise
        finally:
            # An iterator that is dropped late must not end a newer one.
            if self.position.iteration == number:
                self.position = BatchPosition(is_last=self.position.is_last)

    def _iterate_epoch(self, iteration: int) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.position = BatchPosition(iteration=iteration)
        plan = self.loader_plan
        plan.synchronize()
        if plan.round_size is not None:
            iterator: Iterator[tuple[Any, bool]] = ((batch, False) for batch in self._receive_batches())
        else:
            # In an evaluation, every process reads the complete stream.
            reads_all = plan.processes is None and isinstance(self.dataset, IterableDataset)
            spec = self.shard_spec if reads_all else samplers.UNSHARDED
            batches = self._read_batches(spec.processes)
            if plan.has_own_batch_count:
                batches = plan.stop_at_shortest_shard(batches)
            iterator = samplers.batches_of_rank(batches, spec)
        next_item = next(iterator, _NOTHING)
        while next_item is not _NOTHING:
            batch, is_filler = next_item
            start = time.perf_counter()
            batch = to_device(batch, self.device, self.non_blocking)
            if self.recorder is not None:
                self.recorder.transfer_seconds += time.perf_counter() - start
            next_item = next(iterator, _NOTHING)
            is_last = next_item is _NOTHING
            is_filler = is_filler or (is_last and plan.ends_with_filler)
            if is_last or is_filler:
                counted = 0 if is_filler else self._counted_samples(batch)
                self.position = BatchPosition(is_last, is_filler, counted, iteration)
            yield batch
        self.iteration += 1

    def _receive_batches(self) -> Iterator[Any]:
        """Yields this process's part of the batches that the main process reads."""
        processes, num_processes = self.loader_plan.processes, self.shard_spec.processes
        assert processes is not None
        groups = split_groups(self._read_batches(1), num_processes, self.drops_last)
        if self.shard_spec.rank:
            # Opening the data draws random numbers, and every process must draw them.
            next(groups, None)
        while (batch := processes.scatter(lambda: next(groups, [None] * num_processes))) is not None:
            yield batch

    def _read_batches(self, times: int) -> Iterator[Any]:
        """Yields the batches from the start position of this iteration, or the rounds to scatter.

        Args:
            times: batches read for each batch that this process uses.
        """
        start, self._start = self._start, _IterationStart()
        recorder, size = self.recorder, self.loader_plan.round_size
        if size is not None and self.shard_spec.rank:
            self._draw_without_reading(start)
            if start.restore_random is not None:
                start.restore_random()
            return
        batches = self._mark_read(self._open_data(start))
        if isinstance(self.batch_sampler, samplers.SkippingBatchSampler):
            self.batch_sampler.skip_now()
        for _ in range(start.skipped_batches * times):
            skipped = next(batches, None)
            if recorder is not None:
                recorder.count_batch(skipped)
        iterator = batches if size is None else group_batches(batches, size, self.drops_last)
        if recorder is None:
            yield from iterator
            return
        if start.restore_random is not None:
            if start.states_before_batch is not None:
                recorder.generators.restore(start.states_before_batch)
            # Read again the batch that was read ahead when the checkpoint was written.
            recorder.begin_read()
            first = next(iterator, _NOTHING)
            start.restore_random()
            if first is _NOTHING:
                return
            yield recorder.end_read(first)
        recorder.begin_read()
        for batch in iterator:
            yield recorder.end_read(batch)
            recorder.begin_read()

    def _mark_read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, and removes each from `unread` of the batch sampler."""
        unread = getattr(self.batch_sampler, "unread", None)
        for batch in batches:
            if unread:
                self._read_indices.append(unread.popleft())
            yield batch

    def _draw_without_reading(self, start: _IterationStart) -> None:
        """Draw the random numbers that opening the data would draw, without starting workers."""
        if not self.num_workers:
            super().__iter__()
        elif not (self.persistent_workers and self._has_drawn_seed):
            draws = start.worker_seed is None
            if self.recorder is not None:
                self.recorder.begin_workers(None, draws_seed=draws)
            if draws:
                torch.empty((), dtype=torch.int64).random_()
            self._has_drawn_seed = True

    def _open_data(self, start: _IterationStart) -> Iterator[Any]:
        """Open the data. If there is a recorder, new workers send their random states with each batch."""
        if self.persistent_workers and self._iterator is not None:
            return super().__iter__()
        settings = self.collate_fn, self.worker_init_fn, self.generator
        if self.num_workers:
            self._prepare_workers(start)
        elif self.recorder is not None and self.recorder.times_collator:
            self.collate_fn = self.recorder.time_collate_fn(self.collate_fn)
        try:
            return super().__iter__()
        finally:
            self.collate_fn, self.worker_init_fn, self.generator = settings

    def _prepare_workers(self, start: _IterationStart) -> None:
        """Set seed, collator and `worker_init_fn` for new workers."""
        if start.worker_seed is not None:
            self.generator = torch.Generator()
            with name_file_in_errors(DATA_STATE):
                self.generator.set_state(start.worker_seed)
        if self.recorder is not None:
            self.collate_fn = collator = StateSendingCollator(self.collate_fn)
            states = dict(start.worker_states)
            self.worker_init_fn = functools.partial(init_worker, self.worker_init_fn, collator, states)
            self.recorder.begin_workers(self.generator, draws_seed=start.worker_seed is None)


_NOTHING: Any = object()


def skip_first(loader: Any, batches: int) -> tuple[Any, int]:
    """A loader that skips batches once, and the number of batches that the caller must skip."""
    if isinstance(loader, PreparedDataLoader):
        loader.skip_first(batches)
        return loader, 0
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        sampler = samplers.SkippingBatchSampler(loader.batch_sampler, batches)
        return DataLoader(loader.dataset, batch_sampler=sampler, **samplers.settings_of(loader)), 0
    return loader, batches


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move all tensors in nested mappings, lists and tuples, and objects with a `to` method."""
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    if type(data) is dict:
        return {name: to_device(value, device, non_blocking) for name, value in data.items()}
    if isinstance(data, (dict, list, tuple, Mapping)):
        return rebuild_container(data, functools.partial(to_device, device=device, non_blocking=non_blocking))
    return data.to(device) if callable(getattr(data, "to", None)) else data
