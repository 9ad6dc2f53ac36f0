"""`arg`, which declares an argument with its metadata, and `Rename`, which translates an old name."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import InvalidArgument

#: The release of arguments that no release of transformers has.
OURS = "hftrainer"


@dataclass(frozen=True)
class Argument:
    """The metadata of an argument.

    Attributes:
        default: the newest documented default; `list` for a new list in each object.
        help: its help text, with its unit.
        since: the first release of transformers that had it, among those listed in `fields`.
        kind: 'mapped' (to a Lightning setting), 'handled' (by hftrainer), 'inert' (accepted without effect), 'refused'
            (only its neutral value is accepted).
        detail: the setting, the reason, or what to use instead; empty if `help` says it all.
        until: the last release that had it; None for an argument of the newest one.
        renamed: how it is translated to the current argument.
        choices: its allowed values: a list, or an enumeration to which they are converted.
        minimum: the smallest allowed number.
        below: allowed numbers are smaller than this.
        json: whether it accepts a JSON object as text.
        read_once: whether it is read when the Trainer is made, so that later changes have no effect.
        neutral: the value that the default None stands for.
        accepted: the values that are not refused; all if empty.
        gone: a value whose feature no longer exists, and what happens instead.
        earlier: the last release with an older default → that default, oldest first.
    """

    default: Any
    help: str
    since: str
    kind: str
    detail: str
    until: str | None = None
    renamed: Rename | None = None
    choices: Iterable[str] | type[enum.Enum] | None = None
    minimum: float | None = None
    below: float | None = None
    json: bool = False
    read_once: bool = False
    neutral: Any = None
    accepted: tuple[str, ...] = ()
    gone: tuple[Any, str] | None = None
    earlier: Mapping[str, Any] | None = None

    def is_neutral(self, value: Any, default: Any) -> bool:
        """Whether a value changes nothing: it is the default, empty, or the value that None stands for.

        Args:
            value: the value.
            default: the default of the class; a subclass may have a different one.
        """
        if self.neutral is not None or value == default:
            return value in (None, self.neutral, default)
        if type(value).__name__ == "AcceleratorConfig":  # ours or transformers', which fills in the defaults
            return bool(value == type(value)())
        return value in (None, "no", "none") or (not value and not isinstance(value, (bool, int, float)))

    def refuses(self, value: Any) -> bool:
        """Whether a value that is not neutral is refused."""
        return self.kind == "refused" or bool(self.accepted and value not in (None, *self.accepted))

    @property
    def earlier_defaults(self) -> str:
        """The earlier defaults as text; empty if there are none."""
        return ", ".join(f"{default!r} until v{release}" for release, default in (self.earlier or {}).items())


#: Field → its `Argument`. It is not in the field's metadata, since transformers' parser passes that to argparse.
_arguments: dict[dataclasses.Field[Any], Argument] = {}


class _StoreListOrConst(argparse.Action):
    """Stores the values of a flag as a list, or `const` if none follows.

    Argparse supports `const` for one value only.
    """

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values or self.const)


def arg(
    default: Any, help: str, since: str, kind: str = "handled", *, bare: Any = None, several: bool = False, **more: Any
) -> Any:
    """A dataclass field with its help text where `HfArgumentParser` reads it.

    Args:
        default: as in `Argument`, like `help` and `since`.
        help: as in `Argument`; the releases are appended to it.
        since: as in `Argument`.
        kind: as in `Argument`; a colon and the detail may follow it.
        bare: the value of the flag on the command line when no value follows it.
        several: whether several values may follow it.
        more: further attributes of `Argument`.
    """
    kind, _, detail = kind.partition(": ")
    # Mapped arguments are part of the plan, which is made once.
    argument = Argument(default, help, since, kind, detail, **{"read_once": kind == "mapped", **more})
    if argument.until is not None:
        help = f"{help.removesuffix('.')} (v{since}-v{argument.until})."
    elif since != OURS:
        default_before = f"; default {argument.earlier_defaults}" if argument.earlier else ""
        help = f"{help} Since v{since}{default_before}."
    metadata: dict[str, Any] = {"help": help}
    if argument.choices is not None and not isinstance(argument.choices, type):
        metadata["choices"] = list(argument.choices)
    if bare is not None:
        metadata |= {"nargs": "*", "action": _StoreListOrConst} if several else {"nargs": "?"}
        metadata["const"] = bare
    made: Any = {"default_factory": list} if default is list else {"default": default}
    field: Any = dataclasses.field(**made, metadata=metadata)
    _arguments[field] = argument
    return field


def old_name(default: Any, renamed: Rename, since: str, until: str, help: str = "", **more: Any) -> Any:
    """A dataclass field for an argument that a release has renamed."""
    is_same = renamed.spelled == renamed.new
    text = f"Old name of `{renamed.new}`." if is_same else f"Now `{renamed.spelled}`."
    detail = f"old name of {renamed.new}" if is_same else renamed.spelled
    return arg(default, help or text, since, f"handled: {detail}", until=until, renamed=renamed, **more)


def arguments_of(kind: Any) -> dict[str, Argument]:
    """Name → its `Argument`, for the fields of a dataclass that `arg` has declared."""
    return {field.name: _arguments[field] for field in dataclasses.fields(kind) if field in _arguments}


def changed_arguments(args: Any, names: Iterable[str]) -> dict[str, Any]:
    """Name → value, for the given arguments whose value is not the default of their class."""
    fields = type(args).__dataclass_fields__
    return {name: value for name in names if (value := getattr(args, name)) != fields[name].default}


# ---- Old names -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rename:
    """How an old argument is translated to the current one.

    Attributes:
        new: the current argument.
        spelled: the current spelling, as a warning shows it.
        write: `(new value, old value) → new value`.
        read: `new value → old value`, for reading the old name.
        merges: whether the old value is added to the new one, instead of replacing it.
        takes_false: whether False counts as a given value; otherwise it means "not given".
    """

    new: str
    spelled: str
    write: Callable[[Any, Any], Any]
    read: Callable[[Any], Any]
    merges: bool = False
    takes_false: bool = False


def same(new: str) -> Rename:
    """A rename that changes the name alone, not the value."""
    return Rename(new, new, lambda now, old: old, lambda now: now)


def to_value(new: str, value: str, otherwise: str | None = None) -> Rename:
    """Renames a boolean to a value of the new argument. Without `otherwise`, False has no effect."""

    def write(now: Any, old: Any) -> Any:
        if old:
            return value
        return otherwise if otherwise is not None and now == value else now

    return Rename(new, f"{new}={value!r}", write, lambda now: now == value)


def to_item(new: str, value: str) -> Rename:
    """Renames a boolean to an item of the new argument's list."""

    def write(now: Any, old: Any) -> Any:
        others = [word for word in split_words(now) if word != value]
        return [*others, value] if old else others

    return Rename(new, f"{new}=[{value!r}]", write, lambda now: value in (now or ()), merges=True)


def to_key(new: str, key: str, *, takes_false: bool = False) -> Rename:
    """Renames an argument to a key of the new one."""

    def write(now: Any, old: Any) -> Any:
        if isinstance(now, str):
            raise InvalidArgument(f"{new} is the path of a file: set {key!r} there.")
        keys = {**(now.to_dict() if hasattr(now, "to_dict") else now or {}), key: old}
        return {name: value for name, value in keys.items() if value is not None}

    def read(now: Any) -> Any:
        return now.get(key) if isinstance(now, dict) else getattr(now, key, None)

    return Rename(new, f"{new}[{key!r}]", write, read, merges=True, takes_false=takes_false)


def split_words(value: Any) -> list[Any]:
    """The words of a text; the items of a list."""
    return value.split() if isinstance(value, str) else list(value or [])
