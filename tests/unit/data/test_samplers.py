"""The batches and samples of each process: in training those of accelerate's classes, over many sizes."""

import itertools

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from hftrainer.data import samplers
from hftrainer.data.samplers import (
    EvenBatchSampler,
    LengthGroupedSampler,
    ShardedBatchSampler,
    ShardedStream,
    ShardSpec,
)
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.small_models import Numbers


def in_order(count, size, drop_last):
    return BatchSampler(SequentialSampler(range(count)), size, drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_sharded_batches_match_accelerate(processes, split, even, drop_last):
    """Where all processes get equally many batches; other sizes are refused."""
    from accelerate.data_loader import BatchSamplerShard

    honoured = refused = 0
    for count, size in itertools.product(range(30), range(1, 6)):
        size *= processes if split else 1
        settings = {"split_batches": split, "even_batches": even}
        theirs = [
            list(BatchSamplerShard(in_order(count, size, drop_last), processes, rank, **settings))
            for rank in range(processes)
        ]
        if len(set(map(len, theirs))) > 1:
            refused += 1
            with pytest.raises(UnsupportedArgument, match="even_batches"):
                EvenBatchSampler(in_order(count, size, drop_last), ShardSpec(0, processes), split=split, even=even)
            continue
        for rank in range(processes):
            share = ShardSpec(rank, processes)
            ours = EvenBatchSampler(in_order(count, size, drop_last), share, split=split, even=even)
            assert list(ours) == theirs[rank]
            assert len(ours) == len(theirs[rank])
            honoured += 1
    assert honoured
    assert bool(refused) == (not even and not drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_sharded_streams_match_accelerate(processes, drop_last):
    from accelerate.data_loader import IterableDatasetShard

    for count, size, rank in itertools.product(range(30), range(1, 5), range(processes)):
        ours = ShardedStream(Numbers(count), ShardSpec(rank, processes), size, drop_last)
        for batch_size, split in ((size, False), (size * processes, True)):
            theirs = IterableDatasetShard(Numbers(count), batch_size, drop_last, processes, rank, split)
            assert list(ours) == list(theirs)
        assert len(ours) == len(IterableDatasetShard(Numbers(count), size, drop_last, processes, rank))
        assert len(ours) == len(list(ours))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sharded_batches_of_unequal_size_match_accelerate(rank):
    from accelerate.data_loader import BatchSamplerShard

    for count in range(9):
        sizes = [[index] * (index % 3 + 1) for index in range(count)]
        assert list(EvenBatchSampler(sizes, ShardSpec(rank, 3))) == list(BatchSamplerShard(sizes, 3, rank))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8])
def test_ranks_get_batches_in_turn_and_fillers_at_the_end(count, processes):
    """A rank without a batch in the last round gets the first one."""
    whole = [[2 * i, 2 * i + 1] for i in range(count)]
    rounds = -(-count // processes)
    for rank in range(processes):
        sampler = ShardedBatchSampler(whole, ShardSpec(rank, processes))
        mine = list(sampler)
        assert len(mine) == len(sampler) == rounds
        own = whole[rank::processes]
        assert mine[: len(own)] == own
        assert mine[len(own) :] == whole[:1] * (rounds - len(own))
        assert sampler.ends_with_filler is (len(own) < rounds)
        assert sampler.owns_last is (count > 0 and (count - 1) % processes == rank)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_ranks_get_stream_batches_in_turn_and_fillers(count):
    shares = [list(samplers.batches_of_rank(range(count), ShardSpec(rank, 3))) for rank in range(3)]
    rounds = list(zip(*shares, strict=True))  # as many batches in each process
    assert [batch for together in rounds for batch, filler in together if not filler] == list(range(count))
    assert {batch for together in rounds for batch, filler in together if filler} <= {0}


@pytest.mark.parametrize("sampler_kwargs", [{}, {"dataset": [{"x": 1}]}, {"dataset": [3]}])
def test_grouping_by_length_needs_lengths(sampler_kwargs):
    with pytest.raises(InvalidArgument, match="length"):
        LengthGroupedSampler(batch_size=2, **sampler_kwargs)
