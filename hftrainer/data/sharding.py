"""Sharding batches over processes: in evaluation round-robin, no sample twice; in training, equally many each.

Batch `i` goes to rank `i % processes`. So the rows of all processes, concatenated in rank order, are in the order of
the dataset, and every batch is the one that a single process would see. In the last round, processes without a batch
get a copy of the first one as a filler: it keeps collective operations in step (a sharded model needs every process
for every forward pass), and evaluation drops its rows.

In training every process needs the same number of batches of the same size: the last round is completed with samples
from the beginning of the epoch, in the order in which accelerate takes them.

`DataCollectives` are for `dispatch_batches` of accelerate: the main process reads all batches and scatters them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from hftrainer.compat.overrides import has_length
from hftrainer.errors import InvalidArgument, UnsupportedArgument


@dataclass(frozen=True)
class ShardSpec:
    """Which batches a process gets: those whose number is `rank` modulo `processes`."""

    rank: int = 0
    processes: int = 1

    def needs_filler(self, count: int) -> bool:
        """Whether other processes get one more of `count` batches than this one."""
        left = count % self.processes
        return left > 0 and self.rank >= left


#: The spec of a single process.
ALL = ShardSpec()


class _BatchesOfOne(BatchSampler):
    """The batches of one process; other attributes are those of the wrapped sampler.

    Args:
        batch_sampler: yields the indices of all batches, the same in every process.
        share: which of them are this process's.
    """

    def __init__(self, batch_sampler: Any, share: ShardSpec) -> None:
        self.batch_sampler = batch_sampler
        self.share = share

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class ShardedBatchSampler(_BatchesOfOne):
    """The batches of one process in an evaluation.

    Attributes:
        count: batches of all processes in the last iteration; final once it has ended.
    """

    def __init__(self, batch_sampler: Any, share: ShardSpec) -> None:
        super().__init__(batch_sampler, share)
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.count = 0
        for batch, _ in batches_of_rank(self._counted(), self.share):
            yield batch

    def _counted(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            self.count += 1
            yield batch

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.share.processes)

    @property
    def ends_with_filler(self) -> bool:
        """Whether this process's last batch is a filler."""
        return self.share.needs_filler(self.count)

    @property
    def owns_last(self) -> bool:
        """Whether the last of all batches is this process's."""
        return self.count > 0 and (self.count - 1) % self.share.processes == self.share.rank


class EvenBatchSampler(_BatchesOfOne):
    """The batches of one process in training: equally many in all processes, and equally large unless `even` is False.

    A sampler without `batch_size` yields batches of any size, and whole batches complete the last round. With
    `drop_last` an incomplete round is dropped.

    Args:
        batch_sampler: yields the indices of all batches, the same in every process.
        share: which of them are this process's.
        split: split each batch among the processes, instead of giving it to one of them.
        even: complete the last round with samples from the epoch's beginning.

    Raises:
        InvalidArgument: when a batch cannot be split into equal parts.
        UnsupportedArgument: when `even` is False and processes would get different numbers of batches.
    """

    def __init__(self, batch_sampler: Any, share: ShardSpec, *, split: bool = False, even: bool = True) -> None:
        super().__init__(batch_sampler, share)
        self.split, self.even = split, even
        if split:
            check_split(self._size, share.processes)
        if not even and not self._drops_last and not self._divides():
            raise UnsupportedArgument(
                f"accelerator_config['even_batches']=False: the {share.processes} processes would get different "
                "numbers of batches, and those with one more would wait forever. Set dataloader_drop_last=True, or "
                "remove even_batches."
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts() if self.split else self._whole()

    def _whole(self) -> Iterator[list[int]]:
        size, processes = self._size, self.share.processes
        first: list[list[int]] = []
        in_turn: list[list[int]] = []
        for batch in self.batch_sampler:
            if len(in_turn) == processes:  # the round ends with a short batch, but is not the last one
                yield in_turn[self.share.rank]
                in_turn = []
            if len(first) < processes:
                first.append(list(batch))
            in_turn.append(batch)
            if len(in_turn) == processes and (size is None or len(batch) == size):
                yield in_turn[self.share.rank]
                in_turn = []
        if in_turn and not self._drops_last:
            last = _completed(in_turn, first, size, processes) if self.even else in_turn
            yield last[self.share.rank]

    def _parts(self) -> Iterator[list[int]]:
        size, first = self._size, None
        assert size is not None
        of_one = size // self.share.processes
        part = slice(self.share.rank * of_one, (self.share.rank + 1) * of_one)
        for batch in self.batch_sampler:
            first = list(batch) if first is None else first
            if len(batch) < size and self.even:
                batch = [*batch, *islice(cycle(first), size - len(batch))]
            yield batch[part]

    def _divides(self) -> bool:
        """Whether all processes get equally many batches without completing the last round."""
        if not self.split:
            return has_length(self.batch_sampler) and len(self.batch_sampler) % self.share.processes == 0
        sampler, size = getattr(self.batch_sampler, "sampler", None), self._size
        assert size is not None
        left = len(sampler) % size if has_length(sampler) else 1  # type: ignore[arg-type]
        return not left or left > size - size // self.share.processes

    @property
    def _size(self) -> int | None:
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def _drops_last(self) -> bool:
        return getattr(self.batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        if self.split:
            return len(self.batch_sampler)
        rounds, left = divmod(len(self.batch_sampler), self.share.processes)
        return rounds + (left > 0 and not self._drops_last)


def check_split(size: int | None, processes: int) -> None:
    """Raise InvalidArgument unless batches of `size` samples can be split into equal parts."""
    if size is None or size % processes:
        raise InvalidArgument(
            f"accelerator_config['split_batches']=True splits each batch among {processes} processes, but a batch has "
            f"{'an unknown number of' if size is None else size} samples: set per_device_train_batch_size to a "
            f"multiple of {processes}."
        )


def _completed(in_turn: list[Any], first: list[Any], size: int | None, processes: int) -> list[Any]:
    """The batches of the last round, one for each process, completed from the epoch's first."""
    if size is None:
        return [*in_turn, *islice(cycle(first), processes - len(in_turn))]
    samples = cycle(chain.from_iterable(first))
    last = [*in_turn[-1], *islice(samples, size - len(in_turn[-1]))]
    return [*in_turn[:-1], last, *(list(islice(samples, size)) for _ in range(processes - len(in_turn)))]


class ShardedStream(IterableDataset):
    """The samples of one process from a stream that every process reads.

    A round is `size` samples for each process. The last is completed with samples from the first, or dropped.

    Args:
        dataset: the stream. If it has no `set_epoch`, a torch generator in its attribute `generator` is seeded with
            the epoch's number, as in accelerate.
        share: rank and number of processes.
        size: samples of one process in a round.
        drop_last: drop an incomplete round.
    """

    def __init__(self, dataset: Any, share: ShardSpec, size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.share = share
        self.size = size
        self.drop_last = drop_last
        self.epoch = 0

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in the stream."""
        self.epoch = epoch
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        whole = self.size * self.share.processes
        mine = slice(self.share.rank * self.size, (self.share.rank + 1) * self.size)
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
        whole = self.size * self.share.processes
        count = len(self.dataset)
        return (count // whole if self.drop_last else -(-count // whole)) * self.size


def batches_of_rank(batches: Iterable[Any], share: ShardSpec) -> Iterator[tuple[Any, bool]]:
    """The batches of one process, from those of all, which every process reads; and whether each is a filler."""
    first, count = None, 0
    for batch in batches:
        first = batch if first is None else first
        if count % share.processes == share.rank:
            yield batch, False
        count += 1
    if share.needs_filler(count):
        yield first, True


@dataclass(frozen=True)
class DataCollectives:
    """Collective operations for data.

    Attributes:
        from_main: calls a function in the main process and broadcasts its result.
        scatter: calls a function in the main process and scatters its list, one item for each rank.
        highest: the element-wise maximum of a list of numbers over all ranks.
    """

    from_main: Callable[[Callable[[], Any]], Any]
    scatter: Callable[[Callable[[], list[Any]]], Any]
    highest: Callable[[list[int]], list[int]]


def rounds(batches: Iterator[Any], count: int, drop_last: bool) -> Iterator[list[Any]]:
    """Batches in groups of `count`; the last may have fewer, unless it is dropped. Does not read beyond a group."""
    while len(taken := list(islice(batches, count))) == count:
        yield taken
    if taken and not drop_last:
        yield taken


def parts(groups: Iterable[list[Any]], processes: int, drop_last: bool) -> Iterator[list[Any]]:
    """Concatenates each group of batches and splits its rows into equal parts, one for each process.

    Missing rows are taken from the first group; with `drop_last`, surplus rows are dropped instead.

    Raises:
        InvalidArgument: for batches that cannot be concatenated.
    """
    first: Any = None
    for group in groups:
        whole = _joined(group)
        first = _rows(whole, 0, processes) if first is None else first
        size, left = divmod(_count(whole), processes)
        if left and not drop_last:
            whole, size = _joined([whole, first]), size + 1
        yield [_rows(whole, rank * size, (rank + 1) * size) for rank in range(processes)]


_INSTEAD = "set accelerator_config={'dispatch_batches': False}, so that each process reads its own batches."


def _joined(batches: list[Any]) -> Any:
    try:
        return _combined(torch.cat, batches)
    except RuntimeError as error:
        raise InvalidArgument(
            f"The main process cannot concatenate batches of different shapes: {error}. Pad all batches to one "
            f"length, or {_INSTEAD}"
        ) from error


def _rows(batch: Any, start: int, stop: int) -> Any:
    # Cloned, since pickling a slice of a tensor pickles the whole storage.
    return _combined(lambda tensors: tensors[0][start:stop].clone(), [batch])


def _count(batch: Any) -> int:
    """Rows of the first tensor in a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def _combined(function: Callable[[list[torch.Tensor]], torch.Tensor], batches: list[Any]) -> Any:
    """A batch of the same structure as `batches`; `function` gets the tensors of each leaf, one from each batch."""
    head = batches[0]
    if isinstance(head, torch.Tensor):
        return function(batches)
    if isinstance(head, Mapping):
        made = {key: _combined(function, [batch[key] for batch in batches]) for key in head}
        return made if type(head) is dict else type(head)(made)  # type: ignore[call-arg]
    if isinstance(head, (list, tuple)):
        items = [_combined(function, list(column)) for column in zip(*batches, strict=True)]
        return type(head)(*items) if hasattr(head, "_fields") else type(head)(items)
    raise InvalidArgument(f"The main process can scatter tensors, not a {type(head).__name__}: {_INSTEAD}")
