"""The names of accelerate in two processes, and arguments on which processes disagree."""

import pytest
import torch

from hftrainer.assembly.object_checks import PER_RANK
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments
from tests.distributed.cases_accelerator import find_all


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    return processes.run_ranks(find_all, 2, tmp_path_factory.mktemp("accelerator"))


#: Name → what it gives in both ranks.
BOTH = {
    "scale": "reduce(scale=2.0) is for TPUs only: multiply the result instead.",
    "unknown": "reduction='min': it must be 'sum', 'mean', 'max' or 'none'.",
    "gather": [1.0, 5.0, 2.0, 4.0],
    "count": (7, {"all_gather": 1, "all_reduce": 0, "barrier": 0}),  # once a step: it must not wait for the device
    "files": ["model.safetensors", "saved.pt", "saved.safetensors"],
    "unheard of": "accelerator.make_coffee does not exist.",
    **dict.fromkeys(("own", "wrapped", "unwrapped", "compiled", "kept"), True),
    "not trained": "Plain",
    "outside": [False, False, -1],
    "within": [(False, 3), (True, 3)],
    "after": False,
}
#: Name → what it gives in each rank.
EACH = {
    "padded": ([[1, 1, 7], [1, 1, 7]], [[1, 1, 1], [1, 1, 1]]),
    "padded first": ([[0, 1, 1], [0, 1, 1]], [[1, 1, 1], [1, 1, 1]]),
    "split list False": (["a", "b"], ["c"]),
    "split list True": (["a", "b"], ["c", "c"]),
    "split tensor False": ([0, 1], [2]),
    "split tensor True": ([0, 1], [2, 2]),
    "split dict False": ({"x": [1, 2]}, {"x": [3]}),
    "split dict True": ({"x": [1, 2]}, {"x": [3, 3]}),
    "printed": ("said\n", ""),
}


@pytest.mark.parametrize("name", BOTH)
def test_accelerator_names_give_both_ranks_the_same(results, name):
    assert [of_rank[name] for of_rank in results] == [BOTH[name]] * 2


@pytest.mark.parametrize("name", EACH)
def test_accelerator_names_give_each_rank_its_part(results, name):
    assert tuple(of_rank[name] for of_rank in results) == EACH[name]


def test_reduce_over_both_ranks(results):
    for of_rank, own in zip(results, ([1, 5], [2, 4]), strict=True):
        assert of_rank["reduce"] == {"sum": [3, 9], "mean": [1.5, 4.5], "max": [2, 5], "none": own}


def test_missing_names_say_what_to_use_instead(results):
    assert "train(resume_from_checkpoint=...)" in results[0]["elsewhere"]
    assert "check is_main_process" in results[0]["decorator"]


def test_no_sync_keeps_gradients_apart_until_the_next_backward(results):
    first, second = (of_rank["no_sync"] for of_rank in results)
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["exchanged"], second["exchanged"])
    torch.testing.assert_close(first["exchanged"], first["own"] + second["own"])  # twice their mean


def test_arguments_that_differ_between_ranks_are_refused(results):
    for of_rank in results:
        assert "learning_rate is 0.001 in rank 0; 0.002 in rank 1." in of_rank["disagree"]
        assert "seed is 7 in rank 0; 8 in rank 1." in of_rank["disagree"]


def test_arguments_that_may_differ_exist():
    assert Seq2SeqTrainingArguments.__dataclass_fields__.keys() >= PER_RANK
