"""Completes `TrainingArguments` of older releases of transformers with the fields that they lack."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.legacy import FIELDS, HIDDEN, RENAMED, gone
from hftrainer.arguments.validation import ALIASES, choose_start_method

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


def complete(args: BaseArguments, known: type[BaseArguments]) -> None:
    """Set the fields that `args` lack, in place: from their older names, or else our defaults.

    Their own fields and the result of their `to_dict` do not change.

    Args:
        args: the training arguments; instances of `known` lack nothing.
        known: our class, with all fields.
    """
    if isinstance(args, known):
        return
    for field in {**known.__dataclass_fields__, **HIDDEN}.values():
        if field.name not in FIELDS and not hasattr(args, field.name):
            setattr(args, field.name, _value(args, field))
    choose_start_method(args)
    if sentences := gone(args):
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=3)


def _value(args: BaseArguments, field: dataclasses.Field[Any]) -> Any:
    """The value of a field that `args` lack."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for old, new in ALIASES.items():
        if new == field.name and hasattr(args, old):
            return getattr(args, old)
    for old, rename in RENAMED.items():
        if rename.new == field.name and hasattr(args, old):
            return rename.write(default, getattr(args, old))
    return default
