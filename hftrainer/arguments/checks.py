"""Checks for combinations of arguments that the device or FSDP does not support, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import distributed

from hftrainer.arguments import legacy
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import spelled
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import suggest
from hftrainer.parallel import devices
from hftrainer.parallel.devices import UNSUPPORTED_BY_LIGHTNING, native_backend
from hftrainer.parallel.fsdp_settings import FsdpSettings, XlaSettings
from hftrainer.parallel.plan import TRUE_TYPES
from hftrainer.plugins import load

#: Devices that are not supported → why.
_UNSUPPORTED_DEVICES = {
    "hpu": "Gaudi needs replaced torch operators and mark_step calls in the loop; use optimum-habana",
    "sdaa": "the Trainer of transformers does not use it either",
    "neuron": "it compiles whole graphs, which the loop does not support; use optimum-neuron",
}
_NO_TORCH_XLA = f"torch_xla is missing: {devices.INSTALL_TORCH_XLA}"
#: Documented backends → the devices that they connect, and where they come from.
BACKENDS = {
    "nccl": (("cuda",), "it comes with torch for CUDA or ROCm"),
    "gloo": (("cpu", "cuda"), "it comes with torch"),
    "mpi": (("cpu", "cuda"), "it needs torch built from source with MPI"),
    "ccl": (("cpu", "xpu"), "the script must import oneccl_bindings_for_pytorch, which Intel has replaced by 'xccl'"),
    "xccl": (("xpu",), "it comes with torch for Intel GPUs"),
    "smddp": (("cuda",), "the script must import smdistributed.dataparallel.torch.torch_smddp, of SageMaker's images"),
    "hccl": (("npu",), "it comes with torch_npu"),
    "cncl": (("mlu",), "it comes with torch_mlu"),
    "mccl": (("musa",), "it comes with torch_musa"),
    "tpu_dist": (("tpu",), "it comes with torch_tpu"),
}


def check_device(resolved: ResolvedArguments) -> Iterator[str]:
    """Yields an error for each setting that the device does not support."""
    args, kind, processes = resolved.args, resolved.device.type, resolved.rank_info.world_size
    is_model_sharded = resolved.sharding is not None or resolved.layout.tp_size > 1
    if legacy.value(args, "use_mps_device") and kind != "mps":
        yield f"use_mps_device=True, but {_explain_missing_mps(args)}: leave it out to train on {kind}."
    found = [name for name in _UNSUPPORTED_DEVICES if hasattr(torch, name) and getattr(torch, name).is_available()]
    if kind == "cpu" and found and not _asks_for_cpu(args):
        yield (
            f"torch.{found[0]} is available, but hftrainer cannot train on it: {_UNSUPPORTED_DEVICES[found[0]]}. Set "
            "use_cpu=True to train on the CPU."
        )
    elif kind == "cpu" and not _asks_for_cpu(args) and (reason := devices.unused_tpu_message()):
        yield reason
    if kind == "mps":
        yield from _check_mps(resolved.precision, processes, is_model_sharded)
    elif kind in UNSUPPORTED_BY_LIGHTNING and is_model_sharded:
        yield f"Sharding needs CUDA or the CPU, and this device is {kind}: remove fsdp and parallelism_config."
    if resolved.precision in TRUE_TYPES and (is_model_sharded or kind == "xla"):
        yield (
            f"lightning_config['precision']={resolved.precision!r} is for a whole model on a CPU or GPU: load the "
            "model in that type instead, as with dtype=torch.bfloat16."
        )
    several = processes > 1 and kind not in ("mps", "xla")
    if several and args.ddp_timeout <= 0:
        yield f"ddp_timeout={args.ddp_timeout!r}: every operation would time out at once; give seconds above 0."
    if args.ddp_backend and (reason := _check_backend(args.ddp_backend.lower(), kind, several)):
        yield f"ddp_backend={args.ddp_backend!r}{reason}"


def _asks_for_cpu(args: BaseArguments) -> bool:
    return getattr(args, "_should_use_cpu", args.use_cpu)


def _explain_missing_mps(args: BaseArguments) -> str:
    if _asks_for_cpu(args):
        return "use_cpu=True contradicts it"
    if not torch.backends.mps.is_built():
        return "this torch was built without MPS, Apple's GPU"
    return "there is no Apple GPU, or macOS is too old for it"


def _check_mps(precision: str, processes: int, is_model_sharded: bool) -> Iterator[str]:
    if processes > 1 or is_model_sharded:
        what = f"{processes} processes are" if processes > 1 else "A sharded or split model is"
        yield (
            f"{what} not possible on Apple's GPU: it is one device, and neither gloo nor nccl works on mps. Start one "
            "process, without fsdp and devices; gradient_accumulation_steps makes larger batches. Or set use_cpu=True."
        )
    if precision == "16-mixed" and torch.__version__ < "2.8":  # https://github.com/pytorch/pytorch/pull/150255
        yield f"fp16=True on Apple's GPU needs torch 2.8, whose GradScaler supports mps; this is {torch.__version__}."
    if precision == "64-true":
        yield "lightning_config['precision']='64-true': Apple's GPU has no float64. Set use_cpu=True."
    if precision == "bf16-mixed" and not torch.backends.mps.is_macos_or_newer(14, 0):
        yield "bf16=True on Apple's GPU needs macOS 14: use fp16=True, or use_cpu=True."


def _check_backend(given: str, kind: str, several: bool) -> str | None:
    """Why a backend, or one of a list such as 'cpu:gloo,cuda:nccl', cannot be used; None if it can."""
    registered = distributed.Backend.backend_capability
    known = {*registered, *BACKENDS}
    serves: set[str] = set()
    instead = f"use {native_backend(kind)!r}, or leave it out."
    for part in given.split(","):
        *device, name = part.split(":")
        if name not in known:
            return f": no backend is called {name!r}{suggest(name, known, f': {instead}')}"
        if several and not distributed.is_backend_available(name):
            source = f" ({BACKENDS[name][1]})" if name in BACKENDS else ""
            return f": this torch has no {name!r}{source}: {instead}"
        serves.update(device or registered.get(name) or BACKENDS[name][0])
    return f" does not connect processes on {kind}: {instead}" if several and kind not in serves else None


def check_xla(resolved: ResolvedArguments) -> Iterator[str]:
    """Yields an error for each setting that TPUs do not support."""
    args, kind, rank_info = resolved.args, resolved.device.type, resolved.rank_info
    cores = legacy.value(args, "tpu_num_cores") or None
    if cores is not None and kind not in ("xla", "tpu") and not args.use_cpu:
        reason = "no TPU was found: set PJRT_DEVICE=TPU" if devices.has_torch_xla() else _NO_TORCH_XLA
        yield f"tpu_num_cores={cores} needs a TPU, but {reason}."
    if kind not in ("xla", "tpu"):
        return
    if cores is not None and cores != rank_info.local_world_size:
        yield (
            f"tpu_num_cores={cores}, but this run uses {rank_info.local_world_size} of this machine's cores: start "
            "the script with python -m hftrainer run --tpu, which starts a process for each."
        )
    launched = rank_info.launcher == "xla" if kind == "xla" else devices.TPU_ADDRESSES in os.environ
    if rank_info.world_size > 1 and not launched:
        yield (
            f"{rank_info.launcher!r} has started {rank_info.world_size} processes, which have no TPU core of their "
            "own: start the script with python -m hftrainer run --tpu."
        )
    if rank_info.launcher == "xla" and load("xla", "devices").cores_in_this_process() > 1:
        yield (
            "On TPU v2 and v3 two cores share a process, which is not supported: use one core, or shard over all "
            "with fsdp_config={'xla': True, 'xla_fsdp_v2': True} in one process."
        )
    if args.fp16 or args.fp16_full_eval:
        yield "fp16 is not supported on TPUs, which compute in bfloat16: use bf16."
    if getattr(args, "checkpoint_format", None) == "dcp":
        yield "checkpoint_format='dcp' is not supported on TPUs, whose checkpoints have their own parts: leave it out."
    if args.torch_compile and kind == "xla":
        yield "torch_compile=True: XLA already compiles the whole step; leave it out."
    elif args.torch_compile and args.torch_compile_backend == "inductor":
        yield "torch_compile=True: inductor does not compile for TPUs: set torch_compile_backend='tpu'."


#: Parts of the names of optimizers whose states torch cannot shard, or that need whole weights.
_NEEDS_WHOLE_PARAMETERS = ("bnb", "paged", "lion", "ademamix", "rmsprop_", "galore", "apollo", "lomo", "grokadamw")
#: Optimizers that work with FSDP2 but not with FSDP1, which flattens parameters.
_NEEDS_SHAPES = ("adafactor", "adamw_hf", "stable_adamw")


def check_fsdp(resolved: ResolvedArguments, has_custom_optimizer: bool) -> Iterator[str]:
    """Yields an error for each setting that FSDP does not support.

    Args:
        resolved: the arguments.
        has_custom_optimizer: whether the script passes its own optimizer.
    """
    args, settings, world_size = resolved.args, resolved.fsdp, resolved.rank_info.world_size
    # `check_device` reports devices that cannot shard.
    if settings is None or resolved.device.type in ("mps", *UNSUPPORTED_BY_LIGHTNING):
        return
    asked = f"fsdp={args.fsdp!r}" if args.fsdp else "ACCELERATE_USE_FSDP=true"
    if args.deepspeed:
        yield "fsdp and deepspeed both shard the model: use only one of them."
    if settings.xla is not None:
        yield from _check_fsdp_of_xla(resolved, settings, settings.xla)
    elif resolved.device.type == "xla":
        yield f"{asked} on a TPU uses torch_xla: also set fsdp_config={{'xla': True}}."
    elif world_size == 1 and resolved.rank_info.launcher == "lightning":
        yield (
            f"{asked} shards the model over processes, but there is only one process: start the script with "
            "torchrun, accelerate "
            "launch or python -m hftrainer run --nproc N, or set lightning_config={'devices': N}."
        )
    elif "hybrid" in settings.strategy and world_size == 1:
        yield f"fsdp={settings.strategy!r} needs at least two processes, but there is one: use 'full_shard'."
    if settings.activation_checkpointing and args.activation_checkpointing:
        yield (
            "fsdp_config['activation_checkpointing'] and activation_checkpointing=True would compute activations a "
            "third time: set only fsdp_config['activation_checkpointing']."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            yield f"{name}=True would round sharded weights: use {name[:4]}=True, or remove fsdp."
    yield from _check_optimizers(args, settings, has_custom_optimizer)
    yield from _check_saving(args)


def _check_fsdp_of_xla(resolved: ResolvedArguments, settings: FsdpSettings, xla: XlaSettings) -> Iterator[str]:
    world_size = resolved.rank_info.world_size
    if resolved.device.type != "xla":
        reason = "training is on another device" if devices.has_torch_xla() else _NO_TORCH_XLA
        yield f"fsdp_config['xla'] needs a TPU, but {reason}."
    if xla.spmd and world_size > 1:
        yield (
            f"fsdp_config['xla_fsdp_v2'] drives all cores from one process, but there are {world_size}: start the "
            "script with plain python."
        )
    if not xla.spmd and getattr(resolved.args, "predict_with_generate", False):
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
        yield f"fsdp_config[{name!r}] has no effect with 'xla', where torch_xla shards the model: {instead}."


def _check_optimizers(args: BaseArguments, settings: FsdpSettings, has_custom_optimizer: bool) -> Iterator[str]:
    name = spelled(args.optim)
    if settings.xla is not None and settings.xla.spmd:
        return  # with SPMD, parameters keep their shapes
    needs_whole = name == "adamw_8bit" or any(part in name for part in _NEEDS_WHOLE_PARAMETERS)
    if needs_whole and not name.startswith("adamw_torch"):
        yield f"optim={name!r} needs whole parameters, but fsdp shards them: use 'adamw_torch' or its 8bit form."
    elif settings.version == 1 and name in _NEEDS_SHAPES:
        yield f"optim={name!r} needs the shapes of the parameters, but FSDP1 flattens them: use FSDP2."
    if has_custom_optimizer:
        yield (
            "optimizers holds the parameters of the whole model, which fsdp replaces: pass optimizer_cls_and_kwargs, "
            "or override create_optimizer."
        )


def _check_saving(args: BaseArguments) -> Iterator[str]:
    logged = os.environ.get("WANDB_LOG_MODEL", "false").lower()
    if "wandb" in (args.report_to or ()) and logged not in ("", "false"):
        yield (
            f"WANDB_LOG_MODEL={logged} saves the model in the main process alone, but fsdp gathers it from all: unset "
            "it, and log the files of save_model()."
        )
