"""An observed run in two processes: values over both, and requests that both follow at the same step."""

import pytest

from hftrainer.monitoring.journal import read_events
from tests.distributed.cases_monitoring import LENGTHS, STEP_SECONDS, train
from tests.support.parity import assert_same_weights


def test_observed_tokens_are_those_of_both_ranks(tmp_path, processes):
    for _, _, lines, _ in processes.run_ranks(train, 2, tmp_path, {}):
        assert [line["step_seconds"] for line in lines] == pytest.approx([STEP_SECONDS] * 5)
        assert [line["tokens_per_second"] for line in lines] == pytest.approx([2 * sum(LENGTHS) / STEP_SECONDS] * 5)
    assert [event["step"] for event in read_events(str(tmp_path)) if event["event"] == "log"] == [4, 8, 12, 16, 20, 20]


def test_requests_are_done_by_both_ranks_at_the_same_step(tmp_path, processes):
    """One step later, when both ranks know of the request."""
    requested = {2: "save", 5: "evaluate", 9: "stop"}
    (done, steps, *_), (of_other, steps_of_other, *_) = processes.run_ranks(train, 2, tmp_path, requested)
    assert done == of_other == [("save", 3), ("evaluate", 6), ("save", 10)]
    assert steps == steps_of_other == 10
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-3"]


def test_requested_save_resumes_exactly(tmp_path, processes):
    whole = processes.run_ranks(train, 2, tmp_path, {2: "save"})
    resumed = processes.run_ranks(train, 2, tmp_path, {}, str(tmp_path / "checkpoint-3"))
    for (done, _, lines, weights), (_, _, others, of_resumed) in zip(whole, resumed, strict=True):
        assert done[0] == ("save", 3)
        assert [line["loss"] for line in lines] == [line["loss"] for line in others]
        assert_same_weights(of_resumed, weights)
