"""Launcher variables of accelerate, and its global states, which we keep consistent with the run.

accelerate's loggers and helpers (`gather`, `broadcast_object_list`, ...) read `PartialState` and `AcceleratorState`.
Without these states, accelerate's helpers raise or do nothing. We fill them in directly: accelerate's own setup would
change environment variables and thread counts, and detect device and ranks again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hftrainer.arguments.resolved import ResolvedArguments, asks_for_deepspeed
from hftrainer.base.config_files import FALSE, env_flag
from hftrainer.errors import InvalidArgument
from hftrainer.parallel.process_state import DistributedType, ProcessState
from hftrainer.parallel.processes import Processes


def initialize_state(resolved: ResolvedArguments) -> None:
    """Reset the state of an earlier Trainer, and set up `PartialState`, as transformers does.

    Until the process group starts, the state describes a single process, so that no collective waits for other ranks.
    """
    state_module = _import_state_module()
    if state_module is None or resolved.accelerator_config.use_configured_state:
        return
    state_module.AcceleratorState._reset_state(reset_partial_state=True)
    _fill_partial_state(state_module, resolved, _distributed_type(resolved))


def _distributed_type(resolved: ResolvedArguments) -> DistributedType:
    """Accelerate's distributed type for this run. It is `NO` until the process group starts."""
    device_type, has_process_group = resolved.device.type, torch.distributed.is_initialized()
    if device_type == "xla":
        return DistributedType.XLA
    if has_process_group and asks_for_deepspeed(resolved.args):
        return DistributedType.DEEPSPEED
    is_distributed = has_process_group and resolved.rank_info.world_size > 1
    return DistributedType.from_device(device_type, is_distributed=is_distributed)


def copy_accelerator_settings(resolved: ResolvedArguments, accelerator: Any) -> None:
    """Copy the settings of the Trainer's accelerator into both states, before each of its runs.

    Args:
        resolved: the Trainer's arguments, ours or transformers'.
        accelerator: the Trainer's accelerator; the process group has started.

    Raises:
        InvalidArgument: if `use_configured_state` keeps a state whose precision differs.
    """
    state_module = _import_state_module()
    if state_module is None:
        return
    state = state_module.AcceleratorState
    if resolved.accelerator_config.use_configured_state:
        if state._shared_state:
            _check_configured_state(state(), accelerator)
            return
    else:
        _fill_partial_state(state_module, resolved, accelerator.distributed_type)
    state._reset_state()
    state._shared_state.update(state_module.PartialState._shared_state)
    state._shared_state.update(
        deepspeed_plugins=accelerator.state.deepspeed_plugin,
        torch_tp_plugin=None,
        parallelism_config=accelerator.parallelism_config,
        device_mesh=None,
        dynamo_plugin=_dynamo(resolved.args),
        _mixed_precision=accelerator.mixed_precision,
    )
    # The state has this attribute only with FSDP.
    if accelerator.state.fsdp_plugin is not None:
        state._shared_state["fsdp_plugin"] = accelerator.state.fsdp_plugin


def get_partial_state(resolved: ResolvedArguments) -> Any:
    """Accelerate's `PartialState`, or without accelerate an object with the same attributes."""
    state_module = _import_state_module()
    if state_module is not None:
        return state_module.PartialState()
    return ProcessState(Processes.from_ranks(resolved.rank_info), resolved.device, _distributed_type(resolved))


def find_device_mismatch(device: torch.device) -> str | None:
    """The reason why a run on `device` cannot use accelerate's existing state, or None."""
    state_module = sys.modules.get("accelerate.state")
    if state_module is None or not state_module.PartialState._shared_state:
        return "accelerate has no state yet. Please define this beforehand: create an Accelerator or a PartialState."
    state_device = state_module.PartialState().device
    if state_device.type != device.type:
        return f"accelerate's state is on {state_device}, but the run would be on {device}: set use_cpu to match."
    return None


def _import_state_module() -> Any:
    """The module `accelerate.state`, or None if accelerate is missing, blocked, or cannot be imported."""
    is_blocked = sys.modules.get("accelerate", ...) is None
    if is_blocked or ("accelerate" not in sys.modules and importlib.util.find_spec("accelerate") is None):
        return None
    try:
        return importlib.import_module("accelerate.state")
    except ImportError as error:
        warnings.warn(
            f"accelerate cannot be imported ({error}), so its state and loggers are not set up for this run.",
            stacklevel=2,
        )
        return None


def _fill_partial_state(state_module: Any, resolved: ResolvedArguments, distributed_type: DistributedType) -> None:
    device, rank_info = resolved.device, resolved.rank_info
    has_process_group = rank_info.world_size > 1 and torch.distributed.is_initialized()
    backend = torch.distributed.get_backend() if has_process_group else None
    state_module.PartialState._reset_state()
    state_module.PartialState._shared_state.update(
        _cpu=device.type == "cpu",
        backend="xla" if distributed_type == "XLA" else backend,
        device=device,
        debug=env_flag("ACCELERATE_DEBUG_MODE"),
        distributed_type=state_module.DistributedType(distributed_type.value),
        num_processes=rank_info.world_size,
        process_index=rank_info.rank,
        local_process_index=rank_info.local_rank,
    )
    # The constructor adds the values that it reads from the environment at each call.
    state_module.PartialState()
    if env_flag("ACCELERATE_CPU_AFFINITY"):
        importlib.import_module("accelerate.utils").set_numa_affinity(rank_info.local_rank)


def _check_configured_state(state: Any, accelerator: Any) -> None:
    if state.mixed_precision != accelerator.mixed_precision:
        raise InvalidArgument(
            "accelerator_config['use_configured_state']=True: accelerate's state was set up with mixed_precision="
            f"{state.mixed_precision!r}, but the arguments ask for {accelerator.mixed_precision!r}: make them the same."
        )


def _dynamo(args: Any) -> Any:
    """Accelerate's plugin for `torch.compile`, with its defaults if accelerate does not know the backend."""
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    backend = args.torch_compile_backend if args.torch_compile else None
    if backend is None or backend.upper() not in DynamoBackend.list():
        return TorchDynamoPlugin()
    return TorchDynamoPlugin(backend=backend, mode=args.torch_compile_mode)


# ---- Variables of accelerate's launchers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """How a variable is handled.

    Attributes:
        effect: its effect in hftrainer.
        accepted_values: the accepted values, in lower case; None accepts all.
        remedy: what to do if the value is not accepted.
    """

    effect: str
    accepted_values: tuple[str, ...] | None = None
    remedy: str = ""


_OFF = ("", *FALSE)
#: Effect of the variables that only accelerate's own functions read.
_ACCELERATE_ONLY = "used only by accelerate's own functions"
_WITH_DEEPSPEED = "in DeepSpeed's configuration, unless a configuration file is set"

#: Name of a variable, or a prefix followed by '*' → how the variable is handled.
VARIABLES = {
    "ACCELERATE_USE_CPU": Variable("runs on the CPU"),
    "ACCELERATE_MIXED_PRECISION": Variable(
        "precision, unless fp16 or bf16 is set", ("", "no", "fp32", "bf16", "fp16"), "launch with bf16"
    ),
    "ACCELERATE_FP8_*": Variable("details of fp8, which is refused"),
    "ACCELERATE_DOWNCAST_BF16": Variable("nothing", ("",), "set XLA_DOWNCAST_BF16=1, which torch_xla reads"),
    "ACCELERATE_DYNAMO_BACKEND": Variable("compiles the model"),
    "ACCELERATE_DYNAMO_MODE": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": Variable(
        "nothing", _OFF, "launch without it, which compiles the complete model"
    ),
    "ACCELERATE_CPU_AFFINITY": Variable("binds each process to the CPU cores near its GPU"),
    "ACCELERATE_DEBUG_MODE": Variable("accelerate checks collective operations"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Variable("must equal gradient_accumulation_steps with DeepSpeed"),
    "ACCELERATE_GRADIENT_CLIPPING": Variable(f"gradient_clipping {_WITH_DEEPSPEED}"),
    "ACCELERATE_USE_DEEPSPEED": Variable("turns on DeepSpeed, unless the argument deepspeed is set"),
    "ACCELERATE_CONFIG_DS_FIELDS": Variable("lists settings that contradict a DeepSpeed file; they are refused"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Variable("the path of DeepSpeed's configuration"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Variable(f"ZeRO's stage {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_*": Variable(f"devices and paths of offloaded states {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": Variable(f"complete weights in checkpoints {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": Variable("nothing: ZeRO-3 partitions models, as in accelerate"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": Variable("layer classes that ZeRO-3 gathers as a unit"),
    "ACCELERATE_USE_FSDP": Variable("turns on FSDP, unless the argument fsdp is set"),
    "FSDP_*": Variable("FSDP settings, named as in fsdp_config; an error names unknown ones"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": Variable("sizes of process groups, if parallelism_config is not set"),
    "PARALLELISM_CONFIG_*": Variable("these sizes; an error names cp_size or sp_size above 1"),
    "ACCELERATE_ALLOW_CP_STANDALONE": Variable("an option of cp_size, which is refused above 1"),
    "ACCELERATE_USE_MEGATRON_LM": Variable("nothing", _OFF, "launch with --use_fsdp or --use_deepspeed"),
    "MEGATRON_LM_*": Variable("settings of Megatron-LM, which is refused"),
    "ACCELERATE_USE_SAGEMAKER": Variable("nothing: ranks are read from the launcher's variables"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": Variable(
        "nothing", ("", "no"), "launch with 'NO', and start the processes with torchrun"
    ),
    "ACCELERATE_TORCH_DEVICE": Variable(
        "must be the device of the run", None, "select GPUs with CUDA_VISIBLE_DEVICES, or set use_cpu"
    ),
    "ACCELERATE_IN_TPU_POD": Variable("used by accelerate's launcher"),
    "ACCELERATE_DEBUG_RDV_FILE": Variable("used by accelerate's debug_launcher"),
    "ACCELERATE_BYPASS_DEVICE_MAP": Variable(_ACCELERATE_ONLY),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": Variable(_ACCELERATE_ONLY),
    "ACCELERATE_LOG_LEVEL": Variable(_ACCELERATE_ONLY),
    "ACCELERATE_ENABLE_RICH": Variable(_ACCELERATE_ONLY),
    "ACCELERATE_NUM_PROCESSES": Variable("used by accelerate's own tests"),
}


def find_variable(name: str) -> Variable | None:
    """How a variable is handled, or None if the table does not list it."""
    rows = (row for key, row in VARIABLES.items() if key.endswith("*") and name.startswith(key[:-1]))
    return VARIABLES.get(name) or next(rows, None)


def check_launch_variables(device: Any) -> Iterator[str]:
    """An error message for each setting of accelerate's launchers that a run on `device` does not support."""
    for name, row in VARIABLES.items():
        value = os.environ.get(name, "")
        if row.accepted_values is not None and value.lower() not in row.accepted_values:
            yield f"The launcher asks for {name}={value}, which is not supported: {row.remedy}."
    if device_name := os.environ.get("ACCELERATE_TORCH_DEVICE", ""):
        try:
            launcher_device = torch.device(device_name)
        except RuntimeError as error:
            yield f"ACCELERATE_TORCH_DEVICE={device_name!r} is not a device ({str(error).partition('.')[0]}): unset it."
        else:
            if launcher_device.type != device.type or launcher_device.index not in (None, device.index):
                remedy = VARIABLES["ACCELERATE_TORCH_DEVICE"].remedy
                yield f"ACCELERATE_TORCH_DEVICE={device_name!r}, but the run is on {str(device)!r}: {remedy}."


def find_unknown_variables() -> list[str]:
    """Variables of accelerate that are not in the table: misspelled, or of a newer release."""
    return sorted(name for name in os.environ if name.startswith("ACCELERATE_") and find_variable(name) is None)
