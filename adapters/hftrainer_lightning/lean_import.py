"""Imports Lightning without most of torchmetrics.

Lightning needs two classes of torchmetrics while it is imported. The package's `__init__` imports every metric before
it hands these out, and with the metrics SciPy and transformers' models where they are installed: more than Lightning
itself. The submodules with the two classes do not need it, so it runs later: when something imports torchmetrics.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

_NAME = "torchmetrics"
#: What Lightning asks of the package → the submodule that defines it.
_DEFINED_IN = {
    "Metric": f"{_NAME}.metric",
    "MetricCollection": f"{_NAME}.collections",
    "__version__": f"{_NAME}.__about__",
}


def import_lightning() -> None:
    """Import Lightning, unless it has been imported."""
    if "lightning.pytorch" not in sys.modules:
        with _without_metrics(), _without_collections():
            importlib.import_module("lightning.pytorch")


class _SamePackage(SourceFileLoader):
    """Runs the package's `__init__` in the module object in which its submodules are registered already.

    It is also the finder that tells Python's import to use it, until that has happened.
    """

    package: ModuleType

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The package's ordinary spec, but for this loader; None for all other names."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module object that is there."""
        return self.package

    def exec_module(self, module: ModuleType) -> None:
        """Run `__init__`, once: Python does all that follows without this loader."""
        super().exec_module(module)
        sys.meta_path.remove(self)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Look for no garbage: what an import makes stays, and is looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _without_metrics() -> Iterator[None]:
    """Within, torchmetrics has only the names that Lightning asks for; any other makes it whole.

    Afterwards the submodules are there but the package is not, so that Python imports it when it is asked for. Does
    nothing if torchmetrics has been imported, is missing, or is not an ordinary folder.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or type(spec.loader) is not SourceFileLoader:
        yield
        return
    loader = _SamePackage(_NAME, spec.loader.path)
    sys.meta_path.insert(0, loader)
    loader.package = package = importlib.util.module_from_spec(spec)
    names = vars(package)

    def find(name: str) -> Any:
        submodule = _DEFINED_IN.get(name)
        if submodule is not None and importlib.util.find_spec(submodule) is not None:
            importlib.import_module(f"{_NAME}.utilities")  # first: it and the classes import each other
            return getattr(importlib.import_module(submodule), name)
        del names["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    names.update(__getattr__=find, _logger=logging.getLogger(_NAME))  # the submodules ask for `_logger`
    sys.modules[_NAME] = package
    try:
        yield
    finally:
        if names.pop("__getattr__", None) is not None:
            del sys.modules[_NAME]
