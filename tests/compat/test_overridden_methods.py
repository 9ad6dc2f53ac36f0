"""Replaced methods are called as often as in transformers, and between the same events, however replaced."""

import dataclasses
import functools
import importlib
import inspect
import re
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import accelerate
import pytest
import transformers

import hftrainer
from hftrainer.parallel.accelerator import EngineAccelerator
from tests.compat.names_in_use import ABSENT, METHODS
from tests.support.changed_trainers import methods_of
from tests.support.hub_runs import hub as hub, make_pushing
from tests.support.known_differences import NOT_CALLED_ALIKE
from tests.support.parity import EVERY_STEP, assert_agree, build, record
from tests.support.releases import TRANSFORMERS, pinned
from tests.support.small_models import make_plain, plain_data

pytestmark = pytest.mark.usefixtures("as_installed")
#: A run that reads, steps, accumulates, logs, evaluates, saves and loads its best model.
SETTINGS: dict[str, Any] = (
    EVERY_STEP
    | {"eval_steps": 3, "save_steps": 3, "gradient_accumulation_steps": 3, "load_best_model_at_end": True}
    | {"metric_for_best_model": "loss"}
)


def use(make: Callable[..., Any], library: Any, folder: Path) -> None:
    trainer = make(**SETTINGS, trainer={"model_init": make_plain})
    trainer.add_callback(type("Further", (library.TrainerCallback,), {}))
    trainer.pop_callback(library.PrinterCallback)
    trainer.remove_callback(library.EarlyStoppingCallback)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    trainer.save_state()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))


def use_datasets(make: Callable[..., Any], library: Any, folder: Path) -> None:
    from datasets import Dataset

    data = [{"x": sample["x"].tolist(), "labels": int(sample["labels"]), "text": "?"} for sample in plain_data()]
    trainer_kwargs = {"train_dataset": Dataset.from_list(data), "eval_dataset": Dataset.from_list(data[:9])}
    trainer = make(auto_find_batch_size=True, trainer=trainer_kwargs)
    trainer.train()
    trainer.evaluate()
    if hasattr(trainer, "end"):
        trainer.end()


def mix_gradients(make: Callable[..., Any], library: Any, folder: Path) -> None:
    trainer = make(max_steps=2)
    trainer._mixed_mesh_grads = True
    trainer.train()


def search(make: Callable[..., Any], library: Any, folder: Path) -> None:
    make(eval_strategy="epoch", trainer={"model_init": make_plain}).hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)}, n_trials=2, backend="optuna"
    )


def upload(make: Callable[..., Any], library: Any, folder: Path) -> None:
    trainer = make("bert", lambda name, model, *at, **kw: make_pushing(name, *at, model, hub_model_id=name, **kw))
    trainer.train()
    trainer.push_to_hub()


#: Replacing one of these decides who runs backward, so each is replaced in a separate run.
DECIDING = {"training_step", "_prepare_context_parallel_inputs", "backward", "no_sync"}
#: Scenarios for methods that `use` does not call.
ONLY = {
    use_datasets: "_remove_unused_columns _update_auto_batch_size end",
    mix_gradients: "_mixed_mesh_grad_norm",
    search: "hyperparameter_search _hp_search_setup call_model_init _get_output_dir",
    upload: "_push_from_checkpoint push_to_hub init_hf_repo create_model_card",
}
WAYS = ("class", "subclass", "instance", "accelerator")
CASES = [*((use, way) for way in WAYS), *((scenario, "subclass") for scenario in ONLY)]
NEWER = [pytest.param(*case, marks=pytest.mark.newest_peer) if case[0] is mix_gradients else case for case in CASES]
IS_NEWEST = pinned("transformers") <= TRANSFORMERS
#: Events and method → for each call the number of events before it.
Calls = tuple[list[str], dict[str, list[int]]]


def replaceable(library: Any, way: str) -> frozenset[str]:
    if way == "accelerator":
        return methods_of(EngineAccelerator) & methods_of(accelerate.Accelerator)
    return methods_of(library.Trainer)


@functools.cache
def calls_of(library: Any, scenario: Any, way: str, names: frozenset[str]) -> Calls:
    calls: dict[str, list[int]] = {}
    events: list[str] = []
    handler, kind = library.trainer_callback.CallbackHandler, library.Trainer
    announce = handler.call_event

    def note_event(self, event, *args, **kwargs):
        if hasattr(transformers.TrainerCallback, event):
            events.append(event)
        return announce(self, event, *args, **kwargs)

    def noting(holder, name):
        original = getattr(holder, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            calls.setdefault(name, []).append(len(events))
            return original(*args, **kwargs)

        is_static = holder is kind and isinstance(inspect.getattr_static(kind, name), staticmethod)
        return staticmethod(replacement) if is_static else replacement

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "call_event", note_event)
        used = type("Own", (kind,), {name: noting(kind, name) for name in names}) if way == "subclass" else kind

        def replace(holder):
            for name in names:
                patch.setattr(holder, name, noting(holder, name))

        def make(model="plain", build=build, **settings):
            trainer, _ = build(library.__name__, model, Path(folder, "run"), trainer_class=lambda _: used, **settings)
            if way in ("instance", "accelerator"):
                replace(trainer if way == "instance" else trainer.accelerator)
            return trainer

        if way == "class":
            replace(kind)
        scenario(make, library, Path(folder, "run"))
    return events, calls


def their_calls(scenario: Any, way: str) -> Calls:
    """The calls when all methods are replaced, without those of the construction for what is replaced later."""
    replaced_in = way if way == "accelerator" else "class"
    events, calls = calls_of(transformers, scenario, replaced_in, replaceable(transformers, way))
    first = 1 if way == "instance" else 0
    return events, {name: later for name, counts in calls.items() if (later := [n for n in counts if n >= first])}


def our_calls(scenario: Any, way: str) -> list[Calls]:
    """The calls when all methods are replaced that do not decide who runs backward, then when each of the others is."""
    names = replaceable(hftrainer, way)
    alone = [frozenset({name}) for name in sorted(names & DECIDING)] if scenario is use else []
    return [calls_of(hftrainer, scenario, way, each) for each in (names - DECIDING, *alone)]


#: Methods that, beside an older release, are called at other events too.
AT_OTHER_EVENTS = """
    _get_output_dir _issue_warnings_after_load _load_best_model _load_optimizer_and_scheduler _load_rng_state
    _maybe_log_save_evaluate _prepare_context_parallel_inputs log store_flos
""".split()
#: Methods that either library also calls elsewhere: transformers for its log, ours for its choices.
OFTENER = {"is_world_process_zero", "create_accelerator_and_postprocess"}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("scenario", "way"), NEWER, ids=lambda value: getattr(value, "__name__", value))
def test_replaced_methods_are_called_as_often_at_the_same_events(scenario, way):
    (events, expected), runs = their_calls(scenario, way), our_calls(scenario, way)
    found = {name: counts for _, calls in runs for name, counts in calls.items()}
    assert expected.keys() & OFTENER <= found.keys()
    compared = expected.keys() - {*ABSENT, *NOT_CALLED_ALIKE, *OFTENER}
    if scenario in ONLY:
        compared &= {*ONLY[scenario].split()}
    elif not IS_NEWEST and way != "accelerator":
        compared &= {*METHODS} - {*AT_OTHER_EVENTS}
    assert compared
    different = {name: (found.get(name), expected[name]) for name in compared if found.get(name) != expected[name]}
    assert different == {}
    if TRANSFORMERS > (4, 48):  # whose last window of an epoch is another one
        assert [each for each, _ in runs] == [events] * len(runs)


@pytest.mark.newest_peer
@pytest.mark.usefixtures("hub")
def test_each_method_in_use_is_called():
    assert {*METHODS} <= {name for scenario, way in CASES for name in their_calls(scenario, way)[1]}


@pytest.mark.newest_peer
@pytest.mark.parametrize("name", NOT_CALLED_ALIKE)
def test_methods_listed_as_not_called_alike_still_differ(name):
    way = "accelerator" if name in replaceable(hftrainer, "accelerator") else "subclass"
    assert our_calls(use, way)[0][1].get(name, []) != their_calls(use, way)[1].get(name, [])


#: Class of callbacks, or the handler → methods that must be called, with their number of arguments.
HOLDERS = {
    "TrainerCallback": [("on_step_end", 4), ("on_evaluate", 4), ("on_log", 4), ("on_predict", 4)],
    "DefaultFlowCallback": [("on_step_end", 4)],
    "EarlyStoppingCallback": [("check_metric_value", 5), ("state", 1)],
    "ProgressCallback": [("on_predict", 4)],
    "PrinterCallback": [("on_log", 4)],
    "CallbackHandler": [("on_evaluate", 4)],
}
HELD = [*((each, "subclass") for each in HOLDERS), ("CallbackHandler", "class"), ("CallbackHandler", "instance")]


@pytest.mark.parametrize(("holder", "way"), HELD)
def test_replaced_callback_methods_get_the_same_calls(tmp_path, holder, way, monkeypatch, capfd):
    """With the same arguments and flags, in a run that stops early."""

    def run(library_name):
        module, calls = importlib.import_module(f"{library_name}.trainer_callback"), []
        kind, settings = getattr(module, holder), {**SETTINGS, "logging_steps": 1, "learning_rate": 0.3}
        trainer, recorder = build(library_name, "plain", tmp_path / library_name, **settings)

        def noting(name, original):
            def method(*args, **kwargs):
                given = [each for each in args if not isinstance(each, module.CallbackHandler)]
                flags = [dataclasses.asdict(each) for each in given if isinstance(each, module.TrainerControl)]
                if name == "on_save":  # the handler clears it; ours does before, as it may write in the background
                    flags[0]["should_save"] = False
                result = original(*args, **kwargs)
                after = dataclasses.asdict(result) if isinstance(result, module.TrainerControl) else None
                calls.append((name, len(given), sorted(kwargs), flags, after))
                return result

            return method

        target = trainer.callback_handler if way == "instance" else kind
        names = [name for name in methods_of(kind) if re.match("on_|call_event|check|state$", name)]
        replaced = {name: noting(name, getattr(target, name)) for name in names}
        if way != "subclass":
            for name, method in replaced.items():
                monkeypatch.setattr(target, name, method)
        elif holder == "CallbackHandler":
            trainer.callback_handler.__class__ = type(holder, (kind,), replaced)
        else:
            if holder != "TrainerCallback":  # of which all others are
                trainer.remove_callback(kind)
            trainer.add_callback(type(holder, (kind,), replaced))
        trainer.train()
        trainer.predict(trainer.eval_dataset)
        return record(trainer, recorder, tmp_path / library_name, calls=sorted(calls, key=itemgetter(0)))

    assert {*HOLDERS[holder]} <= {call[:2] for call in assert_agree(run).extra["calls"]}


@pytest.mark.newest_peer
def test_methods_of_the_handler_have_the_signatures_of_transformers():
    ours, theirs = hftrainer.trainer_callback.CallbackHandler, transformers.trainer_callback.CallbackHandler
    for name in methods_of(theirs):
        expected = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name
