"""XLA devices, TPUs above all: whether this process uses one, and where it stands; until then torch_xla stays out."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from hftrainer.parallel.environment import RankInfo

INSTALL = "pip install 'hftrainer[tpu]', which brings torch_xla; its newest release is 2.9.0, for torch 2.9"
#: Variables that machines with a TPU have.
_OF_TPUS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID")
_TPU_DEVICE = "/dev/accel0"
_FALSE = ("0", "f", "false", "n", "no", "off")


def wanted() -> bool:
    """Whether the machine or the user says that there is an XLA device; `USE_TORCH_XLA=0` says that there is none."""
    if os.environ.get("USE_TORCH_XLA", "1").lower() in _FALSE:
        return False
    return bool(os.environ.get("PJRT_DEVICE")) or any(map(os.environ.get, _OF_TPUS)) or os.path.exists(_TPU_DEVICE)


def installed() -> bool:
    """Whether torch_xla can be imported; it is not."""
    return importlib.util.find_spec("torch_xla") is not None


def available() -> bool:
    """Whether training runs on XLA, unless the CPU is asked for."""
    return wanted() and installed()


def device() -> torch.device:
    """The XLA device of this process; nothing is begun on it, or SPMD could not be chosen any more."""
    import torch_xla  # noqa: F401 - makes torch know such devices

    return torch.device("xla", 0)


def sync() -> None:
    """Compile and run what has been recorded so far, without waiting for it.

    XLA records operations, and what is recorded in one piece is compiled in one piece: a step ends here.
    """
    import torch_xla

    torch_xla.sync()


def seed(number: int) -> None:
    """Seed the generator of this process's device."""
    import torch_xla

    torch_xla.manual_seed(number)


def print_metrics() -> None:
    """Print what torch_xla has counted: compilations, executions, transfers."""
    from torch_xla.debug import metrics

    print(metrics.metrics_report())


def rank_info() -> RankInfo:
    """A process that torch_xla has started, one for each core, on one host or several."""
    from torch_xla import runtime

    size, local = runtime.world_size(), runtime.local_device_count()
    nodes = -(-size // max(local, 1))
    return RankInfo(
        size,
        runtime.global_ordinal(),
        runtime.local_ordinal(),
        local,
        nodes=nodes,
        launcher="xla",
        address=os.environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else runtime.get_master_ip()),
        port=int(os.environ.get("MASTER_PORT", RankInfo.port)),
    )


def cores_in_this_process() -> int:
    """How many cores this process drives: two on TPU v2 and v3."""
    from torch_xla import runtime

    return runtime.addressable_device_count()


def move_model(model: torch.nn.Module, target: torch.device) -> None:
    """Move a model to an XLA device; weights that are tied stay so, which `nn.Module.to` alone would undo."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to(target)
    for (owner, own_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(owner, own_name))


def to_host(data: Any) -> Any:
    """The same nested containers with their XLA tensors in the host's memory; each tensor moves once.

    What has one storage on the device, such as tied weights, has one storage on the host too.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "xla":
                return item
            key = _identity(item)
            if key not in moved:
                moved[key] = item.detach().cpu()
            return moved[key]
        if isinstance(item, dict):
            copied = type(item)((name, move(value)) for name, value in item.items())
            if hasattr(item, "_metadata"):  # of a state dict
                copied._metadata = item._metadata  # type: ignore[attr-defined]
            return copied
        if type(item) in (list, tuple):
            return type(item)(map(move, item))
        return item

    return move(data)


def _identity(tensor: torch.Tensor) -> int:
    import torch_xla

    return torch_xla._XLAC._xla_get_tensor_id(tensor)
