"""Data reaches two processes as accelerate brings it to them, in every way that `accelerator_config` knows."""

import pytest
import torch

from tests.distributed import cases_data
from tests.distributed.cases_data import CASES, REFUSED, RESUMED
from tests.support.parity import LIBRARIES, assert_same, assert_same_weights

RANKS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def results(processes, folder):
    return {name: processes.run_ranks(cases_data.train_all, 2, name, folder) for name in LIBRARIES}


@pytest.fixture(scope="module")
def resumptions(processes, results, folder):
    """By rank, the resumed runs by case, the run with shards of different length, and what was logged."""
    return processes.run_ranks(cases_data.go_on, 2, folder)


def assert_same_batches(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_batches_and_training_are_those_of_transformers(results, case, rank):
    (ours, *tensors), (theirs, *expected) = (results[name][rank][case] for name in ("hftrainer", "transformers"))
    for pair in zip(tensors, expected, strict=True):
        assert_same_batches(*pair)
    assert_same(ours, theirs)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", RESUMED)
def test_resumed_run_reads_the_remaining_batches(results, resumptions, case, rank):
    undisturbed, expected, all_seen, _ = results["hftrainer"][rank][case]
    resumed, random, seen, _ = resumptions[rank][0][case]
    assert 0 < len(seen) < len(all_seen)
    assert_same_batches(seen, all_seen[-len(seen) :])
    assert_same_weights(resumed.weights, undisturbed.weights)
    assert resumed.logs[:-1] == undisturbed.logs[:-1]
    assert torch.equal(random, expected)


def test_epoch_ends_with_the_shortest_shard(resumptions):
    """It has 3 batches; a process that leaves samples out logs it."""
    for _, different, _ in resumptions:
        assert [line["epoch"] for line in different.logs][2:4] == [0.6, 1.2]
    warned = ["The epoch ends with the shortest shard of the stream" in " ".join(of_rank[2]) for of_rank in resumptions]
    assert any(warned)


def test_resumed_stateful_stream_warns_of_an_incomplete_last_round(resumptions):
    assert "if the last round of this epoch is incomplete" in " ".join(resumptions[0][2])


def test_wrong_data_is_refused_in_all_ranks(processes, tmp_path):
    """Also what only the main process can see."""
    for sentences in processes.run_ranks(cases_data.refuse, 2, tmp_path):
        for sentence, (*_, expected) in zip(sentences, REFUSED, strict=True):
            assert sentence.startswith(expected)
