"""Samplers: seeded random order, samples grouped by length, batches of one rank, and skipping batches when resuming.

Batch `i` goes to rank `i % processes`. So the batches are those of a single process, and the rows of all ranks,
concatenated by rank, are in the dataset's order. In the last round of an evaluation, ranks without a batch get a copy
of the first one as a filler: it keeps collective operations in step (a sharded model needs every rank for every
forward pass), and evaluation drops its rows.

In training every rank needs the same number of batches of the same size: the last round is completed with samples from
the beginning of the epoch, in the order in which accelerate takes them.
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

from hftrainer.compat.overrides import has_length
from hftrainer.errors import InvalidArgument, UnsupportedArgument

logger = logging.getLogger(__name__)

#: Maximum number of batches that are sorted together; these groups are in random order.
_BATCHES_SORTED_TOGETHER = 50


def has_exact_length(loader: Any) -> bool:
    """Whether a loader's length is exact; lengths of a script's samplers, batch samplers and loaders may be guesses."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches: Any = loader.batch_sampler
    while type(batches) is not BatchSampler and hasattr(batches, "batch_sampler"):  # ours, around the script's
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
    """The seed of the order of samples: `data_seed`, or else `seed`."""
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on seed and epoch, not on earlier draws.

    Args:
        data_source: the dataset.
        seed: the permutation of epoch `e` comes from a generator seeded with `seed + e`.
    """

    seeds_itself = True  # so its generator's state need not be saved

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


class BatchSamplerWrapper(BatchSampler):
    """A batch sampler that wraps another one and forwards its attributes."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
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
    """A batch sampler that skips its first batches once, so that their samples are never loaded.

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
        return self._indices()

    def _indices(self) -> Iterator[list[int]]:
        # Skip at the first request, not earlier: the loader draws its seed in between.
        self.skip_now()
        self.unread.clear()
        for batch in self._batches:
            if self.recorded_indices is not None:
                self.recorded_indices.append(list(batch))
            self.unread.append(batch)
            yield batch

    def skip_now(self) -> None:
        """Skip the batches now, if not yet done."""
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
        return {**vars(self), "_batches": None}  # for spawned workers, which do not iterate over it


class LengthGroupedSampler(Sampler[int]):
    """Yields samples in random order, roughly sorted by length, to reduce padding.

    The samples are shuffled and cut into groups of up to 50 batches; each group is sorted, longest first. The longest
    sample of all comes first, so that running out of memory shows at once.

    Args:
        batch_size: samples in an optimizer step.
        dataset: the samples; read once for their lengths if `lengths` is None.
        lengths: length of each sample, in tokens.
        model_input_name: the key in a sample whose value determines the sample's length.
        generator: draws the order; None takes torch's global generator.

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
        together = self.batch_size * (min(len(lengths) // (self.batch_size * 4), _BATCHES_SORTED_TOGETHER) or 1)
        groups = [
            sorted(order[start : start + together], key=lengths.__getitem__, reverse=True)
            for start in range(0, len(order), together)
        ]
        if groups:
            with_longest = max(range(len(groups)), key=lambda group: lengths[groups[group][0]])
            groups[0][0], groups[with_longest][0] = groups[with_longest][0], groups[0][0]
        return iter([index for group in groups for index in group])


def count_lengths(dataset: Any, name: str) -> list[int]:
    """The length of each sample's `name`; reads the whole dataset.

    Raises:
        InvalidArgument: when the samples do not have it.
    """
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        has = f"the keys {', '.join(first)}" if isinstance(first, Mapping) else f"type {type(first).__name__}"
        raise InvalidArgument(
            f"The lengths of the samples are not known: they have {has}, but not {name!r}. Add a column with the "
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
    """The batches of one process: those whose index is `rank` modulo `processes`."""

    rank: int = 0
    processes: int = 1

    def needs_filler(self, count: int) -> bool:
        """Whether this rank gets one batch fewer than other ranks, out of `count` batches."""
        left = count % self.processes
        return left > 0 and self.rank >= left


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
        for batch, _ in batches_of_rank(self._counted(), self.shard_spec):
            yield batch

    def _counted(self) -> Iterator[list[int]]:
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
    """The batches of one process in training. All processes get equally many, of equal size unless `even` is False.

    A sampler without `batch_size` yields batches of any size, and whole batches complete the last round. With
    `drop_last` an incomplete round is dropped.

    Args:
        batch_sampler: yields the indices of all batches, the same in every process.
        shard_spec: which of these batches belong to this process.
        split: split each batch among the processes, instead of giving it to one of them.
        even: complete the last round with samples from the epoch's beginning.

    Raises:
        UnsupportedArgument: when `even` is False and processes would get different numbers of batches.
    """

    def __init__(self, batch_sampler: Any, shard_spec: ShardSpec, *, split: bool = False, even: bool = True) -> None:
        super().__init__(batch_sampler)
        self.shard_spec = shard_spec
        self.split, self.even = split, even
        if not even and not self._drops_last and not self._divides():
            raise UnsupportedArgument(
                f"accelerator_config['even_batches']=False: the {shard_spec.processes} processes would get different "
                "numbers of batches, and those with one more would wait forever. Set dataloader_drop_last=True, or "
                "remove even_batches."
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts() if self.split else self._whole()

    def _whole(self) -> Iterator[list[int]]:
        size, processes = self._size, self.shard_spec.processes
        first: list[list[int]] = []
        in_turn: list[list[int]] = []
        for batch in self.batch_sampler:
            if len(in_turn) == processes:  # the round ends with a short batch, but is not the last one
                yield in_turn[self.shard_spec.rank]
                in_turn = []
            if len(first) < processes:
                first.append(list(batch))
            in_turn.append(batch)
            if len(in_turn) == processes and (size is None or len(batch) == size):
                yield in_turn[self.shard_spec.rank]
                in_turn = []
        if not in_turn or self._drops_last:
            return
        if size is None and self.even:
            in_turn += islice(cycle(first), processes - len(in_turn))
        elif size is not None and self.even:
            samples = cycle(chain.from_iterable(first))
            in_turn[-1] = [*in_turn[-1], *islice(samples, size - len(in_turn[-1]))]
            in_turn += (list(islice(samples, size)) for _ in range(processes - len(in_turn)))
        yield in_turn[self.shard_spec.rank]

    def _parts(self) -> Iterator[list[int]]:
        size, first = self._size, None
        assert size is not None
        of_one = size // self.shard_spec.processes
        part = slice(self.shard_spec.rank * of_one, (self.shard_spec.rank + 1) * of_one)
        for batch in self.batch_sampler:
            first = list(batch) if first is None else first
            if len(batch) < size and self.even:
                batch = [*batch, *islice(cycle(first), size - len(batch))]
            yield batch[part]

    def _divides(self) -> bool:
        """Whether all processes get equally many batches without completing the last round."""
        if not self.split:
            return has_length(self.batch_sampler) and len(self.batch_sampler) % self.shard_spec.processes == 0
        sampler, size = getattr(self.batch_sampler, "sampler", None), self._size
        assert size is not None
        left = len(sampler) % size if has_length(sampler) else 1  # type: ignore[arg-type]
        return not left or left > size - size // self.shard_spec.processes

    @property
    def _size(self) -> int | None:
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def _drops_last(self) -> bool:
        return getattr(self.batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        if self.split:
            return len(self.batch_sampler)
        rounds, left = divmod(len(self.batch_sampler), self.shard_spec.processes)
        return rounds + (left > 0 and not self._drops_last)


def check_split(size: int | None, processes: int) -> None:
    """Raise InvalidArgument unless batches of `size` samples can be split into equal parts."""
    if size is None or size % processes:
        raise InvalidArgument(
            f"accelerator_config['split_batches']=True splits each batch among {processes} processes, but a batch has "
            f"{'an unknown number of' if size is None else size} samples: set per_device_train_batch_size to a "
            f"multiple of {processes}."
        )


def set_epoch(part: Any, epoch: int) -> None:
    """Set the epoch of the next iteration in a sampler, dataset or loader that has `set_epoch`."""
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


class StreamWrapper(IterableDataset[Any]):
    """A stream that passes on samples of another one, and has its attributes.

    Args:
        dataset: the stream. If it has no `set_epoch`, a torch generator in its attribute `generator` is seeded with
            the epoch's number, as in accelerate.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.epoch = dataset, 0

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in the stream."""
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def seed_generator(self) -> None:
        """Seed the stream's generator, if that is what the epoch's order depends on."""
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)


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
        self.shard_spec = shard_spec
        self.size = size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        self.seed_generator()
        whole = self.size * self.shard_spec.processes
        mine = slice(self.shard_spec.rank * self.size, (self.shard_spec.rank + 1) * self.size)
        first: list[Any] | None = None
        current: list[Any] = []
        for sample in self.dataset:
            current.append(sample)
            if len(current) == whole:
                yield from current[mine]
                first, current = first or current, []
        if current and not self.drop_last:
            yield from [*current, *islice(cycle(first or current), whole - len(current))][mine]

    def __len__(self) -> int:
        whole = self.size * self.shard_spec.processes
        count = len(self.dataset)
        return (count // whole if self.drop_last else -(-count // whole)) * self.size


def batches_of_rank(batches: Iterable[Any], shard_spec: ShardSpec) -> Iterator[tuple[Any, bool]]:
    """Yields this rank's batches, each with a flag that says whether it is a filler."""
    first, count = None, 0
    for batch in batches:
        first = batch if first is None else first
        if count % shard_spec.processes == shard_spec.rank:
            yield batch, False
        count += 1
    if shard_spec.needs_filler(count):
        yield first, True
