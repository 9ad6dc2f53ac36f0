"""Batches shared out to processes: for evaluation whole batches in turn, no sample twice; for training evenly.

Batch `i` goes to process `i % processes`, so that the rows of all processes, concatenated in the order of their ranks,
are in the order of the dataset, and every batch is the one that a single process would see. Processes that have no
batch left when others do get a copy of the first as a filler: it keeps their collective operations in step (a sharded
model needs every process for every forward pass), and evaluation drops its rows.

In training every process needs as many batches of the same size as the others: the last round is completed with
samples from the beginning of the epoch, in the order in which accelerate takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
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


class _BatchesOfOne(BatchSampler):
    """The batches of one process; all else is asked of the sampler that gives those of all.

    Args:
        batch_sampler: gives the indices of all batches, the same in every process.
        share: which of them are this process's.
    """

    def __init__(self, batch_sampler: Any, share: Share) -> None:
        self.batch_sampler = batch_sampler
        self.share = share

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class ShardedBatchSampler(_BatchesOfOne):
    """The batches of one process in an evaluation.

    Attributes:
        count: batches of all processes in the last iteration; complete once that has ended.
    """

    def __init__(self, batch_sampler: Any, share: Share) -> None:
        super().__init__(batch_sampler, share)
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


class EvenBatchSampler(_BatchesOfOne):
    """The batches of one process in training: as many and as large as those of every other.

    A sampler without `batch_size` gives batches of any size, and whole ones complete the last round. With `drop_last`
    an incomplete round is left out.
    """

    def __iter__(self) -> Iterator[list[int]]:
        size, processes = getattr(self.batch_sampler, "batch_size", None), self.share.processes
        first: list[list[int]] = []
        in_turn: list[list[int]] = []
        for batch in self.batch_sampler:
            if len(in_turn) == processes:  # its last batch was short, and yet not the last of all
                yield in_turn[self.share.rank]
                in_turn = []
            if len(first) < processes:
                first.append(list(batch))
            in_turn.append(batch)
            if len(in_turn) == processes and (size is None or len(batch) == size):
                yield in_turn[self.share.rank]
                in_turn = []
        if in_turn and not self._drops_last:
            yield _completed(in_turn, first, size, processes)[self.share.rank]

    @property
    def _drops_last(self) -> bool:
        return getattr(self.batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.batch_sampler), self.share.processes)
        return rounds + (left > 0 and not self._drops_last)


def _completed(in_turn: list[Any], first: list[Any], size: int | None, processes: int) -> list[Any]:
    """The batches of the last round, one for each process, filled up from the epoch's first."""
    if size is None:
        return [*in_turn, *islice(cycle(first), processes - len(in_turn))]
    samples = cycle(chain.from_iterable(first))
    last = [*in_turn[-1], *islice(samples, size - len(in_turn[-1]))]
    return [*in_turn[:-1], last, *(list(islice(samples, size)) for _ in range(processes - len(in_turn)))]


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
