"""`install()`: replaces the Trainer and related names in the modules of `transformers` with ours.

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

from hftrainer.plugins import import_adapter


def _table(names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {module: tuple(words.split()) for module, words in names.items()}


#: Module of transformers 4 → names that we provide. Optimizer names that a release still has are not replaced.
_TF_NAMES = _table(
    {
        "transformers.trainer_tf": "TFTrainer",
        "transformers.training_args_tf": "TFTrainingArguments",
        "transformers.optimization_tf": "AdamWeightDecay WarmUp create_optimizer",
    }
)
_CHOICES = "HubStrategy IntervalStrategy SaveStrategy"
#: Module of transformers → the names to replace. Its package exports all of them.
NAMES = _TF_NAMES | _table(
    {
        "transformers.trainer": "Trainer DEFAULT_CALLBACKS DEFAULT_PROGRESS_CALLBACK",
        "transformers.debug_utils": "DebugOption",
        "transformers.hf_argparser": "HfArgumentParser",
        "transformers.trainer_seq2seq": "Seq2SeqTrainer",
        "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
        "transformers.training_args": "OptimizerNames ParallelMode TrainingArguments",
        "transformers.modelcard": "TrainingSummary",
        "transformers.trainer_pt_utils": "AcceleratorConfig",
        "transformers.trainer_callback": "CallbackHandler DefaultFlowCallback EarlyStoppingCallback ExportableState "
        "PrinterCallback ProgressCallback TrainerCallback TrainerControl TrainerState",
        "transformers.trainer_utils": f"{_CHOICES} EvalLoopOutput EvalPrediction HPSearchBackend PredictionOutput "
        "SchedulerType TrainOutput enable_full_determinism get_last_checkpoint set_seed",
        "transformers.integrations.integration_utils": "CometCallback MLflowCallback TensorBoardCallback "
        "WandbCallback WandbLogModel",
    }
)
#: Module of transformers → our module, if the names differ.
_OURS = {"transformers.integrations.integration_utils": "hftrainer.integrations"}
_PACKAGES = ("transformers", "transformers.integrations")
#: A table in the module of `_OURS`, whose values are classes that we replace.
_TABLE = "INTEGRATION_TO_CALLBACK"
#: Module of transformers → names that it imports from the modules above.
REEXPORTED_NAMES = _table(
    {
        "transformers.trainer": f"{_CHOICES} DebugOption EvalPrediction HPSearchBackend OptimizerNames ParallelMode "
        "TrainerCallback TrainerControl TrainerState TrainingArguments",
        "transformers.training_args": f"{_CHOICES} DebugOption SchedulerType",
        "transformers.optimization": "SchedulerType",
    }
)
_TOKENIZERS = "transformers.tokenization_utils_base"
#: Module or class, name, and original value of each replaced attribute.
_originals: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def replace_names() -> None:
    """Change the loaded modules of transformers, and install an import hook for the others."""
    sys.meta_path.insert(0, _Finder())
    for name in [*NAMES, *REEXPORTED_NAMES.keys() - NAMES.keys(), _TOKENIZERS]:
        if name in sys.modules:
            _swap(sys.modules[name])
    for package in _packages():
        _swap(package)


def restore_names() -> None:
    """Restore the original names of transformers."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for package in _packages():
        if hasattr(type(package), "_original_class"):
            package.__class__ = vars(type(package))["_original_class"]
    for name in _TF_NAMES:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if isinstance(getattr(spec, "loader", None), _MissingModuleLoader):
            del sys.modules[name]
    for module, name, original in reversed(_originals):
        if original is _ABSENT:
            if name in vars(module):
                delattr(module, name)
        else:
            setattr(module, name, original)
    _originals.clear()


def is_installed() -> bool:
    """Whether `install()` is active."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def current_value(module_name: str, name: str, ours: Any) -> Any:
    """The current value of a replaced name in a module of transformers.

    It is `ours` unless the module is loaded and `install()` is active.

    Scripts assign their own values in some modules, and compare with the classes in others.
    """
    module = sys.modules.get(module_name) if is_installed() else None
    return vars(module).get(name, ours) if module is not None else ours


def _names_in(module_name: str) -> Iterator[tuple[str, str]]:
    """Names to replace in a module, each with our module that defines it."""
    for source, names in NAMES.items():
        for name in names:
            if module_name in (source.rpartition(".")[0], source) or name in REEXPORTED_NAMES.get(module_name, ()):
                yield name, _OURS.get(source, source.replace("transformers", "hftrainer"))


def _swap(module: ModuleType) -> None:
    pairs: list[tuple[Any, Any]] = []
    for name, ours in _names_in(module.__name__):
        # A release that still has the Keras optimizers keeps them. The package loads a name at its first access:
        # names not accessed yet must not be loaded now.
        package = sys.modules.get("transformers", module)
        if name in _TF_NAMES["transformers.optimization_tf"] and name in getattr(package, "_class_to_module", {}):
            continue
        original = vars(module).get(name, _ABSENT)
        # This release may lack the name.
        if original is _ABSENT and module.__name__ not in _PACKAGES:
            continue
        pairs.append((original, _replace_attribute(module, name, getattr(importlib.import_module(ours), name))))
    if module.__name__ in _OURS and (table := vars(module).get(_TABLE)) is not None:
        replacements = {original: ours for original, ours in pairs if isinstance(original, type)}
        _replace_attribute(module, _TABLE, {key: replacements.get(kind, kind) for key, kind in table.items()})
    if module.__name__ == "transformers":
        _add_tensorflow_names(module)
    if module.__name__ == _TOKENIZERS:
        kind = module.PreTrainedTokenizerBase
        # v5 removed this method, but scripts for TFTrainer call it.
        if not hasattr(kind, "batch_encode_plus"):
            _replace_attribute(kind, "batch_encode_plus", kind.__call__)


def _replace_attribute(module: Any, name: str, value: Any) -> Any:
    original = vars(module).get(name, _ABSENT)
    is_class = isinstance(original, type) and isinstance(value, type)
    # A module that is loaded after its package was changed already has our class.
    if is_class and original is not value and not any(original is changed for changed, _, _ in _originals):
        _keep_picklable(original)
    _originals.append((module, name, original))
    setattr(module, name, value)
    return value


def _packages() -> list[ModuleType]:
    """All module objects of the packages: each replaces itself while loading, and scripts may hold the first object."""
    values = [value for module in list(sys.modules.values()) if module is not None for value in vars(module).values()]
    references = [value for value in values if issubclass(type(value), ModuleType) and value.__name__ in _PACKAGES]
    loaded = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    return list({id(package): package for package in [*loaded, *references]}.values())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of transformers by the other finders, and changes each after its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in {*NAMES, *REEXPORTED_NAMES, *_PACKAGES, _TOKENIZERS}:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None and fullname in _TF_NAMES:
            return importlib.machinery.ModuleSpec(fullname, _MissingModuleLoader())
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


# ---- Replaced classes stay picklable ---------------------------------------------------------------------------------
#
# A script that imported the original Trainer before `install()` pickles the original arguments into each checkpoint.
# pickle refuses a class if its module holds another class under that name.


class _ClassByName:
    """Pickles a class by name, so that the file loads with and without hftrainer."""

    def __init__(self, named_class: type) -> None:
        self.named_class = named_class

    def __call__(self, *args: Any) -> Any:
        """Create an object of the original class, for `copy`."""
        return self.named_class(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (f"{self.named_class.__module__}:{self.named_class.__qualname__}",)


class _UninitializedFactory(_ClassByName):
    """Makes an object of a class without calling its `__init__`."""

    def __call__(self, *args: Any) -> Any:
        return object.__new__(self.named_class)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (object.__new__, _ClassByName(self.named_class))


def _keep_picklable(original_class: Any) -> None:
    """Make objects of an original class pickle it by its name."""
    original_method = vars(original_class).get("__reduce_ex__")

    def reduce(self: Any, protocol: Any) -> Any:
        # pickle finds a subclass under its own name.
        if type(self) is not original_class:
            if original_method is not None:
                return original_method(self, protocol)
            return super(original_class, self).__reduce_ex__(protocol)
        if isinstance(self, enum.Enum):
            return _ClassByName(original_class), (self.value,)
        if isinstance(self, tuple):
            return _ClassByName(original_class), tuple(self)
        # Every object has this method since Python 3.11.
        get_state = getattr(self, "__getstate__", None)
        return _UninitializedFactory(original_class), (), dict(vars(self)) if get_state is None else get_state()

    _replace_attribute(original_class, "__reduce_ex__", reduce)


# ---- TensorFlow's names that this release of transformers lacks -----------------------------------------------------


def _add_tensorflow_names(package: ModuleType) -> None:
    """Add names such as `TFBertModel` to the package, for torch's model classes.

    Names that the package has are unchanged: ours are used only if its lookup fails.
    """
    base: Any = type(package)
    if hasattr(base, "_original_class"):
        return

    def find_attribute(self: Any, name: str) -> Any:
        try:
            return base.__getattr__(self, name)
        except AttributeError:
            torch_class = import_adapter("tensorflow", "h5_weights").torch_class(self, name)
            if torch_class is None:
                raise
            return torch_class

    package.__class__ = type(base.__name__, (base,), {"__getattr__": find_attribute, "_original_class": base})


class _MissingModuleLoader(importlib.abc.Loader):
    """Creates a module that this release of transformers lacks, with our classes and functions."""

    def exec_module(self, module: ModuleType) -> None:
        our_module = importlib.import_module(module.__name__.replace("transformers", "hftrainer"))
        for name in _TF_NAMES[module.__name__]:
            setattr(module, name, getattr(our_module, name))
