"""Which methods of a Trainer and its accelerator a run calls, how often, and between which events."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.parity import build
from tests.support.tiny import make_plain

#: Ways of putting a function in the place of a method.
WAYS = ("class", "subclass", "instance")
#: Name → for each call the number of events that had been announced before it.
Calls = dict[str, list[int]]
#: A run that reads, steps, accumulates, logs, evaluates, saves and loads its best model.
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "trainer": {"model_init": make_plain},
}


def calling(original: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """A function that notes each call, and passes it on."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    return replacement


def in_class(kind: type, name: str, note: Callable[[str], None]) -> Any:
    """What stands in for a method in a class."""
    replacement = calling(getattr(kind, name), functools.partial(note, name))
    return staticmethod(replacement) if isinstance(inspect.getattr_static(kind, name), staticmethod) else replacement


def methods_of(kind: type) -> set[str]:
    """The methods that can be replaced."""
    return {
        name
        for name in dir(kind)
        if inspect.isroutine(getattr(kind, name)) and not (name.startswith("__") and name.endswith("__"))
    }


@contextlib.contextmanager
def patched(kind: type, names: set[str], note: Callable[[str], None]) -> Iterator[None]:
    """The class itself with replaced methods, as libraries that speed training up do it."""
    before = {name: vars(kind).get(name) for name in names}
    for name in names:
        setattr(kind, name, in_class(kind, name, note))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def use(trainer: Any, folder: Path) -> None:
    """Train, evaluate, predict, save, and go on from the middle of an epoch."""
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    trainer.save_state()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))


def run(library: str, way: str, names: set[str], folder: Path) -> tuple[Calls, list[str]]:
    """Train, evaluate, predict, save, and go on from the middle of an epoch; the calls, and the events."""
    kind = importlib.import_module(library).Trainer
    calls: Calls = {}
    events: list[Any] = []

    def note(name: str) -> None:
        calls.setdefault(name, []).append(len(events))

    made = type("Own", (kind,), {name: in_class(kind, name, note) for name in names}) if way == "subclass" else kind
    with patched(kind, names, note) if way == "class" else contextlib.nullcontext():
        trainer, recorder = build(library, "plain", folder, trainer_class=lambda _: made, **SETTINGS)
        events = recorder.events
        calls.clear()  # construction is another story: accelerate is built there
        if way in ("instance", "accelerator"):
            holder = trainer if way == "instance" else trainer.accelerator
            for name in names:
                setattr(holder, name, calling(getattr(holder, name), functools.partial(note, name)))
        use(trainer, folder)
    return calls, [event[0] for event in events]
