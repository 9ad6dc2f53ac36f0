"""Checks of the arguments against FSDP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hftrainer.parallel import tpu
from hftrainer.parallel.fsdp.settings import FsdpSettings

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

#: Optimizers whose states torch cannot shard, or that need whole weights: parts of their names.
_NEED_WHOLE = ("bnb", "paged", "lion", "ademamix", "rmsprop_", "galore", "apollo", "lomo", "grokadamw")
#: Optimizers that work with FSDP2 but not with FSDP1, which flattens parameters.
_NEED_SHAPES = ("adafactor", "adamw_hf", "stable_adamw")


def check_fsdp(
    args: BaseArguments, settings: FsdpSettings, config: Mapping[str, Any], *, launched: bool, own_optimizer: bool
) -> Iterator[str]:
    """A sentence for each setting that FSDP does not support.

    Args:
        args: the arguments.
        settings: how the model is sharded.
        config: `lightning_config`.
        launched: whether a launcher has started the processes.
        own_optimizer: whether the script has made the optimizer.
    """
    asked = f"fsdp={args.fsdp!r}" if args.fsdp else "ACCELERATE_USE_FSDP=true"
    if args.deepspeed:
        yield "fsdp and deepspeed both shard the model: give one of them."
    on_xla = args.device.type == "xla"
    if settings.xla is not None:
        yield from _check_xla(args, settings)
    elif on_xla:
        yield f"{asked} on a TPU uses torch_xla: give fsdp_config={{'xla': True}} too."
    elif args.world_size == 1 and not launched:
        yield (
            f"{asked} shards the model over processes, but there is one: start the script with torchrun, accelerate "
            "launch or python -m hftrainer run --nproc N, or give lightning_config={'devices': N}."
        )
    elif "hybrid" in settings.strategy and args.world_size == 1:
        yield f"fsdp={settings.strategy!r} needs at least two processes, but there is one: use 'full_shard'."
    if settings.activation_checkpointing and args.activation_checkpointing:
        yield (
            "fsdp_config['activation_checkpointing'] and activation_checkpointing=True would compute activations a "
            "third time: give only the first."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            yield f"{name}=True would round sharded weights: use {name[:4]}=True, or leave out fsdp."
    yield from _check_optimizers(args, settings, own_optimizer)
    yield from _check_saving(args, settings, config)


def _check_xla(args: BaseArguments, settings: FsdpSettings) -> Iterator[str]:
    assert settings.xla is not None
    if args.device.type != "xla":
        missing = "torch_xla is missing: " + tpu.INSTALL if not tpu.has_torch_xla() else "training is on another device"
        yield f"fsdp_config['xla'] needs a TPU, but {missing}."
    if settings.xla.spmd and args.world_size > 1:
        yield (
            f"fsdp_config['xla_fsdp_v2'] drives all cores from one process, but there are {args.world_size}: start the "
            "script with plain python."
        )
    if not settings.xla.spmd and getattr(args, "predict_with_generate", False):
        yield "predict_with_generate bypasses the wrapper that gathers weights: set fsdp_config['xla_fsdp_v2'] too."
    asked = {
        "activation_checkpointing": settings.activation_checkpointing,
        "cpu_offload": settings.cpu_offload,
        "state_dict_type": settings.state_dict_type != "FULL_STATE_DICT",
        "reshard_after_forward": settings.strategy not in ("full_shard", "shard_grad_op"),
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
    }
    for name in (name for name, given in asked.items() if given):
        instead = "set 'xla_fsdp_grad_ckpt' instead" if name == "activation_checkpointing" else "leave it out"
        yield f"fsdp_config[{name!r}] is a key of torch's FSDP, but with 'xla' torch_xla shards: {instead}."


def _check_optimizers(args: BaseArguments, settings: FsdpSettings, own_optimizer: bool) -> Iterator[str]:
    name = str(getattr(args.optim, "value", args.optim))
    if settings.xla is not None and settings.xla.spmd:
        return  # parameters keep their shapes
    own = name.startswith("adamw_torch")
    if not own and (any(part in name for part in _NEED_WHOLE) or name == "adamw_8bit"):
        yield f"optim={name!r} needs whole parameters, but fsdp shards them: use 'adamw_torch' or its 8bit form."
    elif settings.version == 1 and name in _NEED_SHAPES:
        yield f"optim={name!r} needs the shapes of the parameters, but FSDP1 flattens them: use FSDP2."
    if own_optimizer:
        yield (
            "optimizers holds the parameters of the whole model, which fsdp replaces: pass optimizer_cls_and_kwargs, "
            "or override create_optimizer."
        )


def _check_saving(args: BaseArguments, settings: FsdpSettings, config: Mapping[str, Any]) -> Iterator[str]:
    if settings.state_dict_type != "FULL_STATE_DICT" and config.get("async_checkpoint"):
        yield (
            "lightning_config['async_checkpoint']=True writes from one process, but fsdp_config['state_dict_type']="
            "'SHARDED_STATE_DICT' writes from all: leave one of them out."
        )
    logged = os.environ.get("WANDB_LOG_MODEL", "false").lower()
    if "wandb" in (args.report_to or ()) and logged not in ("", "false"):
        yield (
            f"WANDB_LOG_MODEL={logged} saves the model in the main process alone, but fsdp gathers it from all: unset "
            "it, and log the files of save_model()."
        )
