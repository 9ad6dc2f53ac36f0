"""Checks the hyperparameters of a trial, and sets them in the training arguments."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from hftrainer.arguments.checks.validation import ALIASES, normalize
from hftrainer.base.config_files import parse_bool
from hftrainer.base.signatures import number_of_arguments
from hftrainer.errors import InvalidArgument, UnknownArgument, suggest
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

#: Minimum similarity to an argument's name that counts as a typo, even if `model_init` accepts the trial.
_TYPO_SIMILARITY = 0.85
#: Arguments that are only read when the Trainer is created.
_CONSTRUCTOR_ONLY = ("report_to", "disable_tqdm", "log_level", "log_level_replica", "skip_memory_metrics")


def model_takes_trial(model_init: Callable[..., Any] | None) -> bool:
    """Whether `model_init` accepts the trial, and can use values that are not training arguments."""
    return model_init is not None and number_of_arguments(model_init) > 0


def check_names(args: Any, params: Any, *, allow_model_arguments: bool) -> None:
    """Check that a trial can set these arguments.

    Args:
        args: the training arguments.
        params: argument → value.
        allow_model_arguments: whether `params` may contain values for `model_init`; see `model_takes_trial`.

    Raises:
        InvalidArgument: if `params` is not a mapping, or a trial cannot set one of the arguments.
        UnknownArgument: if a name is not an argument. The error contains the most similar name.
    """
    if not isinstance(params, Mapping):
        raise InvalidArgument(f"hp_space returned {params!r}: it must return a dict of training arguments.")
    fields = _fields(args)
    unknown_names = [name for name in params if name not in fields]
    cutoff = _TYPO_SIMILARITY if allow_model_arguments else 0.6
    suggestions = {name: difflib.get_close_matches(str(name), fields, n=1, cutoff=cutoff) for name in unknown_names}
    if typos := [name for name in unknown_names if suggestions[name] or not allow_model_arguments]:
        raise UnknownArgument("; ".join(_describe_unknown_name(args, name, suggestions[name]) for name in typos))
    if unknown_names:
        logger.info("Not training arguments, so only model_init can use them: %s", ", ".join(unknown_names))
    if fixed_names := [name for name in _CONSTRUCTOR_ONLY if name in params]:
        raise InvalidArgument(f"hp_space: {', '.join(fixed_names)}: used when the Trainer is created, so set it there.")


def set_arguments(args: Any, params: Any, *, allow_model_arguments: bool) -> None:
    """Set training arguments to a trial's values, in place, normalized as in the constructor.

    Args:
        args: the training arguments. Callbacks and trackers have references to them.
        params: argument → value. Values are cast to the types of the current values.
        allow_model_arguments: see `check_names`.

    Raises:
        InvalidArgument: as in `check_names`, or if a value cannot be cast.
        UnknownArgument: see `check_names`.
    """
    check_names(args, params, allow_model_arguments=allow_model_arguments)
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


def _describe_unknown_name(args: Any, name: str, suggestions: list[str]) -> str:
    otherwise = suggest(name, _fields(args), "; suggest hyperparameters of the model in model_init(trial)")
    hint = f"; did you mean {suggestions[0]!r}?" if suggestions else otherwise
    return f"hp_space: {type(args).__name__} has no argument {name!r}{hint}"


def _cast(name: str, value: Any, current: Any, annotation: str) -> Any:
    """Cast a value to the current value's type, as in transformers, but keep floats if allowed."""
    if current is None or value is None or isinstance(value, Mapping):
        return value
    if type(current) is bool:
        # bool("False") would be True.
        if (flag := parse_bool(str(value).removesuffix(".0"))) is None:
            raise InvalidArgument(f"hp_space: {name}={value!r} is not a bool: use True or False.")
        return flag
    # warmup_steps=0.1 is a ratio.
    if type(current) is int and isinstance(value, float) and "float" in annotation:
        return value
    try:
        return type(current)(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"hp_space: {name}={value!r} is not of type {type(current).__name__}: {error}") from None
