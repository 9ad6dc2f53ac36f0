"""Every public method of every callback class is called so that an override, or a replacement, works."""

import importlib
import inspect

import pytest

from tests.support.parity import alike, assert_equal, assert_same, build, record

BASES = ("TrainerCallback", "DefaultFlowCallback", "EarlyStoppingCallback", "ProgressCallback", "PrinterCallback")
SETTINGS = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 4,
}


def module(library: str):
    return importlib.import_module(f"{library}.trainer_callback")


def methods_of(kind: type) -> list[str]:
    """The public methods that transformers has; `from_state` is called for no run."""
    names = [name for name in dir(kind) if not name.startswith("_") and inspect.isroutine(getattr(kind, name))]
    return [name for name in names if name != "from_state"]


def watched(library: str, base: str, calls: dict) -> type:
    """A subclass that notes each call of a method, and passes it on."""
    parent = getattr(module(library), base)

    def overriding(name):
        def method(self, *args, **kwargs):
            calls.setdefault(name, []).append((len(args), sorted(kwargs)))
            return getattr(parent, name)(self, *args, **kwargs)

        return method

    return type("Own", (parent,), {name: overriding(name) for name in methods_of(parent)})


def finished(library: str, folder, prepare):
    """A run that stops early, then is resumed; with what `prepare` does to its Trainer."""
    trainer, recorder = build(library, "plain", folder, learning_rate=0.3, **SETTINGS)
    prepare(trainer)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    return record(trainer, recorder, folder)


@pytest.mark.parametrize("base", BASES)
def test_overrides_are_called_alike(tmp_path, base, capfd):
    calls = {"hftrainer": {}, "transformers": {}}
    records = []
    for library, noted in calls.items():

        def prepare(trainer, library=library, noted=noted):
            if base in ("DefaultFlowCallback", "PrinterCallback"):
                trainer.remove_callback(getattr(module(library), base))
            trainer.add_callback(watched(library, base, noted)())

        records.append(finished(library, tmp_path / library, prepare))
    assert_same(*records)
    assert calls["hftrainer"] == calls["transformers"]
    assert set(calls["hftrainer"]) >= {"on_step_end", "on_evaluate", "on_log", "on_predict"}
    if base == "EarlyStoppingCallback":
        assert {"check_metric_value", "state"} <= set(calls["hftrainer"])


@pytest.mark.parametrize("how", ["class", "subclass", "instance"])
def test_methods_of_the_handler(tmp_path, how, monkeypatch):
    """`callback_handler.on_step_end` and the others, with the metrics and the log line by position."""
    calls = {"hftrainer": [], "transformers": []}
    records = []
    for library, noted in calls.items():
        parent = module(library).CallbackHandler
        names = [name for name in methods_of(parent) if name.startswith("on_") or name == "call_event"]

        def noting(name, original, noted=noted):
            def method(*args, **kwargs):
                noted.append((name, len([each for each in args if type(each).__name__ != "CallbackHandler"])))
                return original(*args, **kwargs)

            return method

        def prepare(trainer, parent=parent, names=names, noting=noting):
            handler = trainer.callback_handler
            if how == "class":
                for name in names:
                    monkeypatch.setattr(parent, name, noting(name, getattr(parent, name)))
            elif how == "subclass":
                own = {name: noting(name, getattr(parent, name)) for name in names}
                handler.__class__ = type("CallbackHandler", (parent,), own)
            else:
                for name in names:
                    setattr(handler, name, noting(name, getattr(handler, name)))

        records.append(finished(library, tmp_path / library, prepare))
    assert_same(*records)
    assert calls["hftrainer"] == calls["transformers"]
    assert ("on_evaluate", 4) in calls["hftrainer"]


def test_own_rule_for_early_stopping(tmp_path):
    """The rule that an override brings is the one that stops the run."""

    def run(library):

        class OnTheThird(module(library).EarlyStoppingCallback):
            def check_metric_value(self, args, state, control, metric_value):
                self.early_stopping_patience_counter += len(state.log_history) > 12

        trainer, _ = build(library, "plain", tmp_path / library, **SETTINGS, trainer={"callbacks": [OnTheThird(2)]})
        trainer.train()
        return (trainer.state.global_step, trainer.state.max_steps)

    ours = alike(run, assert_equal)
    assert ours[0] < ours[1]


def test_handler_methods_have_the_signatures_of_transformers():
    ours, theirs = module("hftrainer").CallbackHandler, module("transformers").CallbackHandler
    for name in methods_of(theirs):
        expected = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name
