"""hftrainer's engine on PyTorch Lightning.

Importing this package imports neither `lightning` nor `torch`; `import_lightning` and its modules do.

Lightning imports two classes of torchmetrics. The package's `__init__` also imports every metric, SciPy and
transformers' models, which takes longer than Lightning itself. The submodules of the two classes do not need it, so
`import_lightning` defers torchmetrics' `__init__`: it runs in the same module object when other code uses another name.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import sys
from importlib.machinery import SourceFileLoader
from typing import Any

#: Name that Lightning imports from torchmetrics → the submodule that defines it.
_SUBMODULES = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}


def import_lightning() -> None:
    """Import Lightning, unless it has been imported."""
    if "lightning.pytorch" not in sys.modules:
        _defer_torchmetrics()
        is_enabled = gc.isenabled()
        # Everything that the import allocates survives.
        gc.disable()
        try:
            importlib.import_module("lightning.pytorch")
        finally:
            if is_enabled:
                gc.enable()


def _defer_torchmetrics() -> None:
    """Create a torchmetrics module that runs its `__init__` lazily.

    The first use of a name that Lightning does not need runs it.
    Does nothing if torchmetrics has been imported, is missing, or is not an ordinary folder.
    """
    spec = None if "torchmetrics" in sys.modules else importlib.util.find_spec("torchmetrics")
    if spec is None or type(spec.loader) is not SourceFileLoader:
        return
    package = sys.modules["torchmetrics"] = importlib.util.module_from_spec(spec)
    namespace = vars(package)

    def load_attribute(name: str) -> Any:
        if name in _SUBMODULES:
            # Import this module first: it and the two submodules import each other.
            importlib.import_module("torchmetrics.utilities")
            return getattr(importlib.import_module(f"torchmetrics.{_SUBMODULES[name]}"), name)
        # Debuggers and the warnings module look up other dunder names in every module.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'torchmetrics' has no attribute {name!r}")
        namespace.pop("__getattr__", None)
        importlib.reload(package)
        return getattr(package, name)

    # Submodules import `_logger`.
    namespace.update(__getattr__=load_attribute, _logger=logging.getLogger("torchmetrics"))
