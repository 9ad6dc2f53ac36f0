"""Metrics that are not numbers are written to a checkpoint and read again."""

import json

import numpy as np
import pytest
import torch

from hftrainer.callbacks.state import as_json
from tests.support.parity import EVERY_STEP, build

VALUES = {
    "array": (np.arange(3.0), [0.0, 1.0, 2.0]),
    "NumPy's number": (np.float32(1.5), 1.5),
    "tensor": (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    "sparse": (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]),
    "folds": ({0: {"f1": np.array([0.5])}, (1, 2): 1}, {"0": {"f1": [0.5]}, "(1, 2)": 1}),
    "set": ({2, 1}, [1, 2]),
    "tuple": ((1, None, True), [1, None, True]),
    "text": ("x", "x"),
}


@pytest.mark.parametrize("name", VALUES)
def test_metric_becomes_json(name):
    value, expected = VALUES[name]
    assert json.loads(json.dumps(as_json(value, "m"))) == expected


def test_value_that_json_lacks_is_named_once(caplog):
    for _ in range(2):
        assert as_json({"a": [object]}, "metrics") == {"a": ["<class 'object'>"]}
    assert [record.getMessage() for record in caplog.records] == [
        "metrics['a'] is a type, which JSON does not have: its repr is written."
    ]


@pytest.mark.parametrize("value", [np.arange(3.0), torch.ones(2), {1, 2}, {"a": np.float64(1)}, object], ids=str)
def test_metric_that_is_no_number_survives_save_and_resume(tmp_path, value):
    """Reported in huggingface/transformers#39616: the first save ended the run, and left no checkpoint."""

    def run(resume=None):
        trainer_kwargs = {"compute_metrics": lambda prediction: {"m": value}}
        trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, **EVERY_STEP, max_steps=4)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_metrics("eval", trainer.evaluate())
        return trainer

    run()
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert [line["eval_m"] for line in state["log_history"] if "eval_m" in line] == [as_json(value, "m")] * 2
    assert run(str(tmp_path / "checkpoint-2")).state.global_step == 4
