"""Declares a field of `TrainingArguments`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any


def arg(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    choices: Iterable[str] | None = None,
    bare: Any = None,
) -> Any:
    """A dataclass field with its help text where `HfArgumentParser` reads it.

    Args:
        default: the newest documented default.
        help: what the field does, with its unit.
        factory: makes the default, for mutable defaults.
        choices: the allowed values, for the command line.
        bare: the value of the flag on the command line when no value follows it.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    if bare is not None:
        metadata |= {"nargs": "?", "const": bare}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
