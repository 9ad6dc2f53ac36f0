"""Which arguments are supported, and the plan made from them."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import legacy
from hftrainer.arguments.checks import check_device, check_fsdp, check_xla
from hftrainer.arguments.field import Argument, arguments_of
from hftrainer.arguments.installed import is_set_by_release
from hftrainer.arguments.launched import check_launched, unknown_variables
from hftrainer.arguments.lightning_config import (
    ALSO_SET_BY,
    brings_async_checkpoints,
    check_keywords,
    passed_on,
)
from hftrainer.arguments.old_fields import ARGUMENTS
from hftrainer.errors import WrongConfig
from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, native_backend, visible_device_count
from hftrainer.parallel.environment import can_start_again, check_rank_info
from hftrainer.parallel.plan import LightningPlan, check_layout
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import load

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.arguments.resolved import ResolvedArguments


#: Keywords of `DistributedDataParallel` that are arguments with the prefix ddp_.
_DDP = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")


def given_arguments(args: BaseArguments) -> Iterator[tuple[str, Argument]]:
    """Each argument whose value is not neutral, and what is known about it; without the user's own fields."""
    known = {**ARGUMENTS, **arguments_of(args)}
    own = legacy.redeclared(type(args))
    hidden = {name: field for name, field in legacy.HIDDEN.items() if name in vars(args)}
    for field in {**hidden, **{field.name: field for field in dataclasses.fields(args)}}.values():
        name = field.name
        if name not in known or name in own:
            continue
        value, neutral = getattr(args, name), known[name].neutral
        # Most arguments are left at their default.
        if value is field.default or is_set_by_release(args, name):
            continue
        if value not in (None, neutral) if neutral is not None else not _is_neutral(value, field.default):
            yield name, known[name]


def is_refused(about: Argument, value: Any) -> bool:
    """Whether a value that is not neutral is refused."""
    return about.kind == "refused" or bool(about.accepted and value not in (None, *about.accepted))


def check_supported(resolved: ResolvedArguments, *, own_optimizer: bool = False) -> list[str]:
    """A sentence for each argument that this release does not support.

    Args:
        resolved: the training arguments, with the model if it exists: the way it was loaded is checked too.
        own_optimizer: whether the script has made the optimizer.
    """
    args = resolved.args
    given = ((name, getattr(args, name), about) for name, about in given_arguments(args))
    found = [
        f"{name}={value!r} is not supported: {about.detail}."
        for name, value, about in given
        if is_refused(about, value)
    ]
    found += check_launched(resolved.device)
    try:
        found += check_keywords(resolved.lightning_config)
        found += _check_sharding(resolved, own_optimizer)
        if resolved.deepspeed is not None:
            found += load("deepspeed", "settings").check_deepspeed(args, resolved.deepspeed, resolved.lightning_config)
        found += check_layout(resolved.layout, resolved.fsdp, args.world_size)
        spreads = resolved.sharding is not None or resolved.layout.tp_size > 1
        found += check_device(args, resolved.precision_without_deepspeed, resolved.rank_info.world_size, spreads)
    except WrongConfig as error:
        found.append(str(error))
    return found + check_launch(resolved)


def check_launch(resolved: ResolvedArguments) -> list[str]:
    """A sentence for each reason why the processes that the launcher has started cannot train."""
    args, rank_info = resolved.args, resolved.rank_info
    of_xla = check_xla(args, rank_info, legacy.value(args, "tpu_num_cores") or None)
    return [*check_rank_info(rank_info, resolved.readable_config, visible_device_count(resolved.device)), *of_xla]


def _check_sharding(resolved: ResolvedArguments, own_optimizer: bool) -> list[str]:
    args, settings, config = resolved.args, resolved.fsdp, resolved.lightning_config
    if settings is None or resolved.device.type in ("mps", *UNSUPPORTED_BY_LIGHTNING):  # `check_device` reports these
        return []
    launched = resolved.rank_info.launcher != "lightning"
    return list(check_fsdp(args, settings, config, launched=launched, own_optimizer=own_optimizer))


def _is_neutral(value: Any, default: Any) -> bool:
    """Whether `value` is the default or empty. `transformers` fills in accelerate's defaults."""
    if type(value).__name__ == "AcceleratorConfig":
        return value == type(value)()
    nothing = value is None or (not value and not isinstance(value, (bool, int, float)))
    return nothing or value == default or value in ("no", "none")


def process_group_backend(resolved: ResolvedArguments) -> str | None:
    """The backend of the process group; with offloading, gradients are clipped in CPU memory, which needs gloo too."""
    kind = resolved.device.type
    offloads = resolved.sharding is not None and resolved.sharding.cpu_offload and kind == "cuda"
    own = "cpu:gloo,cuda:nccl" if offloads else native_backend(kind) if kind in UNSUPPORTED_BY_LIGHTNING else None
    return own if resolved.args.ddp_backend is None else resolved.args.ddp_backend


def make_plan(resolved: ResolvedArguments) -> LightningPlan:
    """The plan for these arguments and the model, which may have been split while it was loaded."""
    args, device, config = resolved.args, resolved.device, resolved.lightning_config
    return LightningPlan(
        accelerator=device.type,
        device=str(device),
        precision=resolved.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=args.gradient_accumulation_steps,
        deterministic=args.full_determinism,
        default_root_dir=str(args.output_dir),
        processes=Processes.at(resolved.rank_info, resolved.layout.tp_size),
        process_group_backend=process_group_backend(resolved),
        timeout=args.ddp_timeout,
        ddp=MappingProxyType(
            {name: value for name in _DDP if (value := getattr(args, f"ddp_{name}", None)) is not None}
        ),
        sharding=resolved.sharding,
        layout=resolved.layout,
        deepspeed=resolved.deepspeed,
        async_checkpoint=config.get("async_checkpoint", False) or brings_async_checkpoints(config.get("plugins")),
        stop_on_save_error=config.get("on_save_error") == "stop",
        read_once=MappingProxyType(
            {name: copy.copy(getattr(args, name, None)) for name, about in ARGUMENTS.items() if about.read_once}
        ),
        config=MappingProxyType(passed_on(config)),
    )


def overridden(resolved: ResolvedArguments) -> list[str]:
    """A sentence for each setting without effect: overridden by `lightning_config` or an argument, or unused."""
    args, config, found = resolved.args, resolved.lightning_config, []
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps.isdecimal() and int(steps) != args.gradient_accumulation_steps:  # as transformers decides
        found.append(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} overrides the launcher's "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}."
        )
    if unknown := unknown_variables():
        found.append(f"{' and '.join(unknown)}: no release of accelerate that is known here reads that; no effect.")
    gpus = 1 if "devices" in config else visible_device_count(resolved.device) or 1
    if gpus > resolved.rank_info.world_size == 1 and not can_start_again():
        found.append(
            f"Only one of {gpus} GPUs is used: the others need processes, which a script or a launcher can start."
        )
    if resolved.deepspeed is not None:
        found += resolved.deepspeed.notes
    if "tpu_metrics_debug" in (args.debug or ()) and resolved.device.type != "xla":
        found.append(
            f"debug='tpu_metrics_debug' prints nothing: training is on {resolved.device}, which is not an XLA device."
        )
    if args.fsdp_config and not args.fsdp and not is_set_by_release(args, "fsdp_config"):
        found.append("fsdp_config has no effect without fsdp=True.")
    if args.fsdp and (given := [f"ddp_{name}" for name in _DDP if getattr(args, f"ddp_{name}", None) is not None]):
        found.append(f"{' and '.join(given)} have no effect with fsdp: there are no replicas.")
    return found + [
        f"lightning_config[{name!r}]={config[name]!r} overrides {argument}={getattr(args, argument)!r}."
        for name, arguments in ALSO_SET_BY.items()
        for argument in arguments
        if name in config and getattr(args, argument)
    ]
