"""XLA devices, mainly TPUs: this process's device and rank. torch_xla is imported only when needed."""

from __future__ import annotations

import os
from typing import Any

import torch

from hftrainer.errors import MissingPackage, cause_if_installed
from hftrainer.parallel.devices import INSTALL_TORCH_TPU, INSTALL_TORCH_XLA
from hftrainer.parallel.environment import RankInfo


def device() -> torch.device:
    """The XLA device of this process. Does not initialize it, since SPMD must be enabled first."""
    import_torch_xla()
    return torch.device("xla", 0)


def import_torch_xla() -> Any:
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
        ) from cause_if_installed(error)
    return torch_xla


def print_metrics() -> None:
    """Print torch_xla's counters: compilations, executions, transfers."""
    from torch_xla.debug import metrics

    print(metrics.metrics_report())


def rank_info() -> RankInfo:
    """The ranks of a process that torch_xla has started, one process per core."""
    from torch_xla import runtime

    size, local_size = runtime.world_size(), runtime.local_device_count()
    nodes = -(-size // max(local_size, 1))
    return RankInfo(
        size,
        runtime.global_ordinal(),
        runtime.local_ordinal(),
        local_size,
        nodes=nodes,
        launcher="xla",
        address=os.environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else runtime.get_master_ip()),
        port=int(os.environ.get("MASTER_PORT", RankInfo.port)),
    )


def cores_in_this_process() -> int:
    """Number of cores that this process drives, two on TPU v2 and v3."""
    from torch_xla import runtime

    return int(runtime.addressable_device_count())


def move_model(model: torch.nn.Module, target: torch.device) -> None:
    """Move a model to an XLA device and keep its weights tied. `nn.Module.to` alone unties them."""
    uses: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(id(parameter), []).append((module, name))
    model.to(target)
    for (first_module, first_name), *other_uses in uses.values():
        for module, name in other_uses:
            setattr(module, name, getattr(first_module, first_name))


def to_host(data: Any) -> Any:
    """Copy the XLA tensors in nested containers to CPU memory, each tensor once.

    Tensors that share storage on the device, such as tied weights, share it on the CPU too.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy_item(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "xla":
                return item
            key = int(import_torch_xla()._XLAC._xla_get_tensor_id(item))
            if key not in copies:
                copies[key] = item.detach().cpu()
            return copies[key]
        if isinstance(item, dict):
            copy = type(item)((name, copy_item(value)) for name, value in item.items())
            # Only a state dict has this attribute.
            if hasattr(item, "_metadata"):
                copy._metadata = item._metadata  # type: ignore[attr-defined]
            return copy
        if type(item) in (list, tuple):
            return type(item)(map(copy_item, item))
        return item

    return copy_item(data)
