"""Runs of a Trainer that a script has changed, in a subclass or on the instance."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.parity import Record, alike, build, comparable, record

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}


def parent(trainer: Any) -> Any:
    """`super()` for functions that become methods of a subclass."""
    return super(type(trainer), trainer)


def run_changed(
    name: str,
    folder: Path,
    change: Callable[[Any], None] = lambda trainer: None,
    step: int | None = None,
    methods: dict[str, Any] | None = None,
    model: str = "plain",
    **settings: Any,
) -> Record:
    """Train and evaluate with a subclass of library `name`.

    Args:
        name: the library.
        folder: the output directory.
        change: what is done to the Trainer at the end of `step`, or when it is made.
        step: a number of optimizer steps, 0 for the beginning of training.
        methods: those of the subclass.
        model: see `MODELS`.
        settings: see `build`.
    """
    library = importlib.import_module(name)
    kind = type("Own", (settings.pop("trainer_class", lambda library: library.Trainer)(library),), methods or {})
    trainer, recorder = build(name, model, folder, trainer_class=lambda _: kind, **{**EVERY_STEP, **settings})

    class Changes(library.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            return self.on_step_end(args, state, control)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                change(trainer)
            return trainer.control

    if step is None:
        change(trainer)
    else:
        trainer.add_callback(Changes)
    output = trainer.train()
    metrics = comparable([trainer.evaluate()])
    return record(trainer, recorder, folder, loss=output.training_loss, metrics=metrics)


def changed_alike(
    folder: Path,
    change: Callable[[Any], None] = lambda trainer: None,
    step: int | None = None,
    methods: dict[str, Any] | None = None,
    same: bool = False,
    **settings: Any,
) -> Record:
    """Our changed run, after asserting that transformers' is the same, and whether an unchanged one is too."""
    ours = alike(lambda name: run_changed(name, folder / name, change, step, methods, **settings))
    plain = run_changed("hftrainer", folder / "unchanged", **settings)
    assert ((ours.logs, ours.events, ours.extra) == (plain.logs, plain.events, plain.extra)) is same
    return ours
