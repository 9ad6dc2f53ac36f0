"""Trials that two processes train together: the main process asks, and the other follows it to the end of each."""

import pytest

from tests.distributed.cases_search import find_all


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    return processes.run_ranks(find_all, 2, tmp_path_factory.mktemp("search"))


def test_both_ranks_train_the_same_trials(results):
    main, other = results
    assert main["best"] == other["best"] and main["params"] == other["params"]
    assert main["weights"] == other["weights"] and len(main["weights"]) == 7
    complete = {f"run-{number}" for number, state in enumerate(main["states"]) if state == "COMPLETE"}
    assert complete <= set(main["folders"])


def test_values_suggested_in_model_init_are_the_same(results):
    params = results[0]["all params"]
    assert all(sorted(each) == ["dropout", "learning_rate", "seed"] for each in params)
    assert len({each["dropout"] for each in params}) == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_the_exact_values_of_the_study(results, rank):
    """To the last bit, and above 2**31. `optuna_integration.TorchDistributedTrial` sends 32 bits."""
    params = [{name: each[name] for name in ("learning_rate", "seed")} for each in results[0]["all params"]]
    assert results[rank]["chosen"] == params


def test_pruned_trials_end_in_both_ranks(results):
    """If one rank alone ended a trial, the other would wait for it."""
    assert {"COMPLETE", "PRUNED"} == set(results[0]["states"])


def test_trial_after_a_failed_one_is_the_best_in_both_ranks(results):
    assert results[0]["after a nan"] == results[1]["after a nan"]
    assert results[0]["after a nan"].run_id == "1"


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_of_the_search_reach_both_ranks(results, rank):
    misspelled, failed, caught, wrong_range, exists = results[rank]["refused"]
    assert "did you mean 'learning_rate'" in misspelled
    assert "No trial was completed (1 fail)" in failed
    assert "catch is not supported with several processes" in caught
    assert "low <= high" in wrong_range  # of a suggestion, which the main process alone asks for
    assert "study_name='a' is already in the storage" in exists
