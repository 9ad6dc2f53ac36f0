"""Samplers: seeded random order, grouping by length, batches of one rank, and skipping batches.

Batch `i` goes to rank `i % processes`. So the batches are those of a single process, and the rows of all ranks,
concatenated by rank, are in the dataset's order. In the last round of an evaluation, ranks without a batch get a copy
of the first batch as a filler. The filler keeps collective operations in step (a sharded model needs every rank for
every forward pass), and evaluation drops its rows.

In training every rank needs the same number of batches of the same size. Samples from the beginning of the epoch
complete the last round, in accelerate's order.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hftrainer.compat.libraries import has_length
from hftrainer.errors import InvalidArgument, UnsupportedArgument

logger = logging.getLogger(__name__)

#: Maximum number of batches that are sorted together. Such groups are in random order.
_BATCHES_SORTED_TOGETHER = 50


def has_exact_length(loader: Any) -> bool:
    """Whether a loader's length is exact. A script's own samplers and loaders may only estimate it."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches: Any = loader.batch_sampler
    # Unwrap our batch samplers around the script's.
    while type(batches) is not BatchSampler and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return getattr(batches, "has_exact_length", False)
    sampler = loader.sampler if batches is None else batches.sampler
    return type(sampler).__module__.startswith(("torch.", "hftrainer."))


_SETTINGS = """
    num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor
    persistent_workers in_order
""".split()


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings, except dataset and samplers."""
    return {name: getattr(loader, name) for name in _SETTINGS}


def seed_of_order(args: Any) -> int:
    """The seed of the sample order: `data_seed`, or `seed` if `data_seed` is None."""
    return args.seed if args.data_seed is None else args.data_seed


class EpochSampler:
    """A sampler whose order depends on the epoch, counted from 0."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


class SeedableRandomSampler(EpochSampler, RandomSampler):
    """A random sampler whose order depends only on seed and epoch, not on earlier draws.

    Args:
        data_source: the dataset.
        seed: the permutation of epoch `e` comes from a generator seeded with `seed + e`.
    """

    # A checkpoint needs no state of this sampler's generator.
    seeds_itself = True

    def __init__(self, data_source: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(data_source, **kwargs)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()


class BatchSamplerWrapper(BatchSampler):
    """A batch sampler that wraps another one and forwards its attributes."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __getattr__(self, name: str) -> Any:
        # While a worker unpickles the object, it has no attributes yet.
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def innermost(batch_sampler: Any) -> Any:
    """A batch sampler without any of our wrappers."""
    while isinstance(batch_sampler, BatchSamplerWrapper):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


class SkippingBatchSampler(BatchSamplerWrapper):
    """A batch sampler that skips its first batches once, without loading their samples.

    Args:
        batch_sampler: yields the indices.
        skipped: batches to skip in the next iteration.

    Attributes:
        recorded_indices: if it is a list, the indices of each yielded batch are appended to it.
        unread: the indices of each batch that the loader has not returned yet; workers read several ahead.
    """

    def __init__(self, batch_sampler: Any, skipped: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skipped = skipped
        self.recorded_indices: list[list[int]] | None = None
        self.unread: collections.deque[list[int]] = collections.deque()
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = iter(self.batch_sampler)
        return self._read_batches()

    def _read_batches(self) -> Iterator[list[int]]:
        # Skip at the first request, not earlier: the loader draws its seed in between.
        self.skip_now()
        self.unread.clear()
        for batch in self._batches:
            if self.recorded_indices is not None:
                self.recorded_indices.append(list(batch))
            self.unread.append(batch)
            yield batch

    def skip_now(self) -> None:
        """Skip the batches now, unless they have been skipped."""
        skipped, self.skipped = self.skipped, 0
        batches = self.batch_sampler
        if skipped and type(batches) is BatchSampler:
            # Skip indices, so that no batches are built just to be skipped. The iterator has not started yet.
            indices = iter(batches.sampler)
            collections.deque(islice(indices, skipped * batches.batch_size), maxlen=0)
            self._batches = iter(BatchSampler(indices, batches.batch_size, batches.drop_last))
            return
        for _ in range(skipped):
            next(self._batches, None)

    def __getstate__(self) -> dict[str, Any]:
        # An iterator cannot be pickled, and spawned workers do not need it.
        return {**vars(self), "_batches": None}


class LengthGroupedSampler(Sampler[int]):
    """Yields samples in random order, roughly sorted by length, to reduce padding.

    The samples are shuffled and cut into groups of up to 50 batches; each group is sorted, longest first. The longest
    sample comes first, so that a lack of memory shows at once.

    Args:
        batch_size: samples in an optimizer step.
        dataset: the samples; read once for the lengths if `lengths` is None.
        lengths: length of each sample, in tokens.
        model_input_name: the key in a sample whose value determines the sample's length.
        generator: draws the order; None uses torch's global generator.

    Raises:
        InvalidArgument: when the lengths cannot be determined.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Sequence[int] | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if dataset is None and lengths is None:
            raise InvalidArgument("LengthGroupedSampler needs the dataset or its lengths.")
        self.batch_size = batch_size
        self.lengths = count_lengths(dataset, model_input_name or "input_ids") if lengths is None else list(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        lengths = self.lengths
        order = torch.randperm(len(lengths), generator=self.generator).tolist()
        group_size = self.batch_size * (min(len(lengths) // (self.batch_size * 4), _BATCHES_SORTED_TOGETHER) or 1)
        groups = [
            sorted(order[start : start + group_size], key=lengths.__getitem__, reverse=True)
            for start in range(0, len(order), group_size)
        ]
        if groups:
            longest_group = max(range(len(groups)), key=lambda group: lengths[groups[group][0]])
            groups[0][0], groups[longest_group][0] = groups[longest_group][0], groups[0][0]
        return iter([index for group in groups for index in group])


def count_lengths(dataset: Any, name: str) -> list[int]:
    """The length of each sample's value for `name`. Reads the complete dataset.

    Raises:
        InvalidArgument: when the samples do not have this key.
    """
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        keys = f"the keys {', '.join(first)}" if isinstance(first, Mapping) else f"type {type(first).__name__}"
        raise InvalidArgument(
            f"The lengths of the samples are unknown: samples have {keys}, but not {name!r}. Add a column with the "
            "lengths, and set length_column_name to its name."
        )
    if len(shape := getattr(first[name], "shape", ())) > 1 or isinstance(next(iter(first[name]), None), (list, tuple)):
        logger.warning(
            "The samples are grouped by the first dimension of %r (shape %s), %d in the first sample. If that is not "
            "their length, add a column with the lengths, and set length_column_name to its name.",
            name,
            tuple(shape) or "nested lists",
            len(first[name]),
        )
    return [len(sample[name]) for sample in dataset]


# ---- The batches and samples of one rank -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardSpec:
    """The batches of one process: those whose index modulo `processes` is `rank`."""

    rank: int = 0
    processes: int = 1

    def needs_filler(self, num_batches: int) -> bool:
        """Whether this rank gets one batch fewer than other ranks, out of `num_batches` batches."""
        remainder = num_batches % self.processes
        return remainder > 0 and self.rank >= remainder


#: The spec of a single process.
UNSHARDED = ShardSpec()


class ShardedBatchSampler(BatchSamplerWrapper):
    """The batches of one process in an evaluation.

    Attributes:
        count: batches of all processes in the last iteration; final once it has ended.
    """

    def __init__(self, batch_sampler: Any, shard_spec: ShardSpec) -> None:
        super().__init__(batch_sampler)
        self.shard_spec = shard_spec
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.count = 0
        for batch, _ in batches_of_rank(self._count_batches(), self.shard_spec):
            yield batch

    def _count_batches(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            self.count += 1
            yield batch

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.shard_spec.processes)

    @property
    def ends_with_filler(self) -> bool:
        """Whether this process's last batch is a filler."""
        return self.shard_spec.needs_filler(self.count)

    @property
    def owns_last(self) -> bool:
        """Whether the last of all batches belongs to this process."""
        return self.count > 0 and (self.count - 1) % self.shard_spec.processes == self.shard_spec.rank


class EvenBatchSampler(BatchSamplerWrapper):
    """The batches of one process in training, equally many for all processes.

    The batches have equal size unless `even` is False. A sampler without `batch_size` yields batches of any size, and
    complete batches fill the last round. With `drop_last` an incomplete round is dropped.

    Args:
        batch_sampler: yields the indices of all batches, the same in every process.
        shard_spec: which of these batches belong to this process.
        split: split each batch among the processes, instead of assigning it to one process.
        even: complete the last round with samples from the epoch's beginning.

    Raises:
        UnsupportedArgument: when `even` is False and processes would get different numbers of batches.
    """

    def __init__(self, batch_sampler: Any, shard_spec: ShardSpec, *, split: bool = False, even: bool = True) -> None:
        super().__init__(batch_sampler)
        self.shard_spec = shard_spec
        self.split, self.even = split, even
        self._batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self._drops_last: bool = getattr(batch_sampler, "drop_last", False)
        if not even and not self._drops_last and not self._divides_evenly():
            raise UnsupportedArgument(
                f"accelerator_config['even_batches']=False: the {shard_spec.processes} processes would get different "
                "numbers of batches, and those with an extra batch would wait forever. Set dataloader_drop_last=True, "
                "or remove even_batches."
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._split_batches() if self.split else self._assign_batches()

    def _assign_batches(self) -> Iterator[list[int]]:
        size, processes = self._batch_size, self.shard_spec.processes
        first_batches: list[list[int]] = []
        current_round: list[list[int]] = []
        for batch in self.batch_sampler:
            # The round ends with a short batch, but is not the last round.
            if len(current_round) == processes:
                yield current_round[self.shard_spec.rank]
                current_round = []
            if len(first_batches) < processes:
                first_batches.append(list(batch))
            current_round.append(batch)
            if len(current_round) == processes and (size is None or len(batch) == size):
                yield current_round[self.shard_spec.rank]
                current_round = []
        if not current_round or self._drops_last:
            return
        if size is None and self.even:
            current_round += islice(cycle(first_batches), processes - len(current_round))
        elif size is not None and self.even:
            samples = cycle(chain.from_iterable(first_batches))
            current_round[-1] = [*current_round[-1], *islice(samples, size - len(current_round[-1]))]
            current_round += (list(islice(samples, size)) for _ in range(processes - len(current_round)))
        yield current_round[self.shard_spec.rank]

    def _split_batches(self) -> Iterator[list[int]]:
        size, first_batch = self._batch_size, None
        assert size is not None
        part_size = size // self.shard_spec.processes
        rank_slice = slice(self.shard_spec.rank * part_size, (self.shard_spec.rank + 1) * part_size)
        for batch in self.batch_sampler:
            first_batch = list(batch) if first_batch is None else first_batch
            if len(batch) < size and self.even:
                batch = [*batch, *islice(cycle(first_batch), size - len(batch))]
            yield batch[rank_slice]

    def _divides_evenly(self) -> bool:
        """Whether all processes get equally many batches if the last round is not completed."""
        if not self.split:
            return has_length(self.batch_sampler) and len(self.batch_sampler) % self.shard_spec.processes == 0
        sampler, size = getattr(self.batch_sampler, "sampler", None), self._batch_size
        assert size is not None
        remainder = len(sampler) % size if has_length(sampler) else 1  # type: ignore[arg-type]
        return not remainder or remainder > size - size // self.shard_spec.processes

    def __len__(self) -> int:
        if self.split:
            return len(self.batch_sampler)
        rounds, remainder = divmod(len(self.batch_sampler), self.shard_spec.processes)
        return rounds + (remainder > 0 and not self._drops_last)


def check_split(size: int | None, processes: int) -> None:
    """Raise InvalidArgument unless batches of `size` samples can be split into equal parts."""
    if size is None or size % processes:
        raise InvalidArgument(
            f"accelerator_config['split_batches']=True splits each batch among {processes} processes, but a batch has "
            f"{'an unknown number of' if size is None else size} samples: set per_device_train_batch_size to a "
            f"multiple of {processes}."
        )


def set_epoch(part: Any, epoch: int) -> None:
    """Set the epoch of the next iteration in an object that has `set_epoch`."""
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


class StreamWrapper(IterableDataset[Any]):
    """A stream that wraps another one and forwards its attributes.

    Args:
        dataset: the wrapped stream. If it has no `set_epoch`, a torch generator in its attribute `generator` is seeded
            with the epoch's number, as in accelerate.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.epoch = dataset, 0

    def __getattr__(self, name: str) -> Any:
        # While a worker unpickles the object, it has no attributes yet.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in the stream."""
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def seed_generator(self) -> None:
        """Seed the stream's generator, if the epoch's order depends on it."""
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)


def complete_groups(
    samples: Iterable[Any], size: int, drop_last: bool, first: Iterable[Any] | None = None
) -> Iterator[list[Any]]:
    """Yields groups of `size` samples.

    Args:
        samples: the samples to group.
        size: samples of a group.
        drop_last: drop an incomplete last group, rather than completing it with the first samples.
        first: the first samples, if `samples` do not begin with them.
    """
    iterator = iter(samples)
    while group := list(islice(iterator, size)):
        first = list(group) if first is None else first
        if len(group) < size:
            if drop_last:
                return
            group += islice(cycle(first), size - len(group))
        yield group


def count_complete_samples(samples: int, size: int, drop_last: bool) -> int:
    """The number of samples in the groups that `complete_groups` yields for `samples` of them."""
    return (samples // size if drop_last else -(-samples // size)) * size


class ShardedStream(StreamWrapper):
    """The samples of one process from a stream that every process reads.

    A round is `size` samples for each process. The last round is completed with samples of the first, or dropped.

    Args:
        dataset: the stream.
        shard_spec: rank and number of processes.
        size: samples of one process in a round.
        drop_last: drop an incomplete round.
    """

    def __init__(self, dataset: Any, shard_spec: ShardSpec, size: int, drop_last: bool) -> None:
        super().__init__(dataset)
        self.shard_spec, self.size, self.drop_last = shard_spec, size, drop_last
        self._round_size = size * shard_spec.processes

    def __iter__(self) -> Iterator[Any]:
        self.seed_generator()
        start = self.shard_spec.rank * self.size
        for group in complete_groups(self.dataset, self._round_size, self.drop_last):
            yield from group[start : start + self.size]

    def __len__(self) -> int:
        return count_complete_samples(len(self.dataset), self._round_size, self.drop_last) // self.shard_spec.processes


def batches_of_rank(batches: Iterable[Any], shard_spec: ShardSpec) -> Iterator[tuple[Any, bool]]:
    """Yields this rank's batches, each with a flag whether it is a filler."""
    first_batch, num_batches = None, 0
    for batch in batches:
        first_batch = batch if first_batch is None else first_batch
        if num_batches % shard_spec.processes == shard_spec.rank:
            yield batch, False
        num_batches += 1
    if shard_spec.needs_filler(num_batches):
        yield first_batch, True
