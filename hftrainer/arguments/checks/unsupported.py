"""Finds arguments that are not supported, or have no effect."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hftrainer.arguments import old_names
from hftrainer.arguments.accelerate import check_launch_variables, find_unknown_variables
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.checks.device import check_backend, check_device, check_fsdp, check_xla
from hftrainer.arguments.fields.argument import Argument, arguments_of
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.arguments.lightning_config import OVERRIDDEN_ARGUMENTS, check_keywords, explain_keyword
from hftrainer.arguments.lightning_plan import ddp_keywords
from hftrainer.arguments.resolved import ResolvedArguments, asks_for_deepspeed
from hftrainer.errors import InvalidConfig, UnknownArgument, suggest
from hftrainer.parallel.devices import visible_device_count
from hftrainer.parallel.environment import can_rerun_script, check_rank_info
from hftrainer.parallel.plan import check_layout
from hftrainer.plugins import import_adapter


def non_neutral_arguments(args: BaseArguments) -> dict[str, tuple[Any, Argument]]:
    """Argument → its value and metadata, for each value that is not neutral. The user's own fields are left out."""
    known = {**ARGUMENTS, **arguments_of(args)}
    ours = known.keys() - old_names.redeclared_old_names(type(args))
    hidden = [field for field in old_names.HIDDEN_FIELDS.values() if field.name in vars(args)]
    fields = {field.name: field for field in (*hidden, *dataclasses.fields(args)) if field.name in ours}
    return {
        name: (value, known[name])
        for name, field in fields.items()
        # Compared first, since most arguments have their default.
        if (value := getattr(args, name)) != field.default
        and not known[name].has_no_effect(value, field.default)
        and not old_names.is_derived(args, name)
    }


def refuse_unknown(method_name: str, function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise `UnknownArgument`, with suggestions, for the keyword arguments in a method's `**unknown`."""
    parameters = list(inspect.signature(function).parameters)[1:-1]
    errors = []
    for name, value in unknown.items():
        of_arguments = suggest(name, BaseArguments.__dataclass_fields__).replace("?", " of TrainingArguments?")
        errors.append(f"{method_name} has no argument {name!r}{explain_keyword(name, value, parameters, of_arguments)}")
    if errors:
        raise UnknownArgument("; ".join(errors))


def check_supported(resolved: ResolvedArguments, *, has_custom_optimizer: bool = False) -> list[str]:
    """Error messages for arguments that this release does not support.

    Args:
        resolved: the training arguments, with the model if it exists, since its loading is checked too.
        has_custom_optimizer: whether the script passes its own optimizer.
    """
    args = resolved.args
    errors = [
        f"{name}={value!r} is not supported: {argument.detail}."
        for name, (value, argument) in non_neutral_arguments(args).items()
        if argument.refuses(value)
    ]
    errors += check_launch_variables(resolved.device)
    try:
        errors += check_keywords(resolved.lightning_config)
        errors += check_fsdp(resolved, has_custom_optimizer)
        if asks_for_deepspeed(args):
            errors += import_adapter("deepspeed", "settings").check_deepspeed(resolved)
        errors += check_layout(resolved.layout, resolved.fsdp, resolved.rank_info.world_size)
        errors += [*check_device(resolved), *check_backend(resolved)]
    except InvalidConfig as error:
        errors.append(str(error))
    return errors + check_launch(resolved)


def check_launch(resolved: ResolvedArguments) -> list[str]:
    """Error messages for launched processes that cannot train."""
    gpus = visible_device_count(resolved.device)
    return [*check_rank_info(resolved.rank_info, resolved.config_or_empty, gpus), *check_xla(resolved)]


def find_unused_settings(resolved: ResolvedArguments) -> list[str]:
    """Warnings for settings without effect: overridden by `lightning_config` or an argument, or unused."""
    args, config, warnings = resolved.args, resolved.lightning_config, [*_launcher_warnings(resolved)]
    if resolved.deepspeed is not None:
        warnings += resolved.deepspeed.notes
    if "tpu_metrics_debug" in (args.debug or ()) and resolved.device.type != "xla":
        warnings.append(
            f"debug='tpu_metrics_debug' prints nothing: training is on {resolved.device}, which is not an XLA device."
        )
    if args.fsdp_config and not args.fsdp and not old_names.is_derived(args, "fsdp_config"):
        warnings.append("fsdp_config has no effect without fsdp=True.")
    if args.fsdp and (ddp_names := [f"ddp_{name}" for name in ddp_keywords(args)]):
        warnings.append(f"{' and '.join(ddp_names)} have no effect with fsdp, which does not use DDP.")
    return [*warnings, *_misspelt_attributes(args)] + [
        f"lightning_config[{name!r}]={config[name]!r} overrides {argument}={getattr(args, argument)!r}."
        for name, arguments in OVERRIDDEN_ARGUMENTS.items()
        for argument in arguments
        if name in config and getattr(args, argument)
    ]


def _launcher_warnings(resolved: ResolvedArguments) -> Iterator[str]:
    """Warnings for the launcher's variables without effect, and for GPUs without a process."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    # transformers decides the same.
    if steps.isdecimal() and int(steps) != resolved.args.gradient_accumulation_steps:
        yield (
            f"gradient_accumulation_steps={resolved.args.gradient_accumulation_steps} overrides the launcher's "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}."
        )
    if names := find_unknown_variables():
        yield f"{' and '.join(names)} will have no effect: no known release of accelerate reads it."
    gpus = 1 if "devices" in resolved.lightning_config else visible_device_count(resolved.device) or 1
    if gpus > resolved.rank_info.world_size == 1 and not can_rerun_script():
        yield f"Only one of {gpus} GPUs is used: run a script or use a launcher to start one process per GPU."


def _misspelt_attributes(args: BaseArguments) -> Iterator[str]:
    """A warning for each attribute with nearly the name of an argument."""
    # A subclass may have similar names of its own.
    attributes = vars(args) if type(args).__module__.startswith("hftrainer.") else {}
    for name in sorted(attributes.keys() - args.__dataclass_fields__.keys() - old_names.HIDDEN_FIELDS.keys()):
        match = difflib.get_close_matches(name, args.__dataclass_fields__, 1, 0.9)
        if match and name[0] != "_" and match[0] not in name:
            yield f"args.{name} is no argument, and has no effect; did you mean args.{match[0]}?"
