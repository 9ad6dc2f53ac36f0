"""Under `install()`, arguments have the fields of the installed release, and the values that it gives them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import legacy
from hftrainer.arguments.field import OURS
from hftrainer.arguments.old_fields import ARGUMENTS
from hftrainer.releases import followed
from hftrainer.releases.followed import is_before
from hftrainer.releases.policy import Release

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

#: The default of `fsdp_config` until v5.9.
_FSDP_CONFIG = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
#: Tables of fields, and attributes of classes, as they were.
_tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
_attributes: list[tuple[type, str, Any]] = []
#: Functions whose signature was changed.
_shown: list[Any] = []


def follow_fields(ours: Any, for_generation: Any) -> None:
    """Leave our classes the fields of the installed release, and our own; nothing changes if there is none.

    What is hidden is still accepted as a keyword, and on the command line.

    Args:
        ours: our `TrainingArguments`.
        for_generation: our `Seq2SeqTrainingArguments`.
    """
    if not (wanted := _installed_fields()):
        return
    known = ours.__dataclass_fields__
    legacy.CURRENT.update(legacy.FIELDS.keys() & wanted)
    legacy.HIDDEN.update(
        {name: field for name, field in known.items() if name not in wanted and ARGUMENTS[name].since != OURS}
    )
    without_value = legacy.FIELDS.keys() & legacy.HIDDEN.keys()
    for kind in for_generation.__mro__:
        if (fields := vars(kind).get("__dataclass_fields__")) is not None:
            _tables.append((fields, dict(fields)))
            for name in legacy.HIDDEN.keys() & fields.keys():
                del fields[name]
        for name in without_value & vars(kind).keys():
            _attributes.append((kind, name, vars(kind)[name]))
            delattr(kind, name)
    for kind in (ours, for_generation):
        _show_parameters(kind.__init__)


def earlier_defaults() -> dict[str, Any]:
    """Argument → its default in the release that is followed, where that is another than ours."""
    release, found = followed.from_config({}).release, {}
    for name, about in ARGUMENTS.items():
        for until, default in (about.earlier or {}).items():
            if release <= Release.from_text(until):
                found[name] = default
                break
    return found


def forget_fields() -> None:
    """Undo `follow_fields`."""
    legacy.CURRENT.clear()
    legacy.HIDDEN.clear()
    for fields, before in _tables:
        fields.clear()
        fields.update(before)
    for kind, name, value in _attributes:
        setattr(kind, name, value)
    for initialize in _shown:
        del initialize.__signature__
    _shown.clear()
    _tables.clear()
    _attributes.clear()


def _installed_fields() -> set[str]:
    """The fields of the `TrainingArguments` of transformers, read from its source: an import takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return set()
    source = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
    kinds = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in kinds if node.name == "TrainingArguments")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def _show_parameters(initialize: Any) -> None:
    """Show in a signature, which scripts read, the parameters that are fields."""
    signature = inspect.signature(initialize)
    _shown.append(initialize)
    shown = [each for name, each in signature.parameters.items() if name not in legacy.HIDDEN]
    initialize.__signature__ = signature.replace(parameters=shown)


def set_values(args: BaseArguments) -> None:
    """Set what the installed release has in arguments that were just made, and ours do not need."""
    if not legacy.HIDDEN:
        return
    given = dict(vars(args))
    if is_before("5.10"):
        args.fsdp_config = dict(_FSDP_CONFIG) if args.fsdp_config is None else args.fsdp_config
        args.fsdp = args.fsdp or []  # type: ignore[assignment]
    if is_before("5.0"):
        args.local_rank = args.local_process_index
        vars(args)["framework"] = "pt"
        now = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        args.logging_dir = legacy.value(args, "logging_dir") or os.path.join(str(args.output_dir), "runs", now)
    if is_before("4.57"):
        args.lr_scheduler_kwargs = args.lr_scheduler_kwargs or {}
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = False
    if is_before("4.54") and args.run_name is None:
        args.run_name = str(args.output_dir)
    changed = {name: value for name, value in vars(args).items() if name in given and value is not given[name]}
    vars(args)["_set_by_release"] = changed


def is_set_by_release(args: Any, name: str) -> bool:
    """Whether an argument still has the value that `set_values` has given it."""
    values = vars(args).get("_set_by_release", {})
    return name in values and getattr(args, name) == values[name]
