"""Ranks agree that a step diverges, also if the bad sample is on one of them, and after `kill -9`."""

import pytest

from tests.distributed.cases_divergence import STRATEGIES, train
from tests.support.divergence import SIZE, STEPS, entries, rows, rows_without
from tests.support.parity import assert_same_weights
from tests.support.processes import RanksFailed

#: Samples of a step of two processes, and the steps with a bad sample.
STEP, BAD = 2 * SIZE, [4, 21]
SETTINGS = {"max_steps": STEPS - 2, "on_divergence": "rollback"}
#: The samples of a step are dealt by micro-batch: the second half is that of rank 1.
DATA = rows(STEPS * STEP, [BAD[0] * STEP, BAD[1] * STEP + SIZE])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dies", [False, True])
def test_bad_samples_of_one_rank_are_skipped_by_all(processes, tmp_path, strategy, dies):
    good = processes.run_ranks(train, 2, tmp_path / "good", rows_without(BAD, STEP), SETTINGS, strategy)
    if dies:
        with pytest.raises(RanksFailed):
            processes.run_ranks(train, 2, tmp_path / "bad", DATA, SETTINGS, strategy, True)
        assert len(entries(tmp_path / "bad")) == 1
    rolled = processes.run_ranks(train, 2, tmp_path / "bad", DATA, SETTINGS, strategy, False, dies or None)
    for (weights, step), (expected, steps) in zip(rolled, good, strict=True):
        assert step == steps == STEPS - 2
        assert_same_weights(weights, expected)
    first, second = entries(tmp_path / "bad")
    if strategy == "replicas":  # the averaged gradients are bad everywhere, the loss on one rank
        assert first["samples"] == [[[16, 17]], [[18, 19]]]
        assert [first["ranks"], second["ranks"]] == [[0], [1]]
    assert [first["step"], second["step"]] == [5, 21]


def test_rollback_of_shards_without_a_checkpoint_fails(processes, tmp_path):
    with pytest.raises(RanksFailed, match="save earlier"):
        processes.run_ranks(train, 2, tmp_path, DATA, {**SETTINGS, "save_steps": 50}, "fsdp")
