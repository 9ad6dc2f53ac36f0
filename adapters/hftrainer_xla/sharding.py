"""Shards a model over XLA devices with torch_xla: one process per device, or one process for all (SPMD)."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from hftrainer.base.nested import iterate_arrays
from hftrainer.errors import InvalidConfig, suggest_nearest
from hftrainer.parallel.fsdp_settings import FsdpSettings, XlaSettings
from hftrainer.parallel.plan import LightningPlan
from hftrainer.strategies.fsdp_sharding import broadcast_weights, find_units
from hftrainer_xla import devices as xla

logger = logging.getLogger(__name__)

#: Models whose tensors are already sharded over the devices.
_annotated_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def use_spmd() -> None:
    """Let this process drive all devices. Call it before any tensor is on one.

    Raises:
        InvalidConfig: with several machines, since each would read all the data.
    """
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    if not runtime.is_spmd():
        runtime.use_spmd()
    if runtime.process_count() > 1:
        raise InvalidConfig("fsdp_config['xla_fsdp_v2'] works on one machine, but there are several: remove it.")
    devices = runtime.global_runtime_device_count()
    spmd.set_global_mesh(spmd.Mesh(np.arange(devices), (devices, 1), ("fsdp", "tensor")))


def is_sharded(model: nn.Module) -> bool:
    """Whether torch_xla has sharded a model over processes."""
    return hasattr(model, "get_shard_metadata")


def shard(model: nn.Module, plan: LightningPlan) -> nn.Module:
    """Shard a model, unless it is sharded already. SPMD works in place, other modes return a wrapper.

    Args:
        model: the model.
        plan: the plan, with the settings in `sharding`.

    Raises:
        InvalidConfig: for classes to wrap that the model does not have, and for unknown settings.
    """
    settings = plan.sharding
    assert settings is not None and settings.xla is not None
    if settings.xla.spmd:
        if model not in _annotated_models:
            _annotate(model, settings, settings.xla)
            _annotated_models.add(model)
        return model
    if is_sharded(model):
        return model
    if plan.processes.is_distributed:
        broadcast_weights(model, torch.device("cpu"))
    return _wrap_model(model, settings, settings.xla).to(xla.device())


# ---- One process per device -----------------------------------------------------------------------------------------


def _wrap_model(model: nn.Module, settings: FsdpSettings, xla_settings: XlaSettings) -> nn.Module:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

    wrap = functools.partial(XlaFullyShardedDataParallel, **_wrapper_arguments(xla_settings))
    units = set(find_units(model, settings))
    if model in units:
        raise InvalidConfig("fsdp: the classes to wrap include the full model's: name classes of its submodules.")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in units:
                setattr(parent, name, wrap(checkpoint_module(child) if xla_settings.grad_ckpt else child))
    return wrap(model)


def _wrapper_arguments(xla_settings: XlaSettings) -> dict[str, Any]:
    """The keyword arguments of torch_xla's class. Converts names of dtypes, since JSON has no dtypes."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    allowed = [name for name in inspect.signature(XlaFullyShardedDataParallel).parameters if not name.startswith("_")]
    arguments = dict(xla_settings.settings)
    for name in arguments:
        if name not in allowed or name == "module":
            raise InvalidConfig(f"fsdp_config['xla_fsdp_settings'] has no {name!r}{suggest_nearest(name, allowed)}")
    for name in ("compute_dtype", "buffer_dtype"):
        if isinstance(value := arguments.get(name), str):
            arguments[name] = getattr(torch, value.removeprefix("torch."), None)
            if not isinstance(arguments[name], torch.dtype):
                raise InvalidConfig(f"fsdp_config['xla_fsdp_settings'][{name!r}]={value!r}: torch has no such type.")
    return arguments


def gather_full_model_state(model: Any) -> dict[str, Any]:
    """Gather the full weights by name in CPU memory. All ranks must call it; only rank 0 gets them."""
    from torch_xla.distributed.fsdp.state_dict_utils import consolidate_sharded_state_dicts

    shard = xla.to_host(model.state_dict())
    shards: list[Any] | None = [shard]
    if distributed.is_initialized():
        shards = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(shard, shards)
    if shards is None:
        return {}
    state = consolidate_sharded_state_dicts(shards, model.get_shard_metadata())
    # Clone the values, to drop the padding of the shards.
    return {name: value.clone() for name, value in state.items()}


# ---- One process for all devices ------------------------------------------------------------------------------------


def _annotate(model: nn.Module, settings: FsdpSettings, xla_settings: XlaSettings) -> None:
    """Mark parameters, inputs and outputs as sharded. XLA's compiler shards the computation.

    torch_xla's wrapper annotates a module in its constructor. The wrapper is then dropped, so that the names of the
    weights do not change. Hooks do the work of its `forward`.
    """
    import torch_xla
    from torch_xla.distributed import spmd
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    mesh: Any = spmd.get_global_mesh()
    units = [unit for unit in find_units(model, settings) if unit is not model]
    for unit in units:
        SpmdFullyShardedDataParallel(
            checkpoint_module(unit) if xla_settings.grad_ckpt else unit, shard_output=lambda *_: None
        )
        unit.register_forward_hook(_shard_output)
    for parameter in model.parameters():
        # Parameters outside all units have no specification.
        if not torch_xla._XLAC._get_xla_sharding_spec(parameter):
            longest = max(range(parameter.ndim), key=parameter.shape.__getitem__, default=None)
            axes = tuple("fsdp" if dim == longest else None for dim in range(parameter.ndim))
            spmd.mark_sharding(parameter, mesh, axes)
    model.register_forward_pre_hook(_shard_inputs, with_kwargs=True)
    model.register_forward_hook(_shard_output)
    logger.info("The model is sharded over %d XLA devices, in %d units.", mesh.size(), len(units) + 1)


def _shard_rows(tensor: torch.Tensor) -> None:
    """Shard the rows of a tensor over the devices."""
    from torch_xla.distributed import spmd

    spmd.mark_sharding(tensor, spmd.get_global_mesh(), ("fsdp", *(None,) * (tensor.ndim - 1)))


def _shard_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arrays = iterate_arrays((args, kwargs))
    tensors = [
        array for array in arrays if array.ndim and isinstance(array, torch.Tensor) and array.device.type == "xla"
    ]
    for tensor in tensors:
        # Tensors with the batch's number of samples have one row per sample.
        if tensor.shape[0] == tensors[0].shape[0]:
            _shard_rows(tensor)


def _shard_output(_: nn.Module, __: Any, output: Any) -> None:
    first_tensor = next((array for array in iterate_arrays(output) if array.ndim), None)
    if first_tensor is not None:
        _shard_rows(first_tensor)
