"""`install()`: from then on, what `transformers` calls Trainer is ours.

`transformers` loads its modules when they are first used. Modules that are loaded already are changed at once; an
import hook changes the others as they load. Importing `transformers` here would cost seconds, so nothing here does.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

#: Module of transformers → the names that become ours. The package itself offers all of them.
NAMES: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("Trainer",),
    "transformers.trainer_seq2seq": ("Seq2SeqTrainer",),
    "transformers.training_args_seq2seq": ("Seq2SeqTrainingArguments",),
    "transformers.training_args": ("TrainingArguments",),
    "transformers.modelcard": ("TrainingSummary",),
    "transformers.trainer_callback": (
        "CallbackHandler",
        "DefaultFlowCallback",
        "EarlyStoppingCallback",
        "ExportableState",
        "PrinterCallback",
        "ProgressCallback",
        "TrainerCallback",
        "TrainerControl",
        "TrainerState",
    ),
    "transformers.trainer_utils": (
        "EvalLoopOutput",
        "EvalPrediction",
        "PredictionOutput",
        "TrainOutput",
        "enable_full_determinism",
        "get_last_checkpoint",
        "set_seed",
    ),
}
#: Names that other modules of transformers take over from those above.
ALSO_IN: dict[str, tuple[str, ...]] = {
    "transformers.trainer": (
        "TrainingArguments",
        "TrainerCallback",
        "TrainerState",
        "TrainerControl",
        "EvalPrediction",
    ),
}
_originals: dict[tuple[str, str], Any] = {}
_ABSENT = object()


def install() -> None:
    """Make `Trainer`, `TrainingArguments`, the callbacks and their helpers in `transformers` ours.

    Works before and after `import transformers`. A module that took the original `Trainer` before keeps it: a warning
    names it.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _warn_of_earlier_imports()
    if _release() < 5:
        _set_default_of_report_to("all")
    sys.meta_path.insert(0, _Finder())
    for name in [*NAMES, "transformers"]:
        if name in sys.modules:
            _swap(sys.modules[name])


def uninstall() -> None:
    """Undo `install()`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for (module_name, name), original in _originals.items():
        module = sys.modules[module_name]
        if original is _ABSENT:
            vars(module).pop(name, None)
        else:
            setattr(module, name, original)
    _originals.clear()
    _set_default_of_report_to("none")


def _release() -> int:
    """The major version of transformers that is installed; that of today without any."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 5


def _set_default_of_report_to(value: str) -> None:
    """Until v5.0 a script that says nothing about trackers writes to all that are installed."""
    from hftrainer.training_args import TrainingArguments
    from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

    for kind in (TrainingArguments, Seq2SeqTrainingArguments):
        kind.report_to = kind.__dataclass_fields__["report_to"].default = value
        initialize: Any = kind.__init__
        initialize.__kwdefaults__["report_to"] = value


def _names_in(module_name: str) -> Iterator[tuple[str, str]]:
    """Names to change in a module, each with our module that defines it."""
    for source, names in NAMES.items():
        for name in names:
            if module_name in ("transformers", source) or name in ALSO_IN.get(module_name, ()):
                yield name, source.replace("transformers", "hftrainer")


def _swap(module: ModuleType) -> None:
    for name, ours in _names_in(module.__name__):
        # The package fetches a name when it is first asked for: what was not asked for yet must not be fetched now.
        before = vars(module).get(name, _ABSENT)
        if before is _ABSENT and module.__name__ != "transformers":
            continue  # a release that has no such name
        _originals[module.__name__, name] = before
        setattr(module, name, getattr(importlib.import_module(ours), name))


def _warn_of_earlier_imports() -> None:
    original = vars(sys.modules.get("transformers.trainer", ModuleType("none"))).get("Trainer")
    if original is None:
        return
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if not name.startswith("transformers") and original in _values(module)
    )
    if holders:
        warnings.warn(
            f"{', '.join(holders)} imported transformers.Trainer before hftrainer.install(), and will go on using it: "
            "call install() first, or run the script with `python -m hftrainer run`.",
            stacklevel=3,
        )


def _values(module: Any) -> list[Any]:
    return [value for value in list(vars(module).values()) if isinstance(value, type)] if module is not None else []


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module of transformers, and changes it once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES and fullname != "transformers":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that swaps the names after the module's own code has run."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        # transformers puts another object in its own place while it is executed.
        _swap(sys.modules.get(module.__name__, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
