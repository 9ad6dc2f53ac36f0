"""Runs an example of the gallery for a few steps, and compares what two runs have left."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.known_differences import MEASURED

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [
    *("--max_steps", "6", "--logging_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3"),
    *("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2"),
]


def comparable_logs(state):
    """The log lines, with 0 for each measured time: their names stay."""
    lines, measured = json.loads(state.read_text())["log_history"], (*MEASURED, "step_time")
    return [{key: 0.0 if key.endswith(measured) else value for key, value in line.items()} for line in lines]


def files(folder, pattern):
    return sorted(path.relative_to(folder) for path in folder.rglob(pattern))


def assert_same(ours, theirs, tolerance=0.0):
    """The same folders, with the same log lines and the same weights in them; ours are hftrainer's.

    `tolerance` is relative for what is logged, and absolute for weights; without it all is exactly equal.
    """
    assert files(ours, "hftrainer_manifest.json") and not files(theirs, "hftrainer_manifest.json"), "who has trained"
    states, weights = files(theirs, "trainer_state.json"), files(theirs, "*.safetensors")
    assert (files(ours, "trainer_state.json"), files(ours, "*.safetensors")) == (states, weights)
    assert len(states) >= 3 and len(weights) >= 3, "two checkpoints and what the script saves at the end"
    for state in states:
        lines = comparable_logs(theirs / state)
        expected = [pytest.approx(line, rel=tolerance, abs=0) for line in lines] if tolerance else lines
        assert comparable_logs(ours / state) == expected
        assert any("eval_loss" in line for line in lines)
    for file in weights:
        our_weights, their_weights = load_file(ours / file), load_file(theirs / file)
        assert our_weights.keys() == their_weights.keys()
        for key, value in their_weights.items():
            torch.testing.assert_close(our_weights[key], value, rtol=0, atol=tolerance, msg=str(file))
