"""Two processes on gloo find the same metrics and predictions as one, to the last bit, for sets of 1 to 17 samples."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching import FAILS_IN_ONE, TORCHRUN, python, torchrun
from tests.support.parity import leaves


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    script = [str(Path(__file__).with_name("evaluate_sets.py")), str(folder)]
    for launcher in ([], TORCHRUN):
        run = python(*launcher, *script)
        assert run.returncode == 0, run.stderr[-3000:]
    return {name: pickle.loads((folder / f"{name}.pkl").read_bytes()) for name in ("alone", "0", "1")}


CASES = (
    "plain",
    "stream",
    "varied lengths",
    "loss only",
    "nested",
    "torchmetrics",
    "torchmetrics, drawn",
    "drawn without a cache",
    "one number a batch",
    "batch by batch",
    "objects",
    "workers",
    "stream by a worker",
    "stream by two workers",
    "gather in the step",
    "generation",
    "generation of uneven lengths",
    "gather_for_metrics",
)


def test_no_case_is_missing(found):
    assert tuple(found["alone"]) == CASES


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("case", CASES)
def test_same_as_one_process(found, case, rank):
    for size, alone in found["alone"][case].items():
        ours, expected = leaves(found[rank][case][size]), leaves(alone)
        assert list(ours) == list(expected)
        for path, value in expected.items():
            left, right = np.asarray(ours[path]), np.asarray(value)
            assert left.dtype == right.dtype, (size, path)
            assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), (size, path)


def test_every_sample_once(found):
    for size, result in found["0"]["plain"].items():
        assert result["predictions"].shape == (size, 3)
        assert len(result["metrics"]["eval_losses"]) == size


def test_generated_lengths_differ(found):
    """Batches of prompts of different lengths, longer than the model's max_length: nothing pads them alike."""
    tokens = found["0"]["generation of uneven lengths"][17]["predictions"]
    assert tokens.shape[0] == 17
    assert len({int((row != -100).sum()) for row in tokens}) > 1


def test_gather_object(found):
    assert [len(result["flat"]) for result in found["0"]["objects"].values()] == list(range(1, 18))
    assert found["0"]["objects"][3]["flat"][0].keys() == {"best", "scores"}


FAILS = (
    """
import os, torch
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import Plain, plain_data

"""
    + FAILS_IN_ONE
    + """
Trainer(Fails(), args, eval_dataset=plain_data()).evaluate()
"""
)


def test_a_failing_process_ends_all(tmp_path):
    run = torchrun(tmp_path, FAILS)
    assert run.returncode != 0
    assert "only here" in run.stderr


BOXES = """
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import Plain, plain_data

class Boxes(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, logits, [{"box": row} for row in labels]

args = TrainingArguments("out", use_cpu=True, disable_tqdm=True, eval_do_concat_batches=False)
Boxes(Plain(), args).predict(plain_data(10))
"""


def test_lists_of_samples_are_not_mixed_up(tmp_path):
    run = torchrun(tmp_path, BOXES)
    assert run.returncode != 0
    assert "set eval_use_gather_object=True" in run.stderr
