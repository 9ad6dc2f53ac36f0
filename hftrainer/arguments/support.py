"""Which arguments are supported, and the plan made from them."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hftrainer.arguments import legacy
from hftrainer.arguments.accelerate import check_launch_variables, find_unknown_variables
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.device_checks import check_backend, check_device, check_fsdp, check_xla
from hftrainer.arguments.field import Argument, arguments_of
from hftrainer.arguments.old_fields import ARGUMENTS
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.validation import check_ranges
from hftrainer.errors import SYNONYMS, InvalidArgument, InvalidConfig, UnknownArgument, suggest
from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, native_backend, visible_device_count
from hftrainer.parallel.environment import (
    LAUNCHERS,
    can_rerun_script,
    check_launcher_config,
    check_rank_info,
    find_plugin,
)
from hftrainer.parallel.plan import LightningPlan, check_layout
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import load
from hftrainer.releases.policy import ReleasePolicy

logger = logging.getLogger(__name__)

#: Keyword arguments of `DistributedDataParallel` that are arguments with the prefix ddp_.
_DDP = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")


def non_neutral_arguments(args: BaseArguments) -> dict[str, tuple[Any, Argument]]:
    """Argument → its value and metadata, for each value that is not neutral. The user's own fields are left out."""
    known = {**ARGUMENTS, **arguments_of(args)}
    ours = known.keys() - legacy.redeclared_old_names(type(args))
    hidden = [field for field in legacy.HIDDEN_FIELDS.values() if field.name in vars(args)]
    fields = {field.name: field for field in (*hidden, *dataclasses.fields(args)) if field.name in ours}
    return {
        name: (value, known[name])
        for name, field in fields.items()
        # Compared first, since most arguments have their default.
        if (value := getattr(args, name)) != field.default
        and not known[name].has_no_effect(value, field.default)
        and not legacy.is_derived(args, name)
    }


def refuse_unknown(method_name: str, function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise `UnknownArgument`, with suggestions, for the keyword arguments in a method's `**unknown`."""
    parameters, errors = list(inspect.signature(function).parameters)[1:-1], []
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
        if resolved.deepspeed is not None:
            errors += load("deepspeed", "settings").check_deepspeed(args, resolved.deepspeed, resolved.lightning_config)
        errors += check_layout(resolved.layout, resolved.fsdp, resolved.rank_info.world_size)
        errors += [*check_device(resolved), *check_backend(resolved)]
    except InvalidConfig as error:
        errors.append(str(error))
    return errors + check_launch(resolved)


def check_launch(resolved: ResolvedArguments) -> list[str]:
    """Error messages for launched processes that cannot train."""
    gpus = visible_device_count(resolved.device)
    return [*check_rank_info(resolved.rank_info, resolved.config_or_empty, gpus), *check_xla(resolved)]


def process_group_backend(resolved: ResolvedArguments) -> str | None:
    """The backend of the process group. With offloading, gradients are clipped on the CPU, which also needs gloo."""
    kind = resolved.device.type
    offloads = resolved.sharding is not None and resolved.sharding.cpu_offload and kind == "cuda"
    default_backend = (
        "cpu:gloo,cuda:nccl" if offloads else native_backend(kind) if kind in UNSUPPORTED_BY_LIGHTNING else None
    )
    return default_backend if resolved.args.ddp_backend is None else resolved.args.ddp_backend


def make_plan(resolved: ResolvedArguments) -> LightningPlan:
    """The plan for these arguments and the model, which may already be split."""
    args, device, config = resolved.args, resolved.device, resolved.lightning_config
    return LightningPlan(
        accelerator=device.type,
        device=str(device),
        precision=resolved.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=args.gradient_accumulation_steps,
        deterministic=args.full_determinism,
        default_root_dir=str(args.output_dir),
        processes=Processes.from_ranks(
            resolved.rank_info, tp_size=resolved.layout.tp_size, timeout=args.ddp_timeout_delta
        ),
        process_group_backend=process_group_backend(resolved),
        timeout=args.ddp_timeout,
        ddp=MappingProxyType(
            {name: value for name in _DDP if (value := getattr(args, f"ddp_{name}", None)) is not None}
        ),
        sharding=resolved.sharding,
        layout=resolved.layout,
        deepspeed=resolved.deepspeed,
        async_checkpoint=config.get("async_checkpoint", False)
        or find_plugin(config.get("plugins"), "AsyncCheckpointIO") is not None,
        stop_on_save_error=config.get("on_save_error") == "stop",
        read_once=MappingProxyType(
            {name: copy.copy(getattr(args, name, None)) for name, argument in ARGUMENTS.items() if argument.read_once}
        ),
        trainer_overrides=MappingProxyType({name: value for name, value in config.items() if name in FORWARDED}),
    )


def find_unused_settings(resolved: ResolvedArguments) -> list[str]:
    """Warnings for settings without effect: overridden by `lightning_config` or an argument, or unused."""
    args, config, warnings = resolved.args, resolved.lightning_config, [*_launcher_warnings(resolved)]
    if resolved.deepspeed is not None:
        warnings += resolved.deepspeed.notes
    if "tpu_metrics_debug" in (args.debug or ()) and resolved.device.type != "xla":
        warnings.append(
            f"debug='tpu_metrics_debug' prints nothing: training is on {resolved.device}, which is not an XLA device."
        )
    if args.fsdp_config and not args.fsdp and not legacy.is_derived(args, "fsdp_config"):
        warnings.append("fsdp_config has no effect without fsdp=True.")
    if args.fsdp and (ddp_names := [f"ddp_{name}" for name in _DDP if getattr(args, f"ddp_{name}", None) is not None]):
        warnings.append(f"{' and '.join(ddp_names)} have no effect with fsdp, which does not use DDP.")
    return [*warnings, *_misspelt_attributes(args)] + [
        f"lightning_config[{name!r}]={config[name]!r} overrides {argument}={getattr(args, argument)!r}."
        for name, arguments in _OVERRIDDEN_ARGUMENTS.items()
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
    for name in sorted(attributes.keys() - args.__dataclass_fields__.keys() - legacy.HIDDEN_FIELDS.keys()):
        match = difflib.get_close_matches(name, args.__dataclass_fields__, 1, 0.9)
        if match and name[0] != "_" and match[0] not in name:
            yield f"args.{name} is no argument, and has no effect; did you mean args.{match[0]}?"


# ---- lightning_config -----------------------------------------------------------------------------------------------

#: Keyword arguments that are forwarded to `lightning.Trainer` unchanged.
FORWARDED = frozenset(
    """
    benchmark detect_anomaly deterministic default_root_dir enable_autolog_hparams limit_predict_batches
    limit_test_batches limit_val_batches max_time model_registry plugins profiler
    """.split()
)
#: Keyword arguments that the Trainer's own arguments set → what to use instead.
RESERVED = {
    "accelerator": "use_cpu=True for the CPU; other devices are found",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "callbacks": "Trainer(callbacks=[...])",
    "check_val_every_n_epoch": "eval_strategy and eval_steps",
    "enable_checkpointing": "save_strategy",
    "enable_model_summary": "a ModelSummary in Trainer(callbacks=[...])",
    "enable_progress_bar": "disable_tqdm",
    "fast_dev_run": "max_steps",
    "gradient_clip_algorithm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "limit_train_batches": "max_steps",
    "log_every_n_steps": "logging_steps",
    "logger": "report_to or Trainer(loggers=[...])",
    "max_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "min_epochs": "num_train_epochs",
    "min_steps": "max_steps",
    "num_sanity_val_steps": "eval_on_start",
    "overfit_batches": "a smaller train_dataset",
    "reload_dataloaders_every_n_epochs": "an override of get_train_dataloader",
    "use_distributed_sampler": "_get_train_sampler",
    "val_check_interval": "eval_strategy and eval_steps",
}
#: Other keyword arguments → their allowed values. The last three are hftrainer's, the others Lightning's.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "barebones": (False, None),
    "inference_mode": (True, False),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true", "32", 32),
    "strategy": ("auto", "ddp"),
    "sync_batchnorm": (False,),
    "async_checkpoint": (False, True),
    "environment": tuple(LAUNCHERS),
    "on_save_error": ("continue", "stop"),
}
_PROFILERS = ("simple", "advanced", "pytorch", "xla")
#: Keyword arguments that are checked elsewhere: the number of processes, and the release that is followed.
RELEASE_KEYWORDS = ("devices", "num_nodes", "behaviour")
#: Keyword arguments → the arguments that they override.
_OVERRIDDEN_ARGUMENTS = {"precision": ("bf16", "fp16"), "deterministic": ("full_determinism",)}


def explain_keyword(name: str, value: Any, known_names: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about an unknown argument: how to pass one of `lightning.Trainer`, or as `suggest`."""
    if name in (*FORWARDED, *ALLOWED, *RELEASE_KEYWORDS):
        if problems := check_keywords({name: value}):
            return f": it is a key of lightning_config; there, {problems[0]}"
        return f": pass TrainingArguments(..., lightning_config={{{name!r}: {value!r}}})"
    is_reserved = name in RESERVED and name not in SYNONYMS and name not in BaseArguments.__dataclass_fields__
    return f": use {RESERVED[name]}" if is_reserved else suggest(name, known_names, otherwise)


def check_keywords(config: Mapping[str, Any]) -> list[str]:
    """Error messages for keyword arguments that are unknown or not supported."""
    errors = list(check_launcher_config(config))
    for name, value in config.items():
        allowed = _PROFILERS if name == "profiler" and isinstance(value, str) else ALLOWED.get(name, (value,))
        if name in RESERVED:
            errors.append(f"lightning_config[{name!r}] is reserved for the Trainer: use {RESERVED[name]}.")
        elif value not in allowed:
            choices = " or ".join(map(repr, allowed))
            more = " For sharding, set the argument fsdp or deepspeed." if name == "strategy" else ""
            errors.append(f"lightning_config[{name!r}]={value!r} is not supported: it must be {choices}.{more}")
        elif name not in FORWARDED and name not in ALLOWED and name not in RELEASE_KEYWORDS:
            hint = suggest(name, [*FORWARDED, *RESERVED, *ALLOWED, *RELEASE_KEYWORDS], ".")
            errors.append(f"lightning_config[{name!r}]: lightning.Trainer has no such argument{hint}")
    return errors


# ---- Changes after the Trainer is made ------------------------------------------------------------------------------

#: Changing these raises an error, since most of the Trainer was built from them.
_NEED_NEW_TRAINER = ("lightning_config", "deepspeed")


def apply_changed_arguments(
    engine: Any, args: BaseArguments, policy: ReleasePolicy, *, has_custom_loader: bool
) -> None:
    """Apply changed arguments to the next run, where transformers would apply them.

    Most arguments are read when they are needed. Those that the engine stores are passed to it. Those that are read
    once, when the Trainer is made, keep their first value, and a warning names them.

    Args:
        engine: the engine of the Trainer, with the plan that was made from the arguments.
        args: the arguments with their current values.
        policy: the policy of the followed release of transformers.
        has_custom_loader: whether the script makes the training loader, and so may read the batch size again.

    Raises:
        InvalidArgument: for a change that needs another engine, and for numbers out of range.
    """
    if errors := list(check_ranges(args)):
        raise InvalidArgument("\n".join(errors))
    reread_names = () if policy.reads_batch_size_once and not has_custom_loader else ("per_device_train_batch_size",)
    first_values = {name: value for name, value in engine.plan.read_once.items() if name not in reread_names}
    current_values = {name: getattr(args, name, None) for name in first_values}
    changed_first_values = {
        name: value
        for name, value in first_values.items()
        if value is not current_values[name] and value != current_values[name]
    }
    if refused_changes := _refused_changes(engine, args, changed_first_values):
        raise InvalidArgument(
            f"{', '.join(refused_changes)} changed after the Trainer was made, which depends on it: make a new Trainer."
        )
    if changed_first_values and changed_first_values != engine.ignored_changes:
        logger.warning(
            "Changed after the Trainer was made, which reads such arguments once, as in transformers: %s. The first "
            "value stays in use; make a new Trainer to use the second.",
            ", ".join(
                f"{name} ({_plain_value(value)!r} → {_plain_value(current_values[name])!r})"
                for name, value in changed_first_values.items()
            ),
        )
    engine.ignored_changes = changed_first_values
    engine.update_plan(accumulate_grad_batches=args.gradient_accumulation_steps, default_root_dir=str(args.output_dir))


def _refused_changes(engine: Any, args: BaseArguments, changed_values: dict[str, Any]) -> list[str]:
    plan, strategy = engine.plan, engine.strategy
    refused_changes = [name for name in _NEED_NEW_TRAINER if name in changed_values]
    if str(args.device) != plan.device:
        refused_changes.append(f"use_cpu={args.use_cpu} (the device, {plan.device} → {args.device})")
    previous_steps, current_steps = plan.accumulate_grad_batches, args.gradient_accumulation_steps
    if strategy.has_fixed_accumulation and current_steps != previous_steps:
        refused_changes.append(
            f"gradient_accumulation_steps ({previous_steps} → {current_steps}), which {strategy.argument} has read,"
        )
    return refused_changes


def _plain_value(value: Any) -> Any:
    return getattr(value, "value", value)
