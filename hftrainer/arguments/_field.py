"""Declares a field of `TrainingArguments`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any


class _Words(argparse.Action):
    """Stores the words after a flag as a list, or `const` if there is none; argparse does so for one word only."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values or self.const)


def arg(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    choices: Iterable[str] | None = None,
    bare: Any = None,
    several: bool = False,
) -> Any:
    """A dataclass field with its help text where `HfArgumentParser` reads it.

    Args:
        default: the newest documented default.
        help: what the field does, with its unit.
        factory: makes the default, for mutable defaults.
        choices: the allowed values, for the command line.
        bare: the value of the flag on the command line when no value follows it.
        several: whether several values may follow it.
    """
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    if bare is not None:
        metadata |= {"nargs": "*", "const": bare, "action": _Words} if several else {"nargs": "?", "const": bare}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
