"""Two processes on gloo train as those of transformers do, and agree on what they do next."""

from typing import NamedTuple

import pytest
import torch

from tests.distributed import cases_training
from tests.distributed.cases_training import CASES, RESUMED
from tests.support.parity import LIBRARIES, assert_same, assert_same_weights

RANKS = (0, 1)


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    return {name: processes.run_ranks(cases_training.train_all, 2, name, folder) for name in LIBRARIES}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", [*CASES, *((*resumed, True) for resumed in RESUMED)], ids=str)
def test_trains_as_transformers(results, case, rank):
    (ours, random), (theirs, expected) = (results[name][rank][case] for name in ("hftrainer", "transformers"))
    assert torch.equal(random, expected)
    assert_same(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_logs_and_weights_are_equal_in_both_ranks(results, case):
    (first, _), (second, _) = (of_rank[case] for of_rank in results["hftrainer"])
    assert first.logs[:-1] == second.logs[:-1]  # the last has the mean loss, which is each one's own
    if "batch norm" not in case:  # whose statistics are each one's own until the next step
        assert_same_weights(first.weights, second.weights)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("case", "step"), RESUMED)
@pytest.mark.parametrize("writer", LIBRARIES)
def test_resumed_run_ends_the_same(results, case, step, writer, rank):
    of_rank = results["hftrainer"][rank]
    (undisturbed, random), (resumed, drawn) = of_rank[case], of_rank[case, step, writer == "hftrainer"]
    assert_same_weights(resumed.weights, undisturbed.weights)
    assert resumed.logs[:-1] == undisturbed.logs[:-1]
    assert torch.equal(drawn, random)


def test_dropout_is_seeded_alike_in_both_ranks(results):
    """As in transformers: all processes are seeded alike."""
    for library in LIBRARIES:
        assert torch.equal(*(results[library][rank]["plain"][1] for rank in RANKS))


def test_early_stopping_ends_the_run(results):
    assert results["hftrainer"][0]["early stopping"][0].extra["global_step"] < 45


class FlagCase(NamedTuple):
    """A flag that one rank sets, and where both end."""

    event: str
    flag: str
    step: int
    last_step: int
    folders: list[str]


FLAG_CASES = {
    "stops": FlagCase("on_step_end", "should_training_stop", 3, 3, []),
    # A step later: the other process had no reason to wait.
    "stops in the middle of an epoch": FlagCase("on_step_end", "should_training_stop", 1, 2, []),
    "stops within a step": FlagCase("on_substep_end", "should_training_stop", 1, 2, []),
    "stops when it has logged": FlagCase("on_log", "should_training_stop", 4, 4, []),
    "ends the epoch": FlagCase("on_step_end", "should_epoch_stop", 2, 5, []),
    "saves a step later": FlagCase("on_step_end", "should_save", 5, 6, ["checkpoint-6"]),
    "saves when it has logged": FlagCase("on_log", "should_save", 2, 6, ["checkpoint-2"]),
    "evaluates": FlagCase("on_step_end", "should_evaluate", 3, 6, []),
}


@pytest.fixture(scope="module")
def flag_results(processes, tmp_path_factory):
    flags = {name: (case.event, case.flag, case.step) for name, case in FLAG_CASES.items()}
    return processes.run_ranks(cases_training.agree, 2, tmp_path_factory.mktemp("agreed"), flags)


@pytest.mark.parametrize("case", FLAG_CASES)
def test_control_flag_set_in_one_rank_is_followed_by_both(flag_results, case):
    (*first, logs), (*second, others) = (of_rank[case] for of_rank in flag_results)
    assert first == second == [FLAG_CASES[case].last_step, FLAG_CASES[case].folders]
    assert [sorted(line) for line in logs] == [sorted(line) for line in others]
    assert any("eval_loss" in line for line in logs) == (case == "evaluates")


def test_full_disk_of_one_rank_is_known_to_both(processes, tmp_path):
    for best, folders, error in processes.run_ranks(cases_training.fill_the_disk, 2, tmp_path / "full"):
        assert best is None and folders == []
        assert "No valid checkpoint found" in error


def test_unsupported_settings_are_refused_in_both_ranks(processes):
    one, other = processes.run_ranks(cases_training.refuse, 2)
    assert one == other
    for sentence, expected in zip(
        one,
        (
            "resume_from_checkpoint='some.ckpt' holds the random states of one process",
            "auto_find_batch_size=True would restart only",
            "LearningRateFinder is not supported yet in several processes",
        ),
        strict=True,
    ):
        assert expected in sentence


def test_what_ranks_have_in_common_is_printed_once(processes, tmp_path):
    texts = processes.run_ranks(cases_training.print_error, 2, tmp_path)
    assert sorted(text.count("Traceback") for text in texts) == [0, 1], texts
    assert sorted(text.count("UserWarning: a warning of each rank") for text in texts) == [0, 1], texts
    assert "RuntimeError: everywhere (The traceback is the same as that of rank" in "".join(texts)
    lost, first = processes.run_ranks(cases_training.print_error, 2, tmp_path, cases_training.FailsInOne)
    assert "lost the other ranks (rank 1 failed first: RuntimeError: only here)" in lost and "Traceback" not in lost
    assert "Traceback" in first and "RuntimeError: only here" in first


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_failing_rank_ends_both(processes, tmp_path, method):
    with pytest.raises(processes.RanksFailed, match="only here"):
        processes.run_ranks(cases_training.fail_in_one, 2, tmp_path, method)
    assert not list(tmp_path.iterdir())
