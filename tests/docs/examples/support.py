"""Runs an example for a few steps, and compares what two runs have left."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import warm
from tests.support.differences import MEASURED

EXAMPLES = Path(__file__).parents[3] / "examples"
SHORT = [
    *("--max_steps", "6", "--logging_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3"),
    *("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2"),
]
#: What only we write into a checkpoint.
OWN = "hftrainer_manifest.json"
#: Times that libraries measure and log.
ALL_MEASURED = (*MEASURED, "step_time")


def start(line: list[str], folder: Path, **variables: str) -> subprocess.Popen:
    """Start a command in `folder`; what it prints is in `printed.txt` there."""
    folder.mkdir(parents=True)
    env = {**warm.environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    with (folder / "printed.txt").open("w") as printed:
        return subprocess.Popen(line, cwd=folder, env=env, stdout=printed, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, folder: Path) -> str:
    """What a command has printed; fails with it if the command has."""
    status = process.wait(timeout=300)
    printed = (folder / "printed.txt").read_text()
    assert status == 0, f"{folder.name}:\n{printed[-8000:]}"
    return printed


def logs(state: Path) -> list[dict]:
    """The log lines, with 0 for each measured time: their names stay."""
    lines = json.loads(state.read_text())["log_history"]
    return [{key: 0.0 if key.endswith(ALL_MEASURED) else value for key, value in each.items()} for each in lines]


def found(folder: Path, pattern: str) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob(pattern))


def assert_same(ours: Path, theirs: Path, tolerance: float = 0.0) -> None:
    """The same folders, with the same log lines and the same weights in them; ours are hftrainer's.

    `tolerance` is relative for what is logged, and absolute for weights; without it all is exactly equal.
    """
    assert found(ours, OWN) and not found(theirs, OWN), "who has trained"
    states, weights = found(theirs, "trainer_state.json"), found(theirs, "*.safetensors")
    assert found(ours, "trainer_state.json") == states
    assert found(ours, "*.safetensors") == weights
    assert len(states) >= 3 and len(weights) >= 3, "two checkpoints and what the script saves at the end"
    for state in states:
        lines = logs(theirs / state)
        expected = [pytest.approx(line, rel=tolerance, abs=0) for line in lines] if tolerance else lines
        assert logs(ours / state) == expected
        assert any("eval_loss" in line for line in lines)
    for file in weights:
        our_weights, their_weights = load_file(ours / file), load_file(theirs / file)
        assert our_weights.keys() == their_weights.keys()
        for key, value in their_weights.items():
            torch.testing.assert_close(our_weights[key], value, rtol=0, atol=tolerance, msg=str(file))
