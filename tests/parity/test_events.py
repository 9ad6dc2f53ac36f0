"""Both libraries announce the same events with the same state, and do what callbacks ask for in them."""

import dataclasses
import functools
import importlib
from typing import Any

import pytest

from tests.support import parity
from tests.support.parity import EVERY_STEP, LIBRARIES, accuracy, array_bytes, build, callback, comparable, compare
from tests.support.small_models import plain_data

ALL_EVENTS = (*parity.EVENTS, "on_push_begin")


def describe(name: str, value: Any) -> Any:
    """What is comparable of an event's keyword; accelerate's wrappers count as what they wrap."""
    if name in ("logs", "metrics"):
        return list(value), comparable([value])
    if name in ("optimizer", "lr_scheduler"):
        return type(getattr(value, name.removeprefix("lr_"), value)).__name__
    if name.endswith("dataloader"):
        return None if value is None else len(value)
    return type(value).__name__


def make_full_recorder(library: Any, folder: Any) -> Any:
    def note(event: str, self, args, state, control, **kwargs):
        keywords = {name: describe(name, value) for name, value in sorted(kwargs.items())}
        values = dataclasses.asdict(state)
        values["log_history"] = comparable(values["log_history"])
        values["best_model_checkpoint"] = str(values["best_model_checkpoint"]).removeprefix(str(folder))
        self.seen.append((event, keywords, values, dataclasses.asdict(control), type(args).__name__))

    handlers = {event: functools.partialmethod(functools.partial(note, event)) for event in ALL_EVENTS}
    return type("FullRecorder", (library.TrainerCallback,), {"seen": [], **handlers})()


BEATS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4}
EARLY_STOP = {**EVERY_STEP, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 6}
#: Name of a run → its settings, and the step of the checkpoint that it goes on from.
RUNS: dict[str, tuple[dict[str, Any], int | None]] = {
    "epochs": ({"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}, None),
    "steps": ({**BEATS, "max_steps": 13, "logging_steps": 2, "logging_first_step": True, "eval_on_start": True}, None),
    "early stop": (EARLY_STOP, None),
    "accumulation": ({**BEATS, "gradient_accumulation_steps": 3}, None),
    "resume": ({**BEATS, "gradient_accumulation_steps": 2}, 4),
    "dict eval": ({**BEATS, "trainer": {"eval_dataset": {"a": plain_data()[:9], "b": plain_data()[9:14]}}}, None),
}


def assert_same_events(ours: list[tuple], theirs: list[tuple]) -> None:
    assert [seen[0] for seen in ours] == [seen[0] for seen in theirs]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == other, f"event {number}"


@pytest.mark.parametrize("run", RUNS)
def test_every_event_passes_the_same_state_and_keywords(tmp_path, run):
    settings, resume = RUNS[run]
    if resume:  # both go on from copies of one checkpoint
        build("transformers", "plain", tmp_path / "whole", **settings)[0].train()

    def run_one(name):
        library, folder = importlib.import_module(name), tmp_path / name
        recorder = make_full_recorder(library, folder)
        stopper = [library.EarlyStoppingCallback(2, 0.01)] if run == "early stop" else []
        trainer_kwargs = {"compute_metrics": accuracy, **settings.get("trainer", {}), "callbacks": [*stopper, recorder]}
        trainer, _ = build(name, "plain", folder, **{**settings, "trainer": trainer_kwargs})
        trainer.train(resume_from_checkpoint=resume and str(parity.copy_checkpoint(tmp_path / "whole", folder, resume)))
        assert (trainer.state.global_step < trainer.state.max_steps) == (run == "early stop")
        trainer.predict(plain_data()[:5])
        return recorder.seen

    ours = parity.assert_agree(run_one, assert_same_events)
    never = {"on_push_begin", *(() if "gradient_accumulation_steps" in settings else ("on_substep_end",))}
    assert {seen[0] for seen in ours} == set(ALL_EVENTS) - never


FLAGS = ["should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save"]
#: Event → the step at which the accumulating run announces it and the flag is set.
ANNOUNCED = {"on_init_end": 0, "on_train_begin": 0, "on_epoch_begin": 4, "on_epoch_end": 4, "on_step_begin": 2}
ANNOUNCED |= {"on_substep_end": 2, "on_pre_optimizer_step": 2, "on_optimizer_step": 2, "on_step_end": 2, "on_log": 6}
ANNOUNCED |= {"on_evaluate": 3, "on_prediction_step": 3, "on_save": 4, "on_train_end": 8}


def set_flag(event: str, at: int, flag: str, how: str) -> Any:
    def handler(self, args, state, control, **kwargs):
        if state.global_step != at:
            return None
        if how == "new object":
            return type(control)(**{**dataclasses.asdict(control), flag: True})
        setattr(control, flag, True)
        return control if how == "returned" else None

    return callback(**{event: handler})


SETTINGS = {"accumulating": {**BEATS, "gradient_accumulation_steps": 3}, "plain": {}}
#: Event and step at which a flag is set, the flag, how it is set, and the settings of the run.
SET = [
    *((event, at, flag, "in place", "accumulating") for event, at in ANNOUNCED.items() for flag in FLAGS),
    *((event, at, "should_evaluate", "new object", "accumulating") for event, at in ANNOUNCED.items()),
    *(("on_step_end", 2, flag, "returned", "plain") for flag in FLAGS),
    *(("on_step_begin", 2, flag, "returned", "plain") for flag in FLAGS[:2]),
    *((event, 2, flag, "returned", "plain") for event in ("on_log", "on_optimizer_step") for flag in FLAGS[1::2]),
]


@pytest.mark.parametrize(("event", "at", "flag", "how", "settings"), SET)
def test_control_flag_set_in_an_event_acts_alike(tmp_path, event, at, flag, how, settings):
    compare(tmp_path, "plain", callback=set_flag(event, at, flag, how), **SETTINGS[settings])


def test_early_stopping_callback_of_transformers_works(tmp_path):
    stopper = importlib.import_module("transformers").EarlyStoppingCallback
    ours = compare(tmp_path, "plain", callback=lambda library: stopper(2, 0.01), **EARLY_STOP)
    assert ours.extra["global_step"] < 60


def test_model_put_in_eval_mode_by_a_callback_trains_alike(tmp_path):
    """transformers sets training mode before every micro-batch; callbacks rely on it."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.layers[3].eval() if state.global_step % 2 else model.eval()

    compare(tmp_path, "plain", callback=callback(on_step_end=on_step_end))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_epoch_begin", "on_train_begin", "on_substep_end"])
def test_evaluate_and_predict_from_a_callback(tmp_path, event):
    def script(trainer):
        def handler(self, args, state, control, **kwargs):
            trainer.evaluate(plain_data()[:5], metric_key_prefix="inner")
            trainer.predict(plain_data()[:3])

        library = importlib.import_module(type(trainer).__module__.split(".")[0])
        trainer.add_callback(callback(**{event: handler})(library))
        trainer.train()

    compare(tmp_path, "plain", script=script, gradient_accumulation_steps=2, max_steps=4)


def sizes(prediction):
    return {"sizes": [list(prediction.predictions.shape), list(prediction.label_ids.shape)]}


@pytest.mark.parametrize("order", ["evaluate first", "train first"])
@pytest.mark.parametrize(("model", "bf16"), [("plain", False), ("plain", True), ("bert", True), ("llama", False)])
def test_evaluate_and_predict_before_and_after_training(tmp_path, model, bf16, order):
    def script(trainer):
        if order == "evaluate first":
            trainer.evaluate()
        trainer.train()
        metrics, output = trainer.evaluate(), trainer.predict(trainer.eval_dataset, metric_key_prefix="try")
        found = list(metrics), sorted(output.metrics), output.metrics["try_sizes"], trainer.model.training
        return found, array_bytes([output.predictions, output.label_ids])

    compare(tmp_path, model, script=script, trainer={"compute_metrics": sizes}, max_steps=3, bf16=bf16)


def test_compute_metrics_may_call_predict(tmp_path):
    def script(trainer):
        def metrics(prediction):
            trainer.compute_metrics = None
            inner = trainer.predict(plain_data()[:5]).predictions.sum()
            return {"inner": float(inner), "big": 10**400, "x/dataloader_idx_0": 1.0}

        trainer.compute_metrics = metrics
        trainer.evaluate()

    compare(tmp_path, "plain", script=script)


def counting_callback(library: str) -> Any:
    module = importlib.import_module(f"{library}.trainer_callback")

    class Counting(module.TrainerCallback, module.ExportableState):
        def __init__(self, stride: int = 1) -> None:
            self.stride, self.count = stride, 0

        def on_step_end(self, args, state, control, **kwargs):
            self.count += self.stride

        def state(self) -> dict:
            return {"args": {"stride": self.stride}, "attributes": {"count": self.count}}

    return Counting


def states_after_resuming(name: str, kind: type, folder: Any, restore: bool, strides: list[int]) -> tuple[Any, list]:
    """What a run of 8 steps saves of its callbacks, and what those of a run resumed at step 4 then hold."""
    settings = {**BEATS, "max_steps": 8, "restore_callback_states_from_checkpoint": restore}
    trainer, _ = build(name, "plain", folder, trainer={"callbacks": [kind(each) for each in strides]}, **settings)
    trainer.train()
    resumed, _ = build(name, "plain", folder, trainer={"callbacks": [kind() for _ in strides]}, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    found = [(it.stride, it.count) for it in resumed.callback_handler.callbacks if type(it) is kind]
    return trainer.state.stateful_callbacks["Counting"], found


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("bases", LIBRARIES)
def test_callback_state_is_saved_and_restored(tmp_path, restore, bases):
    """Ours also handles callbacks that derive from transformers' classes."""
    ours, theirs = (
        states_after_resuming(name, counting_callback(base), tmp_path / name, restore, [2])
        for name, base in (("hftrainer", bases), ("transformers", "transformers"))
    )
    assert ours == theirs
    # A stride of 2 in all 8 steps, or the default of 1 in the last 4.
    assert ours[1] == ([(2, 16)] if restore else [(1, 4)])


def test_two_callbacks_of_one_class_get_their_own_states_back(tmp_path):
    kind = counting_callback("hftrainer")
    _, found = states_after_resuming("hftrainer", kind, tmp_path, True, [2, 5])
    assert found == [(2, 16), (5, 40)]
