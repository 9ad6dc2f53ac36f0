"""`arg`, which declares an argument with its metadata, and `Rename`, which translates an old name."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import InvalidArgument

#: The `since` of arguments that no release of transformers has.
OURS = "hftrainer"
#: The headings of switches for scripts, of these, and of arguments that the newest release no longer has.
SCRIPT_SUBJECT = "For your script"
OWN_SUBJECT, EARLIER_SUBJECT = "Only in hftrainer", "Removed in newer releases"
LAST_SUBJECTS = SCRIPT_SUBJECT, OWN_SUBJECT, EARLIER_SUBJECT


@dataclass(frozen=True)
class Argument:
    """The metadata of an argument.

    Attributes:
        default: the newest documented default; `list` for a new list in each object.
        help: its help text, with its unit.
        since: the first release of transformers that had it, among those listed in `fields`.
        kind: 'mapped' (to a Lightning setting), 'handled' (by hftrainer), 'inert' (accepted without effect), 'refused'
            (only its neutral value is accepted).
        detail: the setting, the reason, or what to use instead; empty if `help` is complete.
        until: the last release that had it; None for an argument of the newest one.
        rename: how it is translated to the current argument.
        choices: its allowed values: a list, or an enumeration to which they are converted.
        minimum: the smallest allowed number.
        upper_bound: allowed numbers are smaller than this.
        json: whether it accepts a JSON object as text.
        read_once: whether it is read when the Trainer is made, so that later changes have no effect.
        neutral_value: the value that the default None stands for.
        accepted_values: the values that are not refused; all if empty.
        removed_feature: a value whose feature no longer exists, and what happens instead.
        past_defaults: the last release with an older default → that default, oldest first.
        subject: its heading in the help; own and removed arguments have one heading each.
    """

    default: Any
    help: str
    since: str
    kind: str
    detail: str
    until: str | None = None
    rename: Rename | None = None
    choices: Iterable[str] | type[enum.Enum] | None = None
    minimum: float | None = None
    upper_bound: float | None = None
    json: bool = False
    read_once: bool = False
    neutral_value: Any = None
    accepted_values: tuple[str, ...] = ()
    removed_feature: tuple[Any, str] | None = None
    past_defaults: Mapping[str, Any] | None = None
    subject: str = ""

    def has_no_effect(self, value: Any, default: Any) -> bool:
        """Whether a value changes nothing: the default, empty, or what None stands for.

        Args:
            value: the value.
            default: the default of the class; a subclass may have a different one.
        """
        if self.neutral_value is not None or value == default:
            return value in (None, self.neutral_value, default)
        # transformers' class, like ours, fills in the defaults.
        if type(value).__name__ == "AcceleratorConfig":
            return bool(value == type(value)())
        return value in (None, "no", "none") or (not value and not isinstance(value, (bool, int, float)))

    def refuses(self, value: Any) -> bool:
        """Whether a value that is not neutral is refused."""
        return self.kind == "refused" or bool(self.accepted_values and value not in (None, *self.accepted_values))

    @property
    def past_defaults_text(self) -> str:
        """The past defaults as text, or an empty string."""
        return ", ".join(f"{default!r} until v{release}" for release, default in (self.past_defaults or {}).items())


_subject = ""


def begin_subject(title: str) -> None:
    """Set the subject of the arguments that are declared next."""
    global _subject
    _subject = title


#: Field → its `Argument`. It is not in the field's metadata, since transformers' parser passes that to argparse.
_arguments: dict[dataclasses.Field[Any], Argument] = {}


class _StoreListOrConst(argparse.Action):
    """Stores the values of a flag as a list, or `const` if no value follows.

    Argparse supports `const` for one value only.
    """

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values or self.const)


def arg(
    default: Any,
    help: str,
    since: str,
    kind: str = "handled",
    *,
    const: Any = None,
    accepts_several: bool = False,
    **attributes: Any,
) -> Any:
    """A dataclass field with its help text where `HfArgumentParser` reads it.

    Args:
        default: as in `Argument`, like `help` and `since`.
        help: as in `Argument`; the releases are appended to it.
        since: as in `Argument`.
        kind: as in `Argument`; a colon and the detail may follow it.
        const: the value of the flag on the command line when no value follows it.
        accepts_several: whether several values may follow it.
        attributes: further attributes of `Argument`.
    """
    kind, _, detail = kind.partition(": ")
    subject = EARLIER_SUBJECT if attributes.get("until") else OWN_SUBJECT if since == OURS else _subject
    # Mapped arguments are part of the plan, which is made once.
    settings = {"read_once": kind == "mapped", "subject": subject, **attributes}
    argument = Argument(default, help, since, kind, detail, **settings)
    if argument.until is not None:
        help = f"{help.removesuffix('.')} (v{since}-v{argument.until})."
    # Only v4.0 is older than v4.1.
    elif since not in (OURS, "4.1") or argument.past_defaults:
        past_defaults = f"; default {argument.past_defaults_text}" if argument.past_defaults else ""
        help = f"{help} Since v{since}{past_defaults}."
    metadata: dict[str, Any] = {"help": help}
    if argument.choices is not None and not isinstance(argument.choices, type):
        metadata["choices"] = list(argument.choices)
    if const is not None:
        metadata |= {"nargs": "*", "action": _StoreListOrConst} if accepts_several else {"nargs": "?"}
        metadata["const"] = const
    default_settings: Any = {"default_factory": list} if default is list else {"default": default}
    field: Any = dataclasses.field(**default_settings, metadata=metadata)
    _arguments[field] = argument
    return field


def old_name(default: Any, rename: Rename, since: str, until: str, help: str = "", **attributes: Any) -> Any:
    """A dataclass field for an argument that a release has renamed."""
    is_same = rename.spelling == rename.new
    text = f"Old name of `{rename.new}`." if is_same else f"Now `{rename.spelling}`."
    detail = f"old name of {rename.new}" if is_same else rename.spelling
    return arg(default, help or text, since, f"handled: {detail}", until=until, rename=rename, **attributes)


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
        spelling: the current spelling, as a warning shows it.
        write: `(new value, old value) → new value`.
        read: `new value → old value`, for reading the old name.
        is_merged: whether the old value is added to the new one, instead of replacing it.
        accepts_false: whether False counts as a value; otherwise it means "not set".
    """

    new: str
    spelling: str
    write: Callable[[Any, Any], Any]
    read: Callable[[Any], Any]
    is_merged: bool = False
    accepts_false: bool = False


def to_name(new: str) -> Rename:
    """A rename that changes only the name, not the value."""
    return Rename(new, new, lambda current, old_value: old_value, lambda current: current)


def to_value(new: str, value: str, otherwise: str | None = None) -> Rename:
    """Renames a boolean to a value of the new argument. Without `otherwise`, False has no effect."""

    def write(current: Any, old_value: Any) -> Any:
        if old_value:
            return value
        return otherwise if otherwise is not None and current == value else current

    return Rename(new, f"{new}={value!r}", write, lambda current: current == value)


def to_item(new: str, value: str) -> Rename:
    """Renames a boolean to an item of the new argument's list."""

    def write(current: Any, old_value: Any) -> Any:
        others = [word for word in split_words(current) if word != value]
        return [*others, value] if old_value else others

    return Rename(new, f"{new}=[{value!r}]", write, lambda current: value in (current or ()), is_merged=True)


def to_key(new: str, key: str, *, accepts_false: bool = False) -> Rename:
    """Renames an argument to a key of the new one."""

    def write(current: Any, old_value: Any) -> Any:
        if isinstance(current, str):
            raise InvalidArgument(f"{new} is the path of a file: set {key!r} in the file.")
        if hasattr(current, "to_dict"):
            current = current.to_dict()
        keys = {**(current or {}), key: old_value}
        return {name: value for name, value in keys.items() if value is not None}

    def read(current: Any) -> Any:
        return current.get(key) if isinstance(current, dict) else getattr(current, key, None)

    return Rename(new, f"{new}[{key!r}]", write, read, is_merged=True, accepts_false=accepts_false)


def split_words(value: Any) -> list[Any]:
    """The words of a text; the items of a list."""
    return value.split() if isinstance(value, str) else list(value or [])
