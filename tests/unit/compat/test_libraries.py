"""Streams of the datasets library are sharded by whole shards, and put together again after a split."""

import datasets
from datasets.distributed import split_dataset_by_node

from hftrainer.compat import libraries


def make_stream(shards=4):
    return datasets.Dataset.from_dict({"x": range(8)}).to_iterable_dataset(num_shards=shards)


def test_rank_reads_whole_shards():
    parts = [libraries.shard_stream(make_stream(), rank, 2) for rank in range(2)]
    assert sorted(row["x"] for part in parts for row in part) == list(range(8))
    assert libraries.shard_stream(make_stream(1), 0, 2) is None


def test_split_stream_is_put_together_again():
    stream = make_stream()
    split = split_dataset_by_node(stream, rank=0, world_size=2)
    assert len(list(split)) == 4
    assert list(libraries.unsplit_stream(split)) == list(stream)
    assert libraries.unsplit_stream(stream) is stream
