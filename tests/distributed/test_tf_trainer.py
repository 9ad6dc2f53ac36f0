"""TFTrainer in two processes: the losses, weights and predictions of one process with the whole batch."""

import json

import numpy as np
import pytest
import torch

from tests.distributed.cases_tf import train


def test_two_processes_train_as_one(processes, tmp_path):
    (alone,) = processes.run_ranks(train, 1, tmp_path / "one", 8)
    both, _ = processes.run_ranks(train, 2, tmp_path / "two", 4)
    assert (alone["sizes"], both["sizes"]) == ([1, 8, 8, 16], [2, 8, 8, 16])
    assert alone["labels"] == both["labels"]
    assert len(alone["log"]) == len(both["log"]) == 8
    for ours, expected in zip(both["log"], alone["log"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)  # sums in another order
    for name, value in both["weights"].items():
        torch.testing.assert_close(value, alone["weights"][name], rtol=1e-4, atol=1e-5)
    assert both["predictions"].shape == (11, 3)
    np.testing.assert_allclose(both["predictions"], alone["predictions"], atol=1e-5)
    checkpoints = [tmp_path / name / "checkpoint-4" for name in ("two", "one")]
    sums = [json.loads((path / "epoch_loss.json").read_text())["total"] for path in checkpoints]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
