"""The matrix of runs that both libraries do alike, for the parity tests and for the lanes of older releases.

38 samples in batches of 4 make 10 micro-batches, the last of 2 samples; in windows of 3 the last has one micro-batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import accuracy

AXES = {
    "model": ["plain", "bert", "llama"],
    "accumulation": [1, 3],
    "length": ["epochs", "max_steps"],
    "precision": ["fp32", "bf16"],
    "evaluation": ["no-eval", "eval"],
}


def over_the_matrix(test: Callable) -> Callable:
    """Parametrize a test with every run."""
    for axis, values in AXES.items():
        test = pytest.mark.parametrize(axis, values)(test)
    return test


def check_run(
    compare: Callable[..., Any],
    tmp_path: Path,
    *,
    model: str,
    accumulation: int,
    length: str,
    precision: str,
    evaluation: str,
) -> None:
    """Compare one run, by the function that runs both libraries and asserts that they did the same."""
    settings = {"gradient_accumulation_steps": accumulation, "bf16": precision == "bf16"}
    if length == "max_steps":
        settings |= {"max_steps": 5}
    if evaluation == "eval":
        settings |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
        if model != "llama":
            settings["trainer"] = {"compute_metrics": accuracy}
    ours = compare(tmp_path, model, **settings)
    assert len(ours.logs) > 2
    assert any(line[0] == "on_evaluate" for line in ours.events) == (evaluation == "eval")
