"""Two processes on gloo find the same metrics and predictions as one, to the last bit, for sets of 1 to 13 samples."""

import numpy as np
import pytest

from tests.distributed import cases_evaluation
from tests.distributed.cases_evaluation import CASES, OTHERS, SOME
from tests.support.parity import leaves


@pytest.fixture(scope="module")
def one_process(processes):
    return processes.run_ranks(cases_evaluation.evaluate_all, 1)[0]


@pytest.fixture(scope="module")
def results(processes):
    return processes.run_ranks(cases_evaluation.evaluate_all, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_metrics_and_predictions_are_those_of_one_process(results, one_process, case, rank):
    for size, result in one_process[case].items():
        ours, expected = leaves(results[rank][case][size]), leaves(result)
        assert list(ours) == list(expected)
        for path, value in expected.items():
            left, right = np.asarray(ours[path]), np.asarray(value)
            assert left.dtype == right.dtype, (size, path)
            assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), (size, path)


def test_every_sample_is_evaluated_once(results):
    for size, result in results[0]["plain"].items():
        assert result["predictions"].shape == (size, 3)
        assert len(result["metrics"]["eval_losses"]) == size


def test_generated_rows_of_uneven_lengths_are_padded(results):
    tokens = results[0]["generation of uneven lengths"][13]["predictions"]
    assert tokens.shape[0] == 13
    assert len({int((row != -100).sum()) for row in tokens}) > 1


def test_every_object_is_gathered(results):
    objects = results[0]["predict_objects"]
    assert [len(items) for items in objects.values()] == list(SOME)
    assert objects[4][0].keys() == {"best", "scores"}


def test_lists_that_need_gather_object_are_refused(processes):
    for error in processes.run_ranks(cases_evaluation.predict_boxes, 2):
        assert "set eval_use_gather_object=True" in error
