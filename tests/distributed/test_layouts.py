"""Processes laid out by `parallelism_config`, or by how the model was loaded, train and evaluate as one does."""

import pytest

from tests.distributed.cases_layouts import EVALUATED, LAYOUTS, train_all
from tests.support.parity import assert_same_weights

#: Sums of float32 in another order, through six steps of AdamW at a rate of 1e-2.
TOLERANCE = {"rel": 1e-4, "abs": 2e-5}
SHARED = [(count, name) for count in (2, 4) for name in LAYOUTS[count]]


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return {count: processes.run_ranks(train_all, count, folder, layouts) for count, layouts in LAYOUTS.items()}


def numbers(run):
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen", "epoch")
    return [{name: line[name] for name in names if name in line} for line in run["logs"]]


def assert_same_lines(ours, expected):
    for line, other in zip(numbers(ours), numbers(expected), strict=True):
        assert line == pytest.approx(other, **TOLERANCE)


def assert_close(ours, expected):
    assert_same_lines(ours, expected)
    assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-3)
    for name, weight in expected["weights"].items():
        assert ours["weights"][name].numpy() == pytest.approx(weight.numpy(), abs=2e-4)


@pytest.mark.parametrize(("count", "name"), SHARED)
def test_layout_trains_as_one_process(results, count, name):
    alone = results[1][0]["one"]
    assert_close(results[count][0][name], alone)
    for of_rank in results[count]:
        run = of_rank[name]
        assert_same_lines(run, alone)
        assert run["metrics"]["eval_rows"] == run["streamed"] == EVALUATED  # no row twice
        assert run["flos"] == alone["flos"]


@pytest.mark.parametrize(("count", "name"), SHARED)
def test_resumed_run_ends_the_same(results, count, name):
    whole, resumed = results[count][0][name], results[count][0][f"{name}, resumed"]
    assert numbers(resumed) == numbers(whole)
    assert_same_weights(resumed["weights"], whole["weights"])


def test_tensor_parallel_run_resumes_from_one_process(results):
    assert_close(results[2][0]["tp, from one"], results[1][0]["one"])
