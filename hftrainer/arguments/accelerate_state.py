"""Keeps accelerate's global states, `PartialState` and `AcceleratorState`, equal to this run.

accelerate's loggers and helpers (`gather`, `broadcast_object_list`, ...) read them. Without them they raise or do
nothing. We fill them in ourselves: accelerate would set a launcher's environment variables and the number of threads,
and choose devices and processes a second time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import Any

import torch

from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidArgument
from hftrainer.parallel.config_files import env_flag
from hftrainer.parallel.process_state import DistributedType, ProcessState
from hftrainer.parallel.processes import Processes


def begin(args: Any) -> None:
    """Set up `PartialState` from the arguments, and reset the state of an earlier Trainer, as transformers does.

    Until the process group starts, the state describes a single process, so that no collective waits for other ranks.
    """
    library = _library()
    if library is None or ResolvedArguments.of(args).accelerator_config.use_configured_state:
        return
    library.AcceleratorState._reset_state(reset_partial_state=True)
    _fill_partial(library, args, _kind(args))


def _kind(args: Any) -> DistributedType:
    """Accelerate's name for the processes; `NO` until the process group starts."""
    if args.device.type == "xla":
        return DistributedType.XLA
    connected = torch.distributed.is_initialized()
    if connected and args.hf_deepspeed_config is not None:
        return DistributedType.DEEPSPEED
    return DistributedType.of(args.device.type, several=connected and args.world_size > 1)


def follow(args: Any, accelerator: Any) -> None:
    """Copy the settings of the Trainer's accelerator into both states, before each of its runs.

    Args:
        args: the Trainer's arguments, ours or transformers'.
        accelerator: the Trainer's accelerator; the process group has started.

    Raises:
        InvalidArgument: if `use_configured_state` keeps a state whose precision differs.
    """
    library = _library()
    if library is None:
        return
    state = library.AcceleratorState
    if ResolvedArguments.of(args).accelerator_config.use_configured_state:
        if state._shared_state:
            _check_configured(state(), accelerator)
            return
    else:
        _fill_partial(library, args, accelerator.distributed_type)
    state._reset_state()
    state._shared_state.update(library.PartialState._shared_state)
    state._shared_state.update(
        deepspeed_plugins=accelerator.state.deepspeed_plugin,
        torch_tp_plugin=None,
        parallelism_config=accelerator.parallelism_config,
        device_mesh=None,
        dynamo_plugin=_dynamo(args),
        _mixed_precision=accelerator.mixed_precision,
    )
    if accelerator.state.fsdp_plugin is not None:  # otherwise the attribute is absent
        state._shared_state["fsdp_plugin"] = accelerator.state.fsdp_plugin


def current(args: Any) -> Any:
    """Accelerate's `PartialState`; without accelerate, an object with the same attributes."""
    library = _library()
    if library is not None:
        return library.PartialState()
    return ProcessState(Processes.at(args._rank_info), args.device, _kind(args))


def check_device(device: Any) -> str | None:
    """Why a run on `device` cannot use the state that accelerate already has, or None."""
    library = sys.modules.get("accelerate.state")
    if library is None or not library.PartialState._shared_state:
        return "accelerate has no state yet. Please define this beforehand: make an Accelerator or a PartialState."
    found = library.PartialState().device
    if found.type != device.type:
        return f"accelerate's state is on {found}, but the run would be on {device}; set use_cpu to match."
    return None


def _library() -> Any:
    """`accelerate.state`; None if accelerate is not installed, is blocked, or cannot be imported."""
    blocked = sys.modules.get("accelerate", ...) is None
    if blocked or ("accelerate" not in sys.modules and importlib.util.find_spec("accelerate") is None):
        return None
    try:
        return importlib.import_module("accelerate.state")
    except ImportError as error:
        warnings.warn(
            f"accelerate cannot be imported ({error}): its states and loggers do not know this run.", stacklevel=2
        )
        return None


def _fill_partial(library: Any, args: Any, kind: DistributedType) -> None:
    connected = args.world_size > 1 and torch.distributed.is_initialized()
    backend = torch.distributed.get_backend() if connected else None
    # Read before the state is cleared: transformers' arguments read the state.
    device = args.device
    found = {
        "_cpu": device.type == "cpu",
        "backend": "xla" if kind == "XLA" else backend,
        "device": device,
        "debug": env_flag("ACCELERATE_DEBUG_MODE"),
        "distributed_type": library.DistributedType(kind.value),
        "num_processes": args.world_size,
        "process_index": args.process_index,
        "local_process_index": args.local_process_index,
    }
    library.PartialState._reset_state()
    library.PartialState._shared_state.update(found)
    library.PartialState()  # adds what it reads from the environment at each call
    if env_flag("ACCELERATE_CPU_AFFINITY"):
        importlib.import_module("accelerate.utils").set_numa_affinity(args.local_process_index)


def _check_configured(state: Any, accelerator: Any) -> None:
    if state.mixed_precision != accelerator.mixed_precision:
        raise InvalidArgument(
            "accelerator_config['use_configured_state']=True: accelerate's state was set up with mixed_precision="
            f"{state.mixed_precision!r}, but the arguments ask for {accelerator.mixed_precision!r}: make them the same."
        )


def _dynamo(args: Any) -> Any:
    """Accelerate's plugin for `torch.compile`; with its defaults if accelerate does not know the backend."""
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    backend = args.torch_compile_backend if args.torch_compile else None
    if backend is None or backend.upper() not in DynamoBackend.list():
        return TorchDynamoPlugin()
    return TorchDynamoPlugin(backend=backend, mode=args.torch_compile_mode)
