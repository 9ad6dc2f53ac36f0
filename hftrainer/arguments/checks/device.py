"""Checks, before a run, for argument combinations that the device or FSDP does not support."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import distributed

from hftrainer.arguments import old_names
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import as_text
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import suggest
from hftrainer.parallel import devices
from hftrainer.parallel.environment import RankInfo
from hftrainer.parallel.fsdp_settings import FsdpSettings, XlaSettings
from hftrainer.parallel.plan import TRUE_TYPES
from hftrainer.plugins import import_adapter

#: Devices that are not supported → why.
_UNSUPPORTED_DEVICES = {
    "hpu": "Gaudi needs its own torch operators, and mark_step calls in the loop; use optimum-habana",
    "sdaa": "the Trainer of transformers does not use it either",
    "neuron": "it compiles complete graphs, which the loop does not support; use optimum-neuron",
}
_NO_TORCH_XLA = f"torch_xla is missing: {devices.INSTALL_TORCH_XLA}"
#: Documented backends → the devices that they connect, and their source.
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
    args, device_type, processes = resolved.args, resolved.device.type, resolved.rank_info.world_size
    is_model_sharded = resolved.sharding is not None or resolved.layout.tp_size > 1
    if old_names.old_argument(args, "use_mps_device") and device_type != "mps":
        yield f"use_mps_device=True, but {_explain_missing_mps(args)}: remove it to train on {device_type}."
    if device_type == "cpu" and not _asks_for_cpu(args) and (reason := _explain_unused_device()):
        yield reason
    if device_type == "mps":
        yield from _check_mps(resolved.precision, processes, is_model_sharded)
    elif device_type in devices.UNSUPPORTED_BY_LIGHTNING and is_model_sharded:
        yield f"Sharding needs CUDA or the CPU, but this device is {device_type}: remove fsdp and parallelism_config."
    if resolved.precision in TRUE_TYPES and (is_model_sharded or device_type == "xla"):
        yield (
            f"lightning_config['precision']={resolved.precision!r} needs an unsharded model on a CPU or GPU: load "
            "the model in that type instead, for example with dtype=torch.bfloat16."
        )
    if processes > 1 and device_type not in ("mps", "xla") and args.ddp_timeout <= 0:
        yield f"ddp_timeout={args.ddp_timeout!r} would end every operation immediately: use more than 0 seconds."


def check_backend(resolved: ResolvedArguments) -> Iterator[str]:
    """An error if `ddp_backend` does not exist, or does not connect the processes of this run."""
    args, device_type, processes = resolved.args, resolved.device.type, resolved.rank_info.world_size
    has_process_group = processes > 1 and device_type not in ("mps", "xla")
    if args.ddp_backend and (reason := _explain_backend(args.ddp_backend.lower(), device_type, has_process_group)):
        yield f"ddp_backend={args.ddp_backend!r}{reason}"


def _asks_for_cpu(args: BaseArguments) -> bool:
    return getattr(args, "_should_use_cpu", args.use_cpu)


def _explain_unused_device() -> str | None:
    """Why a run without `use_cpu` does not use this machine's accelerator, or None if it has none."""
    for name, reason in _UNSUPPORTED_DEVICES.items():
        if hasattr(torch, name) and getattr(torch, name).is_available():
            return (
                f"torch.{name} is available, but hftrainer cannot train on it: {reason}. Set use_cpu=True to train on "
                "the CPU."
            )
    return devices.unused_tpu_message()


def _explain_missing_mps(args: BaseArguments) -> str:
    if _asks_for_cpu(args):
        return "use_cpu=True contradicts it"
    if not torch.backends.mps.is_built():
        return "this torch was built without MPS, Apple's GPU"
    return "this machine has no Apple GPU, or its macOS is too old"


def _check_mps(precision: str, processes: int, is_model_sharded: bool) -> Iterator[str]:
    if processes > 1 or is_model_sharded:
        subject = f"{processes} processes are" if processes > 1 else "A sharded or split model is"
        yield (
            f"{subject} not supported on Apple's GPU, a single device on which neither gloo nor nccl works. Start one "
            "process, without fsdp or devices, and raise gradient_accumulation_steps; or set use_cpu=True."
        )
    # See https://github.com/pytorch/pytorch/pull/150255.
    if precision == "16-mixed" and torch.__version__ < "2.8":
        yield f"fp16=True on Apple's GPU needs torch 2.8, with mps in GradScaler: upgrade from {torch.__version__}."
    if precision == "64-true":
        yield "lightning_config['precision']='64-true': Apple's GPU has no float64. Set use_cpu=True."
    if precision == "bf16-mixed" and not torch.backends.mps.is_macos_or_newer(14, 0):
        yield "bf16=True on Apple's GPU needs macOS 14: use fp16=True, or use_cpu=True."


def _explain_backend(backends: str, device_type: str, has_process_group: bool) -> str | None:
    """Why a backend, or a list such as 'cpu:gloo,cuda:nccl', cannot be used, or None."""
    registry = distributed.Backend.backend_capability
    known_names = {*registry, *BACKENDS}
    device_types: set[str] = set()
    remedy = f"use {devices.native_backend(device_type)!r}, or remove the argument."
    for part in backends.split(","):
        *device, name = part.split(":")
        if name not in known_names:
            return f": no backend is called {name!r}{suggest(name, known_names, f': {remedy}')}"
        if has_process_group and not distributed.is_backend_available(name):
            source = f" ({BACKENDS[name][1]})" if name in BACKENDS else ""
            return f": this torch has no {name!r}{source}: {remedy}"
        device_types.update(device or registry.get(name) or BACKENDS[name][0])
    if has_process_group and device_type not in device_types:
        return f" does not connect processes on {device_type}: {remedy}"
    return None


def check_xla(resolved: ResolvedArguments) -> Iterator[str]:
    """An error for each setting that TPUs do not support."""
    args, device_type, rank_info = resolved.args, resolved.device.type, resolved.rank_info
    cores = old_names.old_argument(args, "tpu_num_cores") or None
    if cores is not None and device_type not in ("xla", "tpu") and not args.use_cpu:
        reason = "no TPU was found: set PJRT_DEVICE=TPU" if devices.has_torch_xla() else _NO_TORCH_XLA
        yield f"tpu_num_cores={cores} needs a TPU, but {reason}."
    if device_type in ("xla", "tpu"):
        yield from _check_tpu_processes(rank_info, device_type, cores)
        yield from _check_tpu_arguments(args, device_type)


def _check_tpu_processes(rank_info: RankInfo, device_type: str, cores: int | None) -> Iterator[str]:
    if cores is not None and cores != rank_info.local_world_size:
        yield (
            f"tpu_num_cores={cores}, but this run uses {rank_info.local_world_size} of this machine's cores: start "
            "the script with python -m hftrainer run --tpu, which starts a process for each core."
        )
    launched = rank_info.launcher == "xla" if device_type == "xla" else devices.TPU_ADDRESSES in os.environ
    if rank_info.world_size > 1 and not launched:
        yield (
            f"{rank_info.launcher!r} has started {rank_info.world_size} processes, but assigned no TPU core to any: "
            "start the script with python -m hftrainer run --tpu."
        )
    if rank_info.launcher == "xla" and import_adapter("xla", "devices").cores_in_this_process() > 1:
        yield (
            "On TPU v2 and v3 two cores share a process, which is not supported: use one core, or shard the "
            "model over all cores with fsdp_config={'xla': True, 'xla_fsdp_v2': True} in one process."
        )


def _check_tpu_arguments(args: BaseArguments, device_type: str) -> Iterator[str]:
    if args.fp16 or args.fp16_full_eval:
        yield "fp16 is not supported on TPUs, which compute in bfloat16: use bf16."
    if args.checkpoint_format == "dcp":
        yield "checkpoint_format='dcp' is not supported on TPUs, whose checkpoints have another layout: remove it."
    if args.torch_compile and device_type == "xla":
        yield "torch_compile=True is not needed, since XLA already compiles the complete step: remove it."
    elif args.torch_compile and args.torch_compile_backend == "inductor":
        yield "torch_compile=True: inductor does not compile for TPUs: set torch_compile_backend='tpu'."


#: Name parts of optimizers whose states torch cannot shard, or that need unsharded weights.
_NEED_UNSHARDED_PARAMETERS = ("bnb", "paged", "lion", "ademamix", "rmsprop_", "galore", "apollo", "lomo", "grokadamw")
#: Optimizers that work with FSDP2 but not with FSDP1, which flattens parameters.
_NEED_PARAMETER_SHAPES = ("adafactor", "adamw_hf", "stable_adamw")


def check_fsdp(resolved: ResolvedArguments, has_custom_optimizer: bool) -> Iterator[str]:
    """Yields an error for each setting that FSDP does not support.

    Args:
        resolved: the arguments.
        has_custom_optimizer: whether the script passes its own optimizer.
    """
    args, settings, world_size = resolved.args, resolved.fsdp, resolved.rank_info.world_size
    # `check_device` reports devices that cannot shard.
    if settings is None or resolved.device.type in ("mps", *devices.UNSUPPORTED_BY_LIGHTNING):
        return
    setting = f"fsdp={args.fsdp!r}" if args.fsdp else "ACCELERATE_USE_FSDP=true"
    if args.deepspeed:
        yield "fsdp and deepspeed both shard the model: use only one of them."
    if settings.xla is not None:
        yield from _check_xla_fsdp(resolved, settings, settings.xla)
    elif resolved.device.type == "xla":
        yield f"{setting} on a TPU uses torch_xla: also set fsdp_config={{'xla': True}}."
    elif world_size == 1 and resolved.rank_info.launcher == "lightning":
        yield (
            f"{setting} shards the model over processes, but there is only one process: start the script with "
            "torchrun, accelerate launch or python -m hftrainer run --nproc N, or set lightning_config={'devices': N}."
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


def _check_xla_fsdp(resolved: ResolvedArguments, settings: FsdpSettings, xla: XlaSettings) -> Iterator[str]:
    world_size = resolved.rank_info.world_size
    if resolved.device.type != "xla":
        reason = "training is on another device" if devices.has_torch_xla() else _NO_TORCH_XLA
        yield f"fsdp_config['xla'] needs a TPU, but {reason}."
    if xla.spmd and world_size > 1:
        yield (
            f"fsdp_config['xla_fsdp_v2'] controls all cores from one process, but the run has {world_size}: start the "
            "script with plain python."
        )
    if not xla.spmd and getattr(resolved.args, "predict_with_generate", False):
        yield "predict_with_generate bypasses the wrapper that gathers weights: also set fsdp_config['xla_fsdp_v2']."
    fsdp_only_settings = {
        "activation_checkpointing": settings.activation_checkpointing,
        "cpu_offload": settings.cpu_offload,
        "state_dict_type": settings.state_dict_type != "FULL_STATE_DICT",
        "reshard_after_forward": settings.strategy not in ("full_shard", "shard_grad_op"),
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
    }
    for name in (name for name, is_set in fsdp_only_settings.items() if is_set):
        remedy = "set 'xla_fsdp_grad_ckpt' instead" if name == "activation_checkpointing" else "remove it"
        yield f"fsdp_config[{name!r}] has no effect with 'xla', where torch_xla shards the model: {remedy}."


def _check_optimizers(args: BaseArguments, settings: FsdpSettings, has_custom_optimizer: bool) -> Iterator[str]:
    name = as_text(args.optim)
    # With SPMD, parameters keep their shapes.
    if settings.xla is not None and settings.xla.spmd:
        return
    needs_unsharded = name == "adamw_8bit" or any(part in name for part in _NEED_UNSHARDED_PARAMETERS)
    if needs_unsharded and not name.startswith("adamw_torch"):
        yield (
            f"optim={name!r} needs unsharded parameters, but fsdp shards them: use 'adamw_torch' or 'adamw_torch_8bit'."
        )
    elif settings.version == 1 and name in _NEED_PARAMETER_SHAPES:
        yield f"optim={name!r} needs the shapes of the parameters, but FSDP1 flattens them: use FSDP2."
    if has_custom_optimizer:
        yield (
            "optimizers holds the parameters of the unsharded model, which fsdp replaces: pass "
            "optimizer_cls_and_kwargs, or override create_optimizer."
        )


def _check_saving(args: BaseArguments) -> Iterator[str]:
    log_model = os.environ.get("WANDB_LOG_MODEL", "false").lower()
    if "wandb" in (args.report_to or ()) and log_model not in ("", "false"):
        yield (
            f"WANDB_LOG_MODEL={log_model} saves the model in the main process only, but fsdp gathers it from all "
            "processes: unset it, and log the files of save_model()."
        )
