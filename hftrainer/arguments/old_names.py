"""Arguments of other releases: old names are translated once, and stay readable.

Under `install()`, arguments have the fields of the installed release, and the values that it sets.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import os
import socket
import time
import warnings
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.choices import DebugOption
from hftrainer.arguments.fields.argument import OURS
from hftrainer.arguments.fields.old import OldArguments
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.errors import InvalidArgument
from hftrainer.releases import followed
from hftrainer.releases.policy import Release

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

#: Old name → how it is translated.
RENAMED = {name: argument.rename for name, argument in ARGUMENTS.items() if argument.rename is not None}
#: Old arguments without a new name → their values when not set.
KEPT = {
    name: argument.neutral_value
    for name, argument in ARGUMENTS.items()
    if argument.until and argument.neutral_value is not None
}
#: Under install(): the old fields that the installed release still has, and our fields that it lacks.
CURRENT_FIELDS: set[str] = set()
HIDDEN_FIELDS: dict[str, Any] = {}
FIELDS = {name: field for name, field in OldArguments.__dataclass_fields__.items() if ARGUMENTS[name].until}


def old_argument(args: Any, name: str) -> Any:
    """The value of an old argument without a new name.

    If the argument is missing, or a subclass redeclares it, this is its default.
    """
    attribute, default = getattr(args, name, None), KEPT.get(name, False)
    return (
        default if attribute is None or attribute == default or name in redeclared_old_names(type(args)) else attribute
    )


def describe_removed_features(args: Any) -> list[str]:
    """A sentence for each argument whose value selects a removed feature."""
    features = {name: argument.removed_feature for name, argument in ARGUMENTS.items() if argument.removed_feature}
    return [f"{name}={old!r}: {how}." for name, (old, how) in features.items() if old_argument(args, name) == old]


def redeclared_old_names(args_class: type) -> frozenset[str]:
    """Old names that a subclass declares as its own fields, for example to support several releases.

    They belong to the subclass, with its values and meanings: we neither read nor change them.
    """
    if not issubclass(args_class, OldArguments):
        return frozenset()
    fields = args_class.__dataclass_fields__
    old_names = FIELDS.keys() - CURRENT_FIELDS
    return frozenset(name for name in old_names if fields.get(name, FIELDS[name]) is not FIELDS[name])


def set_current(args: BaseArguments, name: str, value: Any) -> None:
    """Set the current argument to a value that was set by its old name."""
    if name not in redeclared_old_names(type(args)) and not is_v4_warmup_ratio(name):
        rename = RENAMED[name]
        setattr(args, rename.new, rename.write(getattr(args, rename.new), value))


def translate(args: BaseArguments, defaults: dict[str, Any]) -> None:
    """Copy values that are set by old names to the new names, with one FutureWarning.

    An old name keeps its value, and does not follow the new one. `dataclasses.replace` passes both; if they differ, the
    old one takes effect, as in the releases that had it.

    Args:
        args: the arguments, just initialized.
        defaults: the fields' defaults.

    Raises:
        InvalidArgument: if an old and a new name are set to different values.
    """
    vars(args)["_legacy_done"] = True
    redeclared_names = redeclared_old_names(type(args))
    old_values = _pop_hidden(args, redeclared_names) | {
        name: vars(args)[name] for name in (RENAMED.keys() - redeclared_names) & vars(args).keys()
    }
    # Only copies of existing arguments already have values for these.
    is_copy = all(getattr(args, name, None) is not None for name in KEPT)
    set_values = {name: value for name in RENAMED if _is_set(name, value := old_values.get(name))}
    translated_names = []
    for name, value in set_values.items():
        rename, current_value = RENAMED[name], getattr(args, RENAMED[name].new)
        if is_copy and (rename.read(current_value) == value or rename.write(current_value, value) == current_value):
            continue
        _translate_one(args, name, value, current_value if is_copy else defaults[rename.new])
        translated_names.append(name)
    for name, default in KEPT.items():
        if getattr(args, name, default) is None and name not in redeclared_names:
            setattr(args, name, default)
    # Without its value, a number of steps does not look like a ratio.
    shown = {"warmup_ratio": f"={set_values.get('warmup_ratio')}"}
    descriptions = [
        f"{name}{shown.get(name, '')} is now {RENAMED[name].spelling}{shown.get(name, '')}"
        for name in translated_names
        if name not in CURRENT_FIELDS
    ]
    # Until v4.5, True selected the only option.
    if vars(args)["debug"] is True:
        args.debug = DebugOption.TPU_METRICS_DEBUG.value
        descriptions.append(f"debug=True is now debug={args.debug!r}")
    sentences = [f"Old names of training arguments: {', '.join(descriptions)}"] if descriptions else []
    if not is_copy:
        sentences += describe_removed_features(args)
    if sentences:
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=5)


def _pop_hidden(args: BaseArguments, redeclared_names: Set[str]) -> dict[str, Any]:
    """The values of old names that the installed release lacks. Values without a new name stay attributes."""
    names = ((HIDDEN_FIELDS.keys() & FIELDS.keys()) - redeclared_names) & vars(args).keys()
    values = {name: vars(args).pop(name) for name in names} | vars(args).pop("_hidden_values", {})
    # A subclass that was defined before `install()` still has the old names.
    fields = type(args).__dataclass_fields__
    for name, value in values.items():
        is_attribute = name not in RENAMED and value not in (None, HIDDEN_FIELDS[name].default)
        if is_attribute or name in fields:
            vars(args)[name] = value
    return {name: value for name, value in values.items() if name in RENAMED}


def is_v4_warmup_ratio(name: str) -> bool:
    """Whether an argument is the `warmup_ratio` of v4, which does not change `warmup_steps`."""
    return name == "warmup_ratio" and "no_cuda" in CURRENT_FIELDS


def _is_set(name: str, value: Any) -> bool:
    # In v5.0 to v5.2, even 0.0 replaces `warmup_steps`.
    if name == "warmup_ratio" in CURRENT_FIELDS and not is_v4_warmup_ratio(name):
        return value is not None
    return RENAMED[name].accepts_false if value is False else value not in (None, False, "", [])


def _translate_one(args: BaseArguments, name: str, value: Any, previous_value: Any) -> None:
    rename = RENAMED[name]
    current_value = getattr(args, rename.new)
    if name == "warmup_ratio":
        if is_v4_warmup_ratio(name) and 0 <= value <= 1:
            return
        if not 0 <= value < 1:
            raise InvalidArgument(f"warmup_ratio={value!r}: use a fraction of all steps, at least 0 and below 1.")
        # Documented since v4.2: warmup_steps overrides it. v5.0 to v5.2 do the reverse.
        if name not in CURRENT_FIELDS and (current_value >= 1 or (current_value and current_value != previous_value)):
            return
    new_value = rename.write(current_value, value)
    if not rename.is_merged and name != "warmup_ratio" and current_value not in (previous_value, new_value):
        first, second = (
            (name, rename.new) if name.endswith("_token") else (f"{name}={value!r}", f"{rename.new}={current_value!r}")
        )
        raise InvalidArgument(f"{first} and {second}: the first is the old name of the second: set only one.")
    setattr(args, rename.new, new_value)


# ---- The fields and values of the installed release ------------------------------------------------------------------

#: The default of `fsdp_config` until v5.9.
_FSDP_CONFIG = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
#: Undoes what `follow_fields` has changed.
_undo = contextlib.ExitStack()


def follow_fields(ours: Any, seq2seq_class: Any) -> None:
    """Limit the fields of our classes to those of the installed release and our own.

    Without transformers, nothing changes. Hidden fields are still accepted as keyword arguments, and on the command
    line.

    Args:
        ours: our `TrainingArguments`.
        seq2seq_class: our `Seq2SeqTrainingArguments`.
    """
    if not (installed_fields := _installed_fields()):
        return
    our_fields = ours.__dataclass_fields__
    _undo.callback(CURRENT_FIELDS.clear)
    _undo.callback(HIDDEN_FIELDS.clear)
    CURRENT_FIELDS.update(FIELDS.keys() & installed_fields)
    HIDDEN_FIELDS.update(
        {
            name: field
            for name, field in our_fields.items()
            if name not in installed_fields and ARGUMENTS[name].since != OURS
        }
    )
    removed_names = FIELDS.keys() & HIDDEN_FIELDS.keys()
    for base in seq2seq_class.__mro__:
        if (fields := vars(base).get("__dataclass_fields__")) is not None:
            # `clear` is called before `update`, so that the original order is restored.
            _undo.callback(fields.update, dict(fields))
            _undo.callback(fields.clear)
            for name in HIDDEN_FIELDS.keys() & fields.keys():
                del fields[name]
        for name in removed_names & vars(base).keys():
            _undo.callback(setattr, base, name, vars(base)[name])
            delattr(base, name)
    for initialize in (ours.__init__, seq2seq_class.__init__):
        # Scripts inspect the signature.
        signature = inspect.signature(initialize)
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in HIDDEN_FIELDS]
        initialize.__signature__ = signature.replace(parameters=parameters)
        _undo.callback(delattr, initialize, "__signature__")


def earlier_defaults() -> dict[str, Any]:
    """Argument → its default in the followed release, where it differs from ours."""
    release = followed.from_config({}).release
    defaults = {}
    for name, argument in ARGUMENTS.items():
        for last_release, default in (argument.past_defaults or {}).items():
            if release <= Release.from_text(last_release):
                defaults[name] = default
                break
    return defaults


def restore_fields() -> None:
    """Undo `follow_fields`."""
    _undo.close()


def _installed_fields() -> set[str]:
    """The fields of the `TrainingArguments` of transformers, read from its source, since an import takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return set()
    source = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
    class_nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in class_nodes if node.name == "TrainingArguments")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def set_release_values(args: BaseArguments) -> None:
    """Set the attributes and argument values that only the installed, older release sets."""
    if not HIDDEN_FIELDS:
        return
    if followed.is_before("5.10"):
        args.fsdp_config = dict(_FSDP_CONFIG) if args.fsdp_config is None else args.fsdp_config
        args.fsdp = args.fsdp or []  # type: ignore[assignment]
    if followed.is_before("5.0"):
        args.local_rank = args.local_process_index
        vars(args)["framework"] = "pt"
        folder_name = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        args.logging_dir = old_argument(args, "logging_dir") or os.path.join(str(args.output_dir), "runs", folder_name)
    if followed.is_before("4.57"):
        args.lr_scheduler_kwargs = args.lr_scheduler_kwargs or {}
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = False
    if followed.is_before("4.54") and args.run_name is None:
        args.run_name = str(args.output_dir)


def is_derived(args: Any, name: str) -> bool:
    """Whether an argument still has the value that other arguments, or `set_release_values`, gave it."""
    return vars(args).get("_derived", {}).get(name) == repr(getattr(args, name))
