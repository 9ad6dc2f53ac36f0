"""Argument names of older releases: accepted, translated once, and still readable afterwards."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.choices import DebugOption
from hftrainer.arguments.old_fields import ARGUMENTS, OldArguments
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


#: Old name → how it is translated.
RENAMED = {name: about.renamed for name, about in ARGUMENTS.items() if about.renamed is not None}
#: Old arguments without a new name → their values when not given.
KEPT = {name: about.neutral for name, about in ARGUMENTS.items() if about.until and about.neutral is not None}
#: Under install(): the fields here that the installed release has, and the fields of ours that it lacks.
CURRENT: set[str] = set()
HIDDEN: dict[str, Any] = {}
FIELDS = {name: field for name, field in OldArguments.__dataclass_fields__.items() if ARGUMENTS[name].until}


class _Reading(threading.local):
    """The arguments whose old names this thread has read last."""

    def __init__(self) -> None:
        self.last: Callable[[], BaseArguments | None] = lambda: None


_reading = _Reading()


def mirror(name: str) -> property:
    """A property for an old name, which reads and writes the new one."""
    rename = RENAMED[name]

    def get(self: BaseArguments) -> Any:
        _reading.last = weakref.ref(self)
        if name in vars(self):  # a subclass's own field, or a field of the installed release
            return vars(self)[name]
        pending = vars(self).get("_pending_legacy")
        return pending[name] if pending is not None else rename.read(getattr(self, rename.new))

    def set_(self: BaseArguments, value: Any) -> None:
        is_made = vars(self).get("_legacy_done")
        if name in vars(self):
            vars(self)[name] = value
        elif not is_made:  # the generated __init__ is running
            vars(self).setdefault("_pending_legacy", {})[name] = value
        if is_made and (name not in vars(self) or (name in CURRENT and not keeps_ratio(name))):
            setattr(self, rename.new, rename.write(getattr(self, rename.new), value))

    return property(get, set_, doc=f"Old name of `{rename.spelled}`.")


def value(args: Any, name: str) -> Any:
    """An old argument without a new name; its default if the arguments lack it, or it is a subclass's own field."""
    found, default = getattr(args, name, None), KEPT.get(name, False)
    return default if found is None or found == default or name in redeclared(type(args)) else found


def gone(args: Any, before: Any = None) -> list[str]:
    """A sentence for each argument that chooses what has gone, if it differs from that of `before`."""
    found = {name: about.gone for name, about in ARGUMENTS.items() if about.gone is not None}
    return [
        f"{name}={old!r}: {instead}."
        for name, (old, instead) in found.items()
        if value(args, name) == old != value(before, name)
    ]


@dataclass
class Copied:
    """Keywords that are all fields of an existing object, as `dataclasses.replace` passes them.

    An old name then only repeats the value of the new one, unless the old name is what was replaced.

    Attributes:
        source: the object; None if it is not known, for example if the fields were kept and the object deleted.
    """

    source: BaseArguments | None


def copied(given: dict[str, Any]) -> Copied | None:
    """The object that these keywords copy; None if a script wrote them."""
    if not all(given.get(name) is not None for name in KEPT):
        return None
    last = _reading.last()
    # Each object has its own lists and its own accelerator_config.
    shared = (name for name, value in given.items() if isinstance(value, list) or name == "accelerator_config")
    is_source = last is not None and any(given[name] is getattr(last, name, None) for name in shared)
    return Copied(last if is_source else None)


def redeclared(kind: type) -> frozenset[str]:
    """Old names that a subclass declares as fields of its own, as libraries do that support several releases.

    They are arguments of the subclass, with its values and meanings: nothing here reads or changes them.
    """
    if not issubclass(kind, OldArguments):
        return frozenset()
    theirs = kind.__dataclass_fields__
    return frozenset(name for name in FIELDS.keys() - CURRENT if theirs.get(name, FIELDS[name]) is not FIELDS[name])


def translate(args: BaseArguments, defaults: dict[str, Any], copy: Copied | None) -> None:
    """Write the values given by old names to the new ones, with one FutureWarning for all that is old.

    Args:
        args: freshly initialized.
        defaults: the fields' defaults.
        copy: set if `args` is a copy of an object.

    Raises:
        InvalidArgument: if an old and a new name are given with different values.
    """
    pending = vars(args).pop("_pending_legacy", {})
    vars(args)["_legacy_done"] = True
    own = redeclared(type(args))
    # Without a default on the class, the property of the old name has taken the value.
    vars(args).update({name: pending.pop(name) for name in own & pending.keys()})
    pending |= _take_hidden(args, own)
    vars(args).update({name: pending.setdefault(name, vars(args).get(name)) for name in CURRENT & RENAMED.keys()})
    source = None if copy is None else copy.source
    if copy is None:
        given, before = {name: value for name, value in pending.items() if _is_given(name, value)}, defaults
    elif source is None:
        given, before = {}, {}
    else:
        given = {name: value for name, value in pending.items() if value != getattr(source, name, defaults.get(name))}
        before = {RENAMED[name].new: getattr(source, RENAMED[name].new) for name in given}
    for name, value in given.items():
        _translate_one(args, name, value, before)
    for name, default in KEPT.items():
        if getattr(args, name, default) is None and name not in own:
            setattr(args, name, default)
    now = [f"{name} is now {RENAMED[name].spelled}" for name in given if name not in CURRENT]
    if vars(args)["debug"] is True:  # the only option until v4.5
        args.debug = DebugOption.TPU_METRICS_DEBUG.value
        now.append(f"debug=True is now debug={args.debug!r}")
    sentences = [f"Old names of training arguments: {', '.join(now)}"] if now else []
    if copy is None or source is not None:
        sentences += gone(args, source)
    if sentences:
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=5)


def _take_hidden(args: BaseArguments, own: Set[str]) -> dict[str, Any]:
    """The values given by old names that the installed release lacks; values without a new name stay attributes."""
    names = ((HIDDEN.keys() & FIELDS.keys()) - own) & vars(args).keys()
    found = {name: vars(args).pop(name) for name in names} | vars(args).pop("_hidden_given", {})
    fields = type(args).__dataclass_fields__  # those of a subclass from before `install()` have the old names too
    stay = {name for name, value in found.items() if value not in (None, HIDDEN[name].default)} - RENAMED.keys()
    vars(args).update({name: value for name, value in found.items() if name in stay or name in fields})
    return {name: value for name, value in found.items() if name in RENAMED}


def keeps_ratio(name: str) -> bool:
    """Whether an argument is the `warmup_ratio` of v4, which does not change `warmup_steps`."""
    return name == "warmup_ratio" and "no_cuda" in CURRENT


def _is_given(name: str, value: Any) -> bool:
    return RENAMED[name].takes_false if value is False else value not in (None, False, "", [])


def _translate_one(args: BaseArguments, name: str, value: Any, before: dict[str, Any]) -> None:
    rename = RENAMED[name]
    now = getattr(args, rename.new)
    if name == "warmup_ratio":
        if keeps_ratio(name) and 0 <= value <= 1:
            return
        if not 0 <= value < 1:
            raise InvalidArgument(f"warmup_ratio={value!r}: give a fraction of all steps, at least 0 and below 1.")
        if now >= 1 or (now and now != before[rename.new]):  # documented since v4.2: warmup_steps overrides it
            return
    wanted = rename.write(now, value)
    if not rename.merges and now != before[rename.new] and now != wanted:
        first, second = (
            (name, rename.new) if name.endswith("_token") else (f"{name}={value!r}", f"{rename.new}={now!r}")
        )
        raise InvalidArgument(f"{first} and {second}: the first is the old name of the second; give one of them.")
    setattr(args, rename.new, wanted)
