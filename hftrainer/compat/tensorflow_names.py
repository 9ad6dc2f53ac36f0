"""Names of TensorFlow's classes in `transformers` while `install()` is active, where `transformers` itself has none."""

from __future__ import annotations

import importlib
import importlib.abc
from types import ModuleType
from typing import Any

from hftrainer.plugins import load

#: Module that only transformers 4 has → our names. Where a release has a name of the last, its own stays.
MODULES: dict[str, tuple[str, ...]] = {
    "transformers.trainer_tf": ("TFTrainer",),
    "transformers.training_args_tf": ("TFTrainingArguments",),
    "transformers.optimization_tf": ("AdamWeightDecay", "WarmUp", "create_optimizer"),
}
_OF_KERAS = MODULES["transformers.optimization_tf"]


def stays(package: ModuleType, name: str) -> bool:
    """Whether transformers has a name for optimizers of Keras itself."""
    return name in _OF_KERAS and name in getattr(package, "_class_to_module", {})


def lend(package: ModuleType) -> None:
    """Give the package names such as `TFAutoModelForCausalLM` and `TFBertModel`, of torch's models.

    Names that the package has itself are not touched: this is asked only for those that it cannot find.
    """
    kind: Any = type(package)
    if hasattr(kind, "_lends"):
        return

    def find(self: Any, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)  # the package's own way
        except AttributeError:
            made = load("tensorflow", "model_names").torch_class(self, name)
            if made is None:
                raise
            return made

    package.__class__ = type(kind.__name__, (kind,), {"__getattr__": find, "_lends": kind})


def take_back(package: ModuleType) -> None:
    """Undo `lend`."""
    if hasattr(type(package), "_lends"):
        package.__class__ = vars(type(package))["_lends"]


class Absent(importlib.abc.Loader):
    """Makes a module that this release of transformers lacks, with our names."""

    def exec_module(self, module: ModuleType) -> None:
        """Set the names."""
        ours = importlib.import_module(module.__name__.replace("transformers", "hftrainer"))
        for name in MODULES[module.__name__]:
            setattr(module, name, getattr(ours, name))
