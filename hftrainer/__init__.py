"""The Hugging Face `Trainer` API, v4.0 to v5.x, with PyTorch Lightning as its engine."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from hftrainer.base.messages import follow_transformers_logging as _follow_transformers_logging

#: Public name → the module that defines it, read from `__init__.pyi`. A name is imported at first use, so that
#: `import hftrainer` is cheap.
_EXPORTS = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom) and statement.module is not None
    for alias in statement.names
}
__all__ = sorted(_EXPORTS)

_follow_transformers_logging()


def __getattr__(name: str) -> Any:
    if name.startswith(("Auto", "DataCollator")) and name not in _EXPORTS:
        where = f"models, tokenizers and collators come from transformers. Write: from transformers import {name}"
        raise ImportError(f"hftrainer has no {name}: {where}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
