"""Batches shared out to processes for evaluation: whole batches in turn, and no sample twice.

Batch `i` goes to process `i % processes`, so that the rows of all processes, concatenated in the order of their ranks,
are in the order of the dataset, and every batch is the one that a single process would see. Processes that have no
batch left when others do get a copy of the first as a filler: it keeps their collective operations in step (a sharded
model needs every process for every forward pass), and evaluation drops its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler


@dataclass(frozen=True)
class Share:
    """Which batches a process gets: those whose number is `rank` modulo `processes`."""

    rank: int = 0
    processes: int = 1

    def needs_filler(self, count: int) -> bool:
        """Whether others have one more of `count` batches than this process."""
        left = count % self.processes
        return left > 0 and self.rank >= left


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
        self.count = 0
        for batch, _ in shared_out(self._counted(), self.share):
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

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def shared_out(batches: Iterable[Any], share: Share) -> Iterator[tuple[Any, bool]]:
    """The batches of one process out of those of all, which every process reads, and whether each is a filler."""
    first, count = None, 0
    for batch in batches:
        first = batch if first is None else first
        if count % share.processes == share.rank:
            yield batch, False
        count += 1
    if share.needs_filler(count):
        yield first, True
