"""What cannot be had with a sharded model: a sentence for each, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hftrainer.parallel.fsdp.settings import FsdpSettings
from hftrainer.parallel.xla import devices as xla

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

#: Optimizers whose states torch cannot share out, or which step with whole weights: parts of their names.
_NEED_WHOLE = ("bnb", "paged", "lion", "ademamix", "rmsprop_", "galore", "apollo", "lomo", "grokadamw")
#: Those that FSDP2 can have and FSDP1 cannot, since it flattens parameters.
_NEED_SHAPES = ("adafactor", "adamw_hf", "stable_adamw")


def check_fsdp(
    args: BaseArguments, settings: FsdpSettings, config: Mapping[str, Any], *, launched: bool, own_optimizer: bool
) -> Iterator[str]:
    """A sentence for each way in which the model cannot be sharded as it is asked for.

    Args:
        args: the arguments.
        settings: how the model is to be sharded.
        config: `lightning_config`.
        launched: whether something has started the processes.
        own_optimizer: whether the script has made the optimizer.
    """
    asked = f"fsdp={args.fsdp!r}" if args.fsdp else "ACCELERATE_USE_FSDP=true"
    if args.deepspeed:
        yield "fsdp and deepspeed both shard the model: give one of them."
    on_xla = args.device.type == "xla"
    if settings.xla is not None:
        yield from _of_xla(args, settings)
    elif on_xla:
        yield f"{asked} on a TPU is torch_xla's: give fsdp_config={{'xla': True}} too."
    elif args.world_size == 1 and not launched:
        yield (
            f"{asked} shards the model over processes, and there is one: start the script with torchrun, accelerate "
            "launch or python -m hftrainer run --nproc N, or give lightning_config={'devices': N}."
        )
    elif "hybrid" in settings.strategy and args.world_size == 1:
        yield f"fsdp={settings.strategy!r} needs at least two processes, and there is one: use 'full_shard'."
    if settings.activation_checkpointing and args.activation_checkpointing:
        yield (
            "fsdp_config['activation_checkpointing'] and activation_checkpointing=True would compute activations a "
            "third time: give the first alone."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            yield f"{name}=True would round weights that are shared out: use {name[:4]}=True, or leave out fsdp."
    yield from _of_optimizers(args, settings, own_optimizer)
    yield from _of_saving(args, settings, config)


def _of_xla(args: BaseArguments, settings: FsdpSettings) -> Iterator[str]:
    assert settings.xla is not None
    if args.device.type != "xla":
        missing = "torch_xla is missing: " + xla.INSTALL if not xla.installed() else "training is on another device"
        yield f"fsdp_config['xla'] needs a TPU, and {missing}."
    if settings.xla.spmd and args.world_size > 1:
        yield (
            f"fsdp_config['xla_fsdp_v2'] drives all cores from one process, and there are {args.world_size}: start the "
            "script with plain python."
        )
    if not settings.xla.spmd and getattr(args, "predict_with_generate", False):
        yield "predict_with_generate calls the model past what gathers its weights: set fsdp_config['xla_fsdp_v2'] too."
    asked = {
        "activation_checkpointing": settings.activation_checkpointing,
        "cpu_offload": settings.cpu_offload,
        "state_dict_type": settings.state_dict_type != "FULL_STATE_DICT",
        "reshard_after_forward": settings.strategy not in ("full_shard", "shard_grad_op"),
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
    }
    for name in (name for name, given in asked.items() if given):
        instead = "set 'xla_fsdp_grad_ckpt' instead" if name == "activation_checkpointing" else "leave it out"
        yield f"fsdp_config[{name!r}] is of torch's FSDP, and with 'xla' torch_xla shards: {instead}."


def _of_optimizers(args: BaseArguments, settings: FsdpSettings, own_optimizer: bool) -> Iterator[str]:
    name = str(getattr(args.optim, "value", args.optim))
    if settings.xla is not None and settings.xla.spmd:
        return  # parameters stay as they are
    own = name.startswith("adamw_torch")
    if not own and (any(part in name for part in _NEED_WHOLE) or name == "adamw_8bit"):
        yield f"optim={name!r} needs whole parameters, and fsdp shares them out: use 'adamw_torch' or its 8bit form."
    elif settings.version == 1 and name in _NEED_SHAPES:
        yield f"optim={name!r} needs the shapes of the parameters, and FSDP1 flattens them: use FSDP2."
    if own_optimizer:
        yield (
            "optimizers holds the parameters of the whole model, which fsdp replaces: pass optimizer_cls_and_kwargs, "
            "or override create_optimizer."
        )


def _of_saving(args: BaseArguments, settings: FsdpSettings, config: Mapping[str, Any]) -> Iterator[str]:
    if settings.state_dict_type != "FULL_STATE_DICT" and config.get("async_checkpoint"):
        yield (
            "lightning_config['async_checkpoint']=True writes from one process, and fsdp_config['state_dict_type']="
            "'SHARDED_STATE_DICT' from all: leave one of them out."
        )
    logged = os.environ.get("WANDB_LOG_MODEL", "false").lower()
    if "wandb" in (args.report_to or ()) and logged not in ("", "false"):
        yield (
            f"WANDB_LOG_MODEL={logged} saves the model in the main process alone, and fsdp gathers it from all: unset "
            "it, and log what save_model() has written."
        )
