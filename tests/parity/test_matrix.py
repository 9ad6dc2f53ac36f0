"""The matrix: models x accumulation x length x precision x evaluation, each exactly as transformers does it.

38 samples in batches of 4 make 10 micro-batches, the last of 2 samples; in windows of 3 the last has one micro-batch.
"""

import pytest

from tests.support.parity import accuracy, compare


@pytest.mark.parametrize("model", ["plain", "bert", "llama"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("length", ["epochs", "max_steps"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("evaluation", ["no-eval", "eval"])
def test_run_is_that_of_transformers(tmp_path, model, accumulation, length, precision, evaluation):
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
