"""Batches shared out to processes for evaluation: whole batches in turn, and no sample twice.

Batch `i` goes to process `i % processes`, so that the rows of all processes, concatenated in the order of their ranks,
are in the order of the dataset, and every batch is the one that a single process would see. Processes that have no
batch left when others do get a copy of the first as a filler: it keeps their collective operations in step (a sharded
model needs every process for every forward pass), and evaluation drops its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset


@dataclass(frozen=True)
class Share:
    """Which batches a process gets: those whose number is `rank` modulo `processes`."""

    rank: int = 0
    processes: int = 1


#: Of a single process.
ALL = Share()


class ShardedBatchSampler(BatchSampler):
    """The batches of one process.

    Args:
        batch_sampler: gives the indices of all batches, the same in every process.
        share: which of them are this process's.

    Attributes:
        count: batches of all processes in the last iteration; complete once that has ended.
    """

    def __init__(self, batch_sampler: Any, share: Share) -> None:
        self.batch_sampler = batch_sampler
        self.share = share
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        first, self.count = None, 0
        for batch in self.batch_sampler:
            first = batch if first is None else first
            if self.count % self.share.processes == self.share.rank:
                yield batch
            self.count += 1
        if first is not None and self.ends_with_filler:
            yield first

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.share.processes)

    @property
    def ends_with_filler(self) -> bool:
        """Whether this process's last batch is a filler."""
        return bool(self.count % self.share.processes) and self.share.rank >= self.count % self.share.processes

    @property
    def owns_last(self) -> bool:
        """Whether the last of all batches is this process's."""
        return self.count > 0 and (self.count - 1) % self.share.processes == self.share.rank

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


@dataclass(frozen=True)
class Filler:
    """A sample or a batch that only keeps step with the other processes."""

    data: Any


class ShardedStream(IterableDataset):
    """The samples of one process's batches of a stream that every process reads.

    Args:
        stream: the dataset, the same in every process.
        batch_size: samples in a batch; None when the stream gives whole batches.
        share: which batches are this process's.
        drop_last: whether an incomplete last batch is left out.
    """

    def __init__(self, stream: Any, batch_size: int | None, share: Share, drop_last: bool) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.share = share
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch the next iteration is, if it asks."""
        if callable(getattr(self.stream, "set_epoch", None)):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples, size = iter(self.stream), self.batch_size or 1
        first: list[Any] = []
        for count in itertools.count():
            batch = list(itertools.islice(samples, size))
            if len(batch) < size and (self.drop_last or not batch):
                break
            first = first or batch
            if count % self.share.processes == self.share.rank:
                yield from batch
        left = count % self.share.processes
        if left and self.share.rank >= left:
            yield from map(Filler, first)


def collate_marked(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Collate a batch of a `ShardedStream`; of fillers, the result is marked as one."""
    if isinstance(samples, Filler):
        return Filler(collate(samples.data))
    if isinstance(samples, list) and samples and isinstance(samples[0], Filler):
        return Filler(collate([sample.data for sample in samples]))
    return collate(samples)


def unsharded(dataset: Any) -> Any:
    """The dataset that the user gave."""
    return dataset.stream if isinstance(dataset, ShardedStream) else dataset
