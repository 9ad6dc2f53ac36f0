"""TFTrainer in two processes: the losses, weights and predictions of one process with the whole batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launching import TORCHRUN, python

SCRIPT = str(Path(__file__).with_name("tf_sets.py"))


def test_as_one_process(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, line in ((one, [SCRIPT, str(one), "8"]), (two, [*TORCHRUN, SCRIPT, str(two), "4"])):
        folder.mkdir()
        run = python(*line)
        assert run.returncode == 0, run.stderr[-3000:]
    alone, both = (json.loads((folder / "found.json").read_text()) for folder in (one, two))
    assert (alone["sizes"], both["sizes"]) == ([1, 8, 8, 16], [2, 8, 8, 16])
    assert alone["labels"] == both["labels"]
    assert len(alone["log"]) == len(both["log"]) == 8
    for ours, expected in zip(both["log"], alone["log"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)  # sums in another order
    weights, expected = (torch.load(folder / "weights.pt") for folder in (two, one))
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    predictions = np.load(two / "predictions.npy")
    assert predictions.shape == (11, 3)
    np.testing.assert_allclose(predictions, np.load(one / "predictions.npy"), atol=1e-5)
    sums = [json.loads((folder / "checkpoint-4" / "epoch_loss.json").read_text())["total"] for folder in (two, one)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
