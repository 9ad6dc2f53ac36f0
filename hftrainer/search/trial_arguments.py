"""The training arguments of a trial."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from hftrainer.arguments.validation import ALIASES, normalize
from hftrainer.compat.functions import number_of_arguments
from hftrainer.errors import InvalidArgument, UnknownArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

#: How near a name must be to an argument's to be taken for a slip, where it could also be meant for `model_init`.
_A_SLIP = 0.85
#: Read once, when the Trainer is made.
_FIXED = ("report_to", "disable_tqdm", "log_level", "log_level_replica", "skip_memory_metrics")


def model_takes_trial(model_init: Callable[..., Any] | None) -> bool:
    """Whether `model_init` takes the trial, so that names that are no arguments may be its own."""
    return model_init is not None and number_of_arguments(model_init) > 0


def check_names(args: Any, params: Any, *, for_model_too: bool) -> None:
    """Refuse what a trial cannot choose.

    Args:
        args: the arguments.
        params: argument → value.
        for_model_too: see `model_takes_trial`.

    Raises:
        InvalidArgument: when `params` is no mapping, or a trial cannot change an argument.
        UnknownArgument: for a name that is no argument, with the nearest one.
    """
    if not isinstance(params, Mapping):
        raise InvalidArgument(f"hp_space returned {params!r}: it must return a dict of training arguments.")
    fields = _fields(args)
    unknown = [name for name in params if name not in fields]
    cutoff = _A_SLIP if for_model_too else 0.6
    near = {name: difflib.get_close_matches(str(name), fields, n=1, cutoff=cutoff) for name in unknown}
    if wrong := [name for name in unknown if near[name] or not for_model_too]:
        raise UnknownArgument("; ".join(_unknown(args, name, near[name]) for name in wrong))
    if unknown:
        logger.info("%s: no training arguments, left to model_init.", ", ".join(unknown))
    if fixed := [name for name in _FIXED if name in params]:
        raise InvalidArgument(f"hp_space: {', '.join(fixed)}: read once, when the Trainer is made; set it there.")


def set_arguments(args: Any, params: Any, *, for_model_too: bool) -> None:
    """Give arguments the values of a trial, in place, in the form that the constructor would give them.

    Args:
        args: the arguments, which callbacks and trackers hold too.
        params: argument → value; cast to the type of the value that is there.
        for_model_too: see `model_takes_trial`.

    Raises:
        InvalidArgument: also when a value cannot be cast.
        UnknownArgument: see `check_names`.
    """
    check_names(args, params, for_model_too=for_model_too)
    fields = _fields(args)
    for name in params.keys() & fields.keys():
        value = _cast(name, params[name], getattr(args, name), str(fields[name].type))
        setattr(args, name, value)
        if name in ALIASES:
            setattr(args, ALIASES[name], value)
    if isinstance(args, TrainingArguments):
        normalize(args)


def _fields(args: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(args) if field.init}


def _unknown(args: Any, name: str, near: list[str]) -> str:
    hint = f"; did you mean {near[0]!r}?" if near else "; what the model takes, suggest in model_init(trial)"
    return f"hp_space: {type(args).__name__} has no argument {name!r}{hint}"


def _truth(name: str, value: Any) -> bool:
    """The value as True or False: bool("False") would be True."""
    truths = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if (text := str(value).lower()) not in truths:
        raise InvalidArgument(f"hp_space: {name}={value!r} cannot be made a bool: give True or False.")
    return truths[text]


def _cast(name: str, value: Any, before: Any, annotation: str) -> Any:
    """The value in the type of the one before, as transformers casts it, unless that would cut something off."""
    if before is None or value is None or isinstance(value, Mapping):
        return value
    if type(before) is bool:
        return _truth(name, value)
    if type(before) is int and isinstance(value, float) and "float" in annotation:  # warmup_steps=0.1 is a share
        return value
    try:
        return type(before)(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"hp_space: {name}={value!r} cannot be made a {type(before).__name__}: {error}") from None
