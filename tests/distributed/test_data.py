"""Data reaches two processes as accelerate brings it to them, in every way that `accelerator_config` knows."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from hftrainer.data.dispatch import parts, rounds
from hftrainer.data.sharding import EvenBatchSampler, ShardedStream, ShardSpec
from hftrainer.errors import UnsupportedArgument
from tests.distributed.data_sets import CASES, RESUMED
from tests.support.jobs import assert_same
from tests.support.launching import Runs

RANKS = ("0", "1")


SCRIPT = Path(__file__).with_name("data_sets.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `data_sets.py` writes, by library and rank."""
    return Runs(SCRIPT, tmp_path_factory.mktemp("sets"))


def assert_same_batches(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def assert_same_run(ours, theirs):
    ours, theirs = dict(ours), dict(theirs)
    assert_same_batches(ours.pop("seen"), theirs.pop("seen"))
    assert_same_batches(ours.pop("gathered"), theirs.pop("gathered"))
    assert torch.equal(ours.pop("random"), theirs.pop("random"))
    assert_same(ours.pop("weights"), theirs.pop("weights"))
    assert ours == theirs


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_same_as_transformers(found, case, rank):
    """The batches of each process, log lines, events, files, weights, and the random numbers drawn."""
    assert_same_run(found[f"hftrainer-{rank}"][case], found[f"transformers-{rank}"][case])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", RESUMED)
def test_resumed_run_reads_on(found, case, rank):
    undisturbed, resumed = found[f"hftrainer-{rank}"][case], found[f"hftrainer-{rank}"][f"{case}, resumed"]
    assert 0 < len(resumed["seen"]) < len(undisturbed["seen"])
    assert_same_batches(resumed["seen"], undisturbed["seen"][-len(resumed["seen"]) :])
    assert_same(resumed["weights"], undisturbed["weights"])
    assert resumed["logs"][:-1] == undisturbed["logs"][:-1]
    assert torch.equal(resumed["random"], undisturbed["random"])


def test_shards_of_different_length(found):
    """The epoch ends for all with the shortest, of 3 batches, and whoever leaves samples out says so."""
    for rank in RANKS:
        assert [line["epoch"] for line in found[f"hftrainer-{rank}"]["different lengths"]["logs"]][2:4] == [0.6, 1.2]
    assert "The epoch ends with the shortest shard of the stream" in found.messages


def test_a_stream_that_goes_on_from_its_state_says_what_it_cannot_know(found):
    assert "if the last round of this epoch is not full" in found.messages


@pytest.mark.parametrize("rank", RANKS)
def test_refusals(found, rank):
    """All processes raise, also what only the main one can see."""
    for sentence, start in zip(
        found[f"hftrainer-{rank}"]["refused"],
        (
            "accelerator_config['even_batches']=False: the 2 processes would get different numbers",
            "accelerator_config['even_batches']=False: the 2 processes would get different numbers",
            "accelerator_config['split_batches']=True splits each batch among 2 processes, but a batch has 3",
            "accelerator_config['split_batches']=True splits each batch among 2 processes, but a batch has 1",
            "the stream is broken",
            "The main process cannot concatenate batches of different shapes",
            "The main process can scatter tensors, not a str",
        ),
        strict=True,
    ):
        assert sentence.startswith(start)


# ---- Against the classes of accelerate, over many sizes --------------------------------------------------------------


def batches(count, size, drop_last):
    return BatchSampler(SequentialSampler(range(count)), size, drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_batches_are_those_of_accelerate(processes, split, even, drop_last):
    """Where each process gets as many; elsewhere it is refused."""
    from accelerate.data_loader import BatchSamplerShard

    honoured = refused = 0
    for count, size in itertools.product(range(30), range(1, 6)):
        size *= processes if split else 1
        settings = {"split_batches": split, "even_batches": even}
        theirs = [
            list(BatchSamplerShard(batches(count, size, drop_last), processes, rank, **settings))
            for rank in range(processes)
        ]
        if len(set(map(len, theirs))) > 1:
            refused += 1
            with pytest.raises(UnsupportedArgument, match="even_batches"):
                EvenBatchSampler(batches(count, size, drop_last), ShardSpec(0, processes), split=split, even=even)
            continue
        for rank in range(processes):
            share = ShardSpec(rank, processes)
            ours = EvenBatchSampler(batches(count, size, drop_last), share, split=split, even=even)
            assert list(ours) == theirs[rank]
            assert len(ours) == len(theirs[rank])
            honoured += 1
    assert honoured
    assert bool(refused) == (not even and not drop_last)


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_streams_are_those_of_accelerate(processes, drop_last):
    from accelerate.data_loader import IterableDatasetShard

    for count, size, rank in itertools.product(range(30), range(1, 5), range(processes)):
        ours = ShardedStream(Numbers(count), ShardSpec(rank, processes), size, drop_last)
        for batch_size, split in ((size, False), (size * processes, True)):
            theirs = IterableDatasetShard(Numbers(count), batch_size, drop_last, processes, rank, split)
            assert list(ours) == list(theirs)
        assert len(ours) == len(IterableDatasetShard(Numbers(count), size, drop_last, processes, rank))
        assert len(ours) == len(list(ours))


def handed_out_by_accelerate(count, size, processes, **settings):
    """The parts of each round, as its slices of the main process's batch are cut."""
    from accelerate.data_loader import DataLoaderDispatcher

    found = []

    def cut(batch, part, process_index, num_processes):
        found.append([batch[rank * part.stop : (rank + 1) * part.stop].tolist() for rank in range(num_processes)])
        return batch[part]

    loader = DataLoaderDispatcher(
        Numbers(count),
        split_batches=settings["split"],
        _drop_last=settings["drop_last"],
        slice_fn=cut,
        batch_size=size,
        drop_last=settings["drop_last"],
    )
    loader.state = SimpleNamespace(process_index=0, num_processes=processes, device=torch.device("cpu"))
    return [found[-1] for _ in loader]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_the_main_process_hands_out_as_that_of_accelerate(processes, split, drop_last):
    for count, factor in itertools.product(range(1, 20), range(1, 4)):
        size = factor * processes if split else factor
        if drop_last and count < (size if split else size * processes):
            continue  # accelerate fails when there is not one round
        loader = torch.utils.data.DataLoader(Numbers(count), batch_size=size, drop_last=drop_last)
        read = rounds(iter(loader), 1 if split else processes, drop_last)
        ours = [[part.tolist() for part in group] for group in parts(read, processes, drop_last)]
        assert ours == handed_out_by_accelerate(count, size, processes, split=split, drop_last=drop_last)


def test_batches_in_containers_are_handed_out():
    batch = {"x": torch.arange(4), "nested": [torch.arange(8).reshape(4, 2), (torch.arange(4) * 2,)]}
    (first, second) = next(parts(iter([[batch]]), 2, False))
    assert first["x"].tolist() == [0, 1]
    assert second["nested"][0].tolist() == [[4, 5], [6, 7]]
    assert second["nested"][1][0].tolist() == [4, 6]
