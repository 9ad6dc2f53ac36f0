"""Runs of a Trainer that a script has changed, in a subclass, in the class itself or on the instance."""

import importlib
import inspect
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from tests.support.parity import EVALUATED, Record, assert_agree, build, comparable, record


class Doubled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> dict[str, Any]:
        outputs = self.model(**inputs)
        return {**outputs, "loss": 2 * outputs["loss"]}


def parent(trainer: Any) -> Any:
    """`super()` for functions that become methods of a subclass."""
    return super(type(trainer), trainer)


def library_of(trainer: Any) -> Any:
    return importlib.import_module(type(trainer.args).__module__.partition(".")[0])


def methods_of(kind: type) -> frozenset[str]:
    names = {name for name in dir(kind) if inspect.isroutine(getattr(kind, name)) and callable(getattr(kind, name))}
    return frozenset(name for name in names if not (name.startswith("__") and name.endswith("__")))


def copies(names: Iterable[str]) -> dict[str, Any]:
    """transformers' own functions, as methods of a script that has copied them."""
    return {name: inspect.getattr_static(transformers.Trainer, name) for name in names}


def run_changed(
    name, folder, change=lambda trainer: None, step=None, methods=None, patched=None, model="plain", **settings
) -> Record:
    """Train, evaluate, predict and save with a changed Trainer of library `name`; `settings` as for `build`.

    `change` gets the Trainer when it is made, or at the end of the optimizer step `step`, 0 for the beginning of
    training. `methods` are those of a subclass; `patched` makes a method of the library's Trainer from the original.
    """
    library = importlib.import_module(name)
    kind = settings.pop("trainer_class", lambda library: library.Trainer)(library)
    kind = type("Own", (kind,), methods) if methods else kind

    class Changes(library.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            return self.on_step_end(args, state, control)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                change(trainer)
            return trainer.control

    with pytest.MonkeyPatch.context() as patch:
        for method, replacement in (patched or {}).items():
            patch.setattr(library.Trainer, method, replacement(getattr(library.Trainer, method)))
        trainer, recorder = build(
            name, model, folder, trainer_class=lambda _: kind, **{**EVALUATED, "logging_steps": 1, **settings}
        )
        if step is None:
            change(trainer)
        else:
            trainer.add_callback(Changes)
        in_train = [trainer.is_in_train]
        loss = trainer.train().training_loss
        in_train.append(trainer.is_in_train)
        metrics = comparable([trainer.evaluate(), trainer.predict(trainer.eval_dataset).metrics])
        trainer.save_model(str(folder / "final"))
        trainer.save_state()
    hooks = [len(module._forward_hooks) for module in trainer.model.modules()]
    return record(trainer, recorder, folder, loss=loss, metrics=metrics, in_train=in_train, hooks=hooks)


_PLAIN: dict[str, tuple[dict[str, Any], Record]] = {}


def run_plain(name: str, **settings: Any) -> Record:
    """The run without changes, once for many tests. The settings are kept: no other object gets the same repr."""
    key = f"{name} {settings}"
    if key not in _PLAIN:
        with tempfile.TemporaryDirectory() as folder:
            _PLAIN[key] = settings, run_changed(name, Path(folder), **settings)
    return _PLAIN[key][1]


def assert_changed_alike(folder: Path, same: bool = False, **changes: Any) -> Record:
    """Our changed run, after asserting that transformers' is the same, and whether an unchanged one is too."""
    ours = assert_agree(lambda name: run_changed(name, folder / name, **changes))
    unchanged = {key: value for key, value in changes.items() if key not in ("change", "step", "methods", "patched")}
    plain = run_plain("hftrainer", **unchanged)
    assert ((ours.logs, ours.events, ours.extra) == (plain.logs, plain.events, plain.extra)) is same
    return ours
