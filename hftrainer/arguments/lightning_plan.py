"""Makes the plan for Lightning from the arguments."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.arguments.lightning_config import FORWARDED
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, native_backend
from hftrainer.parallel.environment import find_plugin
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.processes import Processes

#: Keyword arguments of `DistributedDataParallel` that are arguments with the prefix ddp_.
_DDP = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")


def ddp_keywords(args: BaseArguments) -> dict[str, Any]:
    """The arguments for `DistributedDataParallel` that are set, by the names of its keyword arguments."""
    return {name: value for name in _DDP if (value := getattr(args, f"ddp_{name}", None)) is not None}


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
        device=str(device),
        precision=resolved.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=args.gradient_accumulation_steps,
        deterministic=args.full_determinism,
        default_root_dir=str(args.output_dir),
        processes=Processes.from_ranks(
            resolved.rank_info, tp_size=resolved.layout.tp_size, timeout=args.ddp_timeout_delta
        ),
        process_group_backend=process_group_backend(resolved),
        ddp=MappingProxyType(ddp_keywords(args)),
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
