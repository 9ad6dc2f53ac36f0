"""XLA devices, mainly TPUs: this process's device and rank. torch_xla is imported only when needed."""

from __future__ import annotations

import os
from typing import Any

import torch

from hftrainer.errors import MissingPackage, unless_absent
from hftrainer.parallel.devices import INSTALL_TORCH_TPU, INSTALL_TORCH_XLA
from hftrainer.parallel.environment import RankInfo


def device() -> torch.device:
    """The XLA device of this process. Do not initialize it yet, since SPMD must be enabled first."""
    load()
    return torch.device("xla", 0)


def load() -> Any:
    """Import torch_xla, which registers the device type in torch.

    Raises:
        MissingPackage: if torch_xla was built for another release of torch.
    """
    try:
        import torch_xla
    except ImportError as error:
        raise MissingPackage(
            f"torch {torch.__version__} cannot load the installed torch_xla ({error}): {INSTALL_TORCH_XLA}, or "
            f"pip uninstall torch_xla and {INSTALL_TORCH_TPU}. Or set use_cpu=True to train on the CPU."
        ) from unless_absent(error)
    return torch_xla


def print_metrics() -> None:
    """Print torch_xla's counters: compilations, executions, transfers."""
    from torch_xla.debug import metrics

    print(metrics.metrics_report())


def rank_info() -> RankInfo:
    """The ranks of a process that torch_xla has started, one per core, on one machine or several."""
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
    """Number of cores that this process drives: two on TPU v2 and v3."""
    from torch_xla import runtime

    return int(runtime.addressable_device_count())


def move_model(model: torch.nn.Module, target: torch.device) -> None:
    """Move a model to an XLA device and keep its weights tied, which `nn.Module.to` alone would undo."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to(target)
    for (owner, own_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(owner, own_name))


def to_host(data: Any) -> Any:
    """Copy the XLA tensors in nested containers to CPU memory; each tensor is copied once.

    Tensors that share storage on the device, such as tied weights, share it on the CPU too.
    """
    moved: dict[int, torch.Tensor] = {}

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "xla":
                return item
            key = int(load()._XLAC._xla_get_tensor_id(item))
            if key not in moved:
                moved[key] = item.detach().cpu()
            return moved[key]
        if isinstance(item, dict):
            copied = type(item)((name, move(value)) for name, value in item.items())
            if hasattr(item, "_metadata"):  # it is a state dict
                copied._metadata = item._metadata  # type: ignore[attr-defined]
            return copied
        if type(item) in (list, tuple):
            return type(item)(map(move, item))
        return item

    return move(data)
