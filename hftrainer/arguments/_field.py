"""How a field of `TrainingArguments` is written down."""

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
    """A dataclass field whose help text is kept where `HfArgumentParser` looks for it.

    Args:
        default: the newest documented default.
        help: what the field does, with its unit.
        factory: builds the default, for mutable ones.
        choices: the values that are allowed, for the command line.
        bare: what the flag alone means on the command line, without a value.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    if bare is not None:
        metadata |= {"nargs": "?", "const": bare}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
