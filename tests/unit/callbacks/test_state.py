"""`TrainerState` is saved as the JSON of transformers, though each log line is converted only once."""

import dataclasses
import json

from hftrainer.trainer_callback import TrainerState


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
