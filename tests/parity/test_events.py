"""Every event of a run with all that it brings: the state, the switches, and what each keyword holds."""

import dataclasses
import importlib
import shutil
from typing import Any

import pytest

from tests.support.parity import EVENTS, accuracy, alike, build, comparable, record
from tests.support.tiny import plain_data

LIBRARIES = ("hftrainer", "transformers")
ALL_EVENTS = (*EVENTS, "on_push_begin")
SWITCHES = ["should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save"]


def described(name: str, value: Any) -> Any:
    """What two libraries can agree on of a keyword: accelerate's wrappers are what they wrap."""
    if name in ("logs", "metrics"):
        return list(value), comparable([value])
    if name in ("optimizer", "lr_scheduler"):
        inner = getattr(value, name.removeprefix("lr_"), value) if value is not None else None
        return type(inner).__name__
    if name.endswith("dataloader"):
        return None if value is None else len(value)
    return type(value).__name__


def noted_state(state: Any, folder: Any) -> dict[str, Any]:
    values = dataclasses.asdict(state)
    values["log_history"] = comparable(values["log_history"])
    values["best_model_checkpoint"] = str(values["best_model_checkpoint"]).removeprefix(str(folder))
    return values


def full_recorder(library: Any, folder: Any) -> Any:
    """A callback of `library` whose `seen` lists (event, keywords, state, switches)."""

    class FullRecorder(library.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple] = []

    def note(event: str):
        def handler(self, args, state, control, **kwargs):
            keywords = {name: described(name, value) for name, value in sorted(kwargs.items())}
            switches = dataclasses.asdict(control)
            self.seen.append((event, keywords, noted_state(state, folder), switches, type(args).__name__))

        return handler

    for event in ALL_EVENTS:
        setattr(FullRecorder, event, note(event))
    return FullRecorder()


BEATS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4}
#: Name of a run → its settings, and the checkpoint that it goes on from.
RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "epochs": ({"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}, None),
    "steps": ({**BEATS, "max_steps": 13, "logging_steps": 2, "logging_first_step": True, "eval_on_start": True}, None),
    "early stop": (
        {**BEATS, "save_steps": 3, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 6},
        None,
    ),
    "accumulation": ({**BEATS, "gradient_accumulation_steps": 3}, None),
    "resume": ({**BEATS, "gradient_accumulation_steps": 2}, "checkpoint-4"),
    "dict eval": ({**BEATS, "trainer": {"eval_dataset": {"a": plain_data()[:9], "b": plain_data()[9:14]}}}, None),
}


def run_recorded(name: str, folder: Any, run: str) -> list[tuple]:
    library = importlib.import_module(name)
    settings, resume = RUNS[run]
    given = {"compute_metrics": accuracy, **settings.get("trainer", {})}
    recorder = full_recorder(library, folder)
    stopper = [library.EarlyStoppingCallback(2, 0.01)] if run == "early stop" else []
    trainer, _ = build(name, "plain", folder, **{**settings, "trainer": {**given, "callbacks": [*stopper, recorder]}})
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    assert (trainer.state.global_step < trainer.state.max_steps) == (run == "early stop")
    trainer.predict(plain_data()[:5])
    return recorder.seen


def assert_same_events(ours: list[tuple], theirs: list[tuple]) -> None:
    assert [seen[0] for seen in ours] == [seen[0] for seen in theirs]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == other, f"event {number}"


@pytest.mark.parametrize("run", RUNS)
def test_every_event_brings_the_same(tmp_path, run):
    settings, resume = RUNS[run]
    if resume:  # both go on from the same folder
        trainer, _ = build("transformers", "plain", tmp_path / "whole", **settings)
        trainer.train()
        for name in LIBRARIES:
            shutil.copytree(tmp_path / "whole" / resume, tmp_path / name / resume)
    ours = alike(lambda name: run_recorded(name, tmp_path / name, run), assert_same_events)
    announced = {seen[0] for seen in ours}
    never = {"on_push_begin", *(() if "gradient_accumulation_steps" in settings else ("on_substep_end",))}
    assert announced == set(ALL_EVENTS) - never


# ---- Switches ----------------------------------------------------------------------------------------------------


def setting_callback(library: Any, event: str, at: int, switch: str, anew: bool) -> Any:
    """Sets a switch at an event and step: on the object that it gets, or on a new one that it returns."""

    def handler(self, args, state, control, **kwargs):
        if state.global_step != at:
            return None
        if not anew:
            setattr(control, switch, True)
            return None
        return library.TrainerControl(**{**dataclasses.asdict(control), switch: True})

    return type("Sets", (library.TrainerCallback,), {event: handler})


def run_both(tmp_path, callback_for):
    def run(name):
        folder = tmp_path / name
        given = {"trainer": {"callbacks": [callback_for(importlib.import_module(name))]}}
        trainer, recorder = build(name, "plain", folder, **BEATS, gradient_accumulation_steps=3, **given)
        trainer.add_callback(recorder)
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)


#: Event → the step at which it is announced and the switch is set. test_callbacks.py::test_control has the others.
ANNOUNCED = {
    "on_init_end": 0,
    "on_train_begin": 0,
    "on_epoch_begin": 4,
    "on_epoch_end": 4,
    "on_substep_end": 2,
    "on_pre_optimizer_step": 2,
    "on_optimizer_step": 2,
    "on_log": 6,
    "on_evaluate": 3,
    "on_prediction_step": 3,
    "on_save": 4,
    "on_train_end": 8,
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("event", ANNOUNCED)
def test_switches(tmp_path, event, switch):
    run_both(tmp_path, lambda library: setting_callback(library, event, ANNOUNCED[event], switch, anew=False))


@pytest.mark.parametrize("event", ANNOUNCED)
def test_switches_on_a_new_object(tmp_path, event):
    run_both(tmp_path, lambda library: setting_callback(library, event, ANNOUNCED[event], "should_evaluate", anew=True))


# ---- States ------------------------------------------------------------------------------------------------------


def counting_callback(library: Any) -> Any:
    exportable = importlib.import_module(f"{library.__name__}.trainer_callback").ExportableState

    class Counting(library.TrainerCallback, exportable):
        """Counts optimizer steps, on from where a checkpoint's left off."""

        def __init__(self, stride: int = 1) -> None:
            self.stride = stride
            self.count = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.count += self.stride

        def state(self) -> dict:
            return {"args": {"stride": self.stride}, "attributes": {"count": self.count}}

    return Counting


def states_after_resuming(name: str, kind: type, folder: Any, restore: bool, strides: list[int]) -> tuple[Any, list]:
    """What a run of 8 steps saves of its callbacks, and what those of a run resumed at step 4 then hold."""
    settings = {**BEATS, "max_steps": 8, "restore_callback_states_from_checkpoint": restore}
    given = [kind(stride) for stride in strides]
    trainer, _ = build(name, "plain", folder, trainer={"callbacks": given}, **settings)
    trainer.train()
    fresh = [kind() for _ in strides]
    resumed, _ = build(name, "plain", folder, trainer={"callbacks": fresh}, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    found = [(it.stride, it.count) for it in resumed.callback_handler.callbacks if type(it) is kind]
    return trainer.state.stateful_callbacks["Counting"], found


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("bases", ["hftrainer", "transformers"])
def test_state_of_a_callback(tmp_path, restore, bases):
    """Ours also saves and restores those built on transformers' classes."""
    kinds = {name: counting_callback(importlib.import_module(name)) for name in {bases, "transformers"}}
    ours = states_after_resuming("hftrainer", kinds[bases], tmp_path / "ours", restore, [2])
    their_kind = kinds["transformers"]
    assert ours == states_after_resuming("transformers", their_kind, tmp_path / "theirs", restore, [2])
    assert ours[1] == ([(2, 16)] if restore else [(1, 4)])


def test_states_of_two_callbacks_of_one_class(tmp_path):
    kind = counting_callback(importlib.import_module("hftrainer"))
    _, found = states_after_resuming("hftrainer", kind, tmp_path, True, [2, 5])
    assert found == [(2, 16), (5, 40)]
