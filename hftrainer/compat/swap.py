"""`install()`: replaces the Trainer and related names in the modules of `transformers` by ours.

`transformers` loads its modules when they are first used. Loaded modules are changed immediately; an import hook
changes the others when they load. Nothing here imports `transformers`, which takes seconds.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from hftrainer.compat import tensorflow_names

#: Module of transformers → the names to replace. Its package exports all of them.
NAMES: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("Trainer", "DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK"),
    "transformers.debug_utils": ("DebugOption",),
    "transformers.hf_argparser": ("HfArgumentParser",),
    "transformers.trainer_seq2seq": ("Seq2SeqTrainer",),
    "transformers.training_args_seq2seq": ("Seq2SeqTrainingArguments",),
    "transformers.training_args": ("OptimizerNames", "ParallelMode", "TrainingArguments"),
    "transformers.modelcard": ("TrainingSummary",),
    "transformers.trainer_pt_utils": ("AcceleratorConfig",),
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
        "HPSearchBackend",
        "HubStrategy",
        "IntervalStrategy",
        "PredictionOutput",
        "SaveStrategy",
        "SchedulerType",
        "TrainOutput",
        "enable_full_determinism",
        "get_last_checkpoint",
        "set_seed",
    ),
    "transformers.integrations.integration_utils": (
        "CometCallback",
        "MLflowCallback",
        "TensorBoardCallback",
        "WandbCallback",
        "WandbLogModel",
    ),
    **tensorflow_names.MODULES,
}
#: Module of transformers → our module, if the names differ.
_OURS = {"transformers.integrations.integration_utils": "hftrainer.reporting.tracker_callbacks"}
_PACKAGES = ("transformers", "transformers.integrations")
#: Module → tables in it whose values are such classes.
_TABLES = {"transformers.integrations.integration_utils": ("INTEGRATION_TO_CALLBACK",)}
#: Module of transformers → names that it imports from those above.
ALSO_IN: dict[str, tuple[str, ...]] = {
    "transformers.trainer": (
        "TrainingArguments",
        "TrainerCallback",
        "TrainerState",
        "TrainerControl",
        "EvalPrediction",
        "DebugOption",
        "HPSearchBackend",
        "HubStrategy",
        "IntervalStrategy",
        "OptimizerNames",
        "ParallelMode",
        "SaveStrategy",
    ),
    "transformers.training_args": ("DebugOption", "HubStrategy", "IntervalStrategy", "SaveStrategy", "SchedulerType"),
    "transformers.optimization": ("SchedulerType",),
}
_TOKENIZERS = "transformers.tokenization_utils_base"
#: Module or class, name, and original value.
_originals: list[tuple[Any, str, Any]] = []
_ABSENT = object()
#: Original class → what makes it as it was.
_kept: dict[type, Any] = {}


def begin() -> None:
    """Change the loaded modules of transformers, and install the hook that changes the others."""
    sys.meta_path.insert(0, _Finder())
    for name in [*NAMES, *ALSO_IN.keys() - NAMES.keys(), _TOKENIZERS]:
        if name in sys.modules:
            _swap(sys.modules[name])
    for package in _packages():
        _swap(package)


def end() -> None:
    """Restore the original names of transformers."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for package in _packages():
        tensorflow_names.take_back(package)
    for name in tensorflow_names.MODULES:
        if isinstance(
            getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None), tensorflow_names.Absent
        ):
            del sys.modules[name]
    for module, name, original in reversed(_originals):
        if original is _ABSENT:
            if name in vars(module):
                delattr(module, name)
        else:
            setattr(module, name, original)
    _originals.clear()
    for kind, before in _kept.items():
        let_go(kind, before)
    _kept.clear()


def is_installed() -> bool:
    """Whether `install()` is active."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def rebound(module_name: str, name: str, ours: Any) -> Any:
    """The value of a name in a loaded module of transformers while `install()` is active, else `ours`.

    Scripts assign their own values in some modules, and compare with the classes in others.
    """
    module = sys.modules.get(module_name) if is_installed() else None
    return vars(module).get(name, ours) if module is not None else ours


def _names_in(module_name: str) -> Iterator[tuple[str, str]]:
    """Names to replace in a module, each with our module that defines it."""
    for source, names in NAMES.items():
        for name in names:
            if module_name in (source.rpartition(".")[0], source) or name in ALSO_IN.get(module_name, ()):
                yield name, _OURS.get(source, source.replace("transformers", "hftrainer"))


def _swap(module: ModuleType) -> None:
    replaced: list[tuple[Any, Any]] = []
    for name, ours in _names_in(module.__name__):
        # The package loads a name at its first access: names not accessed yet must not be loaded now.
        if tensorflow_names.stays(sys.modules.get("transformers", module), name):
            continue
        before = vars(module).get(name, _ABSENT)
        if before is _ABSENT and module.__name__ not in _PACKAGES:
            continue  # this release does not have the name
        replaced.append((before, _put(module, name, getattr(importlib.import_module(ours), name))))
    for table in _TABLES.get(module.__name__, ()):
        ours_of = {before: ours for before, ours in replaced if isinstance(before, type)}
        _put(module, table, {key: ours_of.get(kind, kind) for key, kind in vars(module)[table].items()})

    if module.__name__ == "transformers":
        tensorflow_names.lend(module)
    if module.__name__ == _TOKENIZERS:
        kind = module.PreTrainedTokenizerBase
        if not hasattr(kind, "batch_encode_plus"):  # gone in v5; each script for TFTrainer is of v4
            _put(kind, "batch_encode_plus", kind.__call__)


def _put(module: Any, name: str, value: Any) -> Any:
    before = vars(module).get(name, _ABSENT)
    _originals.append((module, name, before))
    # A module that is loaded after its package was changed has ours already.
    if isinstance(before, type) and isinstance(value, type) and before is not value and before not in _kept:
        _kept[before] = keep_picklable(before)
    setattr(module, name, value)
    return value


def _packages() -> list[ModuleType]:
    """All objects of the packages: each replaces itself while loading, and scripts may hold the first object."""
    values = [value for module in list(sys.modules.values()) if module is not None for value in vars(module).values()]
    held = [value for value in values if issubclass(type(value), ModuleType) and value.__name__ in _PACKAGES]
    loaded = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    return list({id(package): package for package in [*loaded, *held]}.values())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of transformers with the other finders, and changes each after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in {*NAMES, *ALSO_IN, *_PACKAGES, _TOKENIZERS}:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None and fullname in tensorflow_names.MODULES:
            return importlib.machinery.ModuleSpec(fullname, tensorflow_names.Absent())
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
        # transformers replaces itself in sys.modules while it is executed.
        _swap(sys.modules.get(module.__name__, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# Keeps the originals picklable: a script that imported the original Trainer before `install()` keeps it, with its
# arguments. It pickles these into each checkpoint (`training_args.bin`), and pickle refuses a class whose module has
# another one under its name.
_METHOD = "__reduce_ex__"


class _Class:
    """A class in a pickle: whatever has its name when that is read, with and without hftrainer."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, *args: Any) -> Any:
        """For copies, which stay of the class."""
        return self.kind(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (f"{self.kind.__module__}:{self.kind.__qualname__}",)


class _Empty(_Class):
    """Makes an object of a class without calling its `__init__`."""

    def __call__(self, *args: Any) -> Any:
        return object.__new__(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (object.__new__, _Class(self.kind))


def keep_picklable(kind: Any) -> Any:
    """Make objects of an original class name their class in a pickle; returns what `let_go` needs."""
    before = vars(kind).get(_METHOD, _ABSENT)

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not kind:  # a subclass has a name of its own
            return super(kind, self).__reduce_ex__(protocol) if before is _ABSENT else before(self, protocol)
        if isinstance(self, enum.Enum):
            return _Class(kind), (self.value,)
        if isinstance(self, tuple):
            return _Class(kind), tuple(self)
        own_state = getattr(self, "__getstate__", None)  # each object has one since Python 3.11
        return _Empty(kind), (), dict(vars(self)) if own_state is None else own_state()

    setattr(kind, _METHOD, reduce)
    return before


def let_go(kind: type, before: Any) -> None:
    """Undo `keep_picklable`."""
    if before is _ABSENT:
        delattr(kind, _METHOD)
    else:
        setattr(kind, _METHOD, before)
