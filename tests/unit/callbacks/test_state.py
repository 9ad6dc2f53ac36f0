"""`TrainerState` is saved as the JSON of transformers, though each log line is converted only once, and read again."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from hftrainer.callbacks.state import as_json
from hftrainer.trainer_callback import TrainerState
from tests.support.parity import EVERY_STEP, build


def save_text(state, folder):
    state.save_to_json(folder / "trainer_state.json")
    return (folder / "trainer_state.json").read_text(encoding="utf-8")


def as_transformers_writes(state):
    return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"


def test_saved_text_is_that_of_transformers(tmp_path):
    state = TrainerState(global_step=3)
    assert save_text(state, tmp_path) == as_transformers_writes(state)
    state.best_model_checkpoint = 'a\n  "log_history": []'
    state.stateful_callbacks = {"log_history": [], "inner": {"log_history": []}}
    state.log_history = [{"step": step, "loss": float("nan"), "é": 'two\n    "lines"'} for step in range(3)]
    assert save_text(state, tmp_path) == as_transformers_writes(state)


def test_changed_log_lines_are_written_again(tmp_path):
    state = TrainerState(log_history=[{"step": step, "of": [{"value": 1}]} for step in range(5)])
    save_text(state, tmp_path)
    changes = (
        lambda log: log.append({"step": 5}),
        lambda log: log[1].update(extra=2),
        lambda log: log[2]["of"][0].update(value=3),  # the same object, changed inside
        lambda log: log.insert(0, {"step": -1}),
        lambda log: log.__delitem__(slice(2, None)),
        lambda log: log.clear(),
    )
    for change in changes:
        change(state.log_history)
        assert save_text(state, tmp_path) == as_transformers_writes(state)
        assert TrainerState.load_from_json(tmp_path / "trainer_state.json").log_history == state.log_history


def test_each_log_line_is_serialized_once(tmp_path, monkeypatch):
    state = TrainerState(log_history=[{"step": step} for step in range(100)])
    save_text(state, tmp_path)
    state.log_history.append({"step": 100})
    made, dumps = [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda value, **how: made.append(value) or dumps(value, **how))
    save_text(state, tmp_path)
    assert [value for value in made if "step" in value] == [{"step": 100}]


# ---- Metrics that are not numbers ------------------------------------------------------------------------------------

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
        "metrics['a'] is of type type, which JSON does not have: its repr is written."
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
