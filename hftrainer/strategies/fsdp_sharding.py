"""Shards a model over processes with torch's FSDP, before the optimizer is created."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from hftrainer.checkpointing.sharded import reshard
from hftrainer.errors import InvalidConfig
from hftrainer.parallel.fsdp_settings import FsdpSettings
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_group import CollectiveCall, device_mesh

logger = logging.getLogger(__name__)

_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def is_sharded(model: Any) -> bool:
    """Whether a model is sharded by FSDP."""
    return isinstance(model, (FullyShardedDataParallel, FSDPModule))


def shard(model: nn.Module, plan: LightningPlan) -> nn.Module:
    """Shard a model, unless it is sharded already. FSDP2 works in place, FSDP1 returns a wrapper.

    Args:
        model: on any device; with `cpu_ram_efficient_loading` only rank 0 needs its weights.
        plan: its `sharding` has the settings; with None, a model with tensor parallelism stays as loaded.

    Raises:
        InvalidConfig: for classes to wrap that the model does not have.
    """
    settings = plan.sharding
    # The model may have been sharded while it was loaded.
    if settings is None or is_sharded(model):
        reshard(model)
        return model
    units = find_units(model, settings)
    if settings.sync_module_states:
        broadcast_weights(model, torch.device(plan.device))
    # As in accelerate, the optimizer steps trained parameters in float32.
    if plan.precision in _HALF:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()
    try:
        sharded = (_shard_fsdp1 if settings.version == 1 else _shard_fsdp2)(model, units, plan, settings)
    except ValueError as error:
        # torch's message names neither the argument nor the parameter.
        raise _explain_error(error, model, settings) from error
    logger.info(
        "The model is sharded by FSDP%d (%s) over %d processes, in %d units.",
        settings.version,
        settings.strategy,
        plan.processes.world_size,
        len(units) + 1,
    )
    if hasattr(model, "generate") and settings.version == 2:
        fsdp.register_fsdp_forward_method(model, "generate")
    return sharded


def _explain_error(error: ValueError, model: nn.Module, settings: FsdpSettings) -> InvalidConfig:
    """Explain torch's error, with the names of the parameters that may cause it."""
    if isinstance(error, InvalidConfig):
        return error
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    advice = f" Reshape {' and '.join(scalars)} to (1,), or train without fsdp." if scalars else ""
    if settings.version == 1 and not scalars:
        advice = " fsdp_config={'version': 2} supports such models."
    return InvalidConfig(f"fsdp: the model cannot be sharded: {str(error).rstrip('.')}.{advice}")


def clip_grad_norm(model: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a sharded model, and return their global norm before clipping."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm, norm_type)
    # torch cannot compute a norm across meshes.
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in group], norm_type) for group in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms, norm_type)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Accumulate gradients locally in the block. The next backward pass outside it reduces them."""
    # With only tensor parallelism, all ranks have the same batch.
    if not isinstance(model, FSDPModule):
        with model.no_sync() if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def summon_full_parameters(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Make full parameters available to methods of the user's model in the block.

    FSDP1 gathers all parameters; FSDP2 gathers them as the model computes.
    """
    is_flat = isinstance(model, FullyShardedDataParallel)
    return FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_flat else contextlib.nullcontext()


def make_device_mesh(plan: LightningPlan) -> DeviceMesh:
    """The device mesh. Its shards span all ranks, one replica, or (hybrid) one node."""
    device_type = torch.device(plan.device).type
    processes = plan.processes
    layout = plan.layout
    assert plan.sharding is not None
    shape = layout.dp_replicate_size, layout.dp_shard_size
    if "hybrid" in plan.sharding.strategy:
        shape = processes.world_size // processes.local_world_size, processes.local_world_size
    elif layout.dp_replicate_size == 1:
        return device_mesh(device_type, (processes.world_size,), ("dp_shard",))
    return device_mesh(device_type, shape, ("dp_replicate", "dp_shard"))


# ---- Units ----------------------------------------------------------------------------------------------------------


def find_units(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules that FSDP gathers one at a time, inner modules first."""
    if settings.auto_wrap_policy == "NO_WRAP":
        return []
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        return _large_modules(model, settings.min_num_params)
    class_names = settings.wrap_classes or tuple(getattr(model, "_no_split_modules", None) or ())
    model_classes = {type(module).__name__ for module in model.modules()}
    missing = [name for name in settings.wrap_classes or () if name not in model_classes]
    if missing:
        raise InvalidConfig(
            f"fsdp_config['transformer_layer_cls_to_wrap']: the model has no {' or '.join(missing)}; it has "
            f"{', '.join(sorted(model_classes - {type(model).__name__}))}."
        )
    units = [module for module in reversed(list(model.modules())) if type(module).__name__ in class_names]
    if not units:
        logger.warning(
            "fsdp: the model does not name classes to wrap, so all parameters are gathered at once. Name classes in "
            "fsdp_config['transformer_layer_cls_to_wrap'], or set 'min_num_params'."
        )
    return units


def _large_modules(model: nn.Module, min_size: int) -> list[nn.Module]:
    """Modules without shared parameters that have at least `min_size` parameters outside their inner units."""
    units: list[nn.Module] = []
    unit_parameters: set[int] = set()
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for module in reversed(list(model.modules())[1:]):
        parameters = [parameter for parameter in module.parameters() if id(parameter) not in unit_parameters]
        has_shared = any(uses[id(parameter)] > 1 for parameter in parameters)
        is_plain = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        size = sum(parameter.numel() for parameter in parameters)
        if parameters and is_plain and not has_shared and size >= min_size:
            units.append(module)
            unit_parameters |= {id(parameter) for parameter in parameters}
    return units


# ---- Before sharding ------------------------------------------------------------------------------------------------


def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Broadcast the weights of rank 0. Tensors on the meta device are allocated first."""
    has_empty = False
    for module in model.modules():
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.to_empty(device=device, recurse=False)
            has_empty = True
    if has_empty and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    needs_device = "nccl" in distributed.get_backend()
    with CollectiveCall("the weights of rank 0"):
        for tensor in (*model.parameters(), *model.buffers()):
            copy = tensor.detach().to(device) if needs_device else tensor.detach()
            distributed.broadcast(copy, 0)
            tensor.data.copy_(copy)


# ---- FSDP1 and FSDP2 ------------------------------------------------------------------------------------------------


def _shard_fsdp1(model: nn.Module, units: list[nn.Module], plan: LightningPlan, settings: FsdpSettings) -> nn.Module:
    device = torch.device(plan.device)
    dtype = _HALF.get(plan.precision)
    if settings.cpu_offload and device.type == "cpu":
        raise InvalidConfig("fsdp='offload' moves parameters from a GPU, but training is on the CPU: remove 'offload'.")
    unit_set = set(units)
    name = settings.strategy.upper()
    prefetch = settings.backward_prefetch
    wrapper = FullyShardedDataParallel(
        model,
        device_mesh=make_device_mesh(plan),
        sharding_strategy=fsdp.ShardingStrategy["_" + name if name.endswith("ZERO2") else name],
        auto_wrap_policy=CustomPolicy(unit_set.__contains__),
        cpu_offload=fsdp.CPUOffload(offload_params=settings.cpu_offload),
        mixed_precision=None if dtype is None else fsdp.MixedPrecision(dtype, dtype, dtype),
        device_id=device,
        use_orig_params=settings.use_orig_params,
        limit_all_gathers=settings.limit_all_gathers,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=None if prefetch == "NO_PREFETCH" else fsdp.BackwardPrefetch[prefetch],
    )
    if settings.activation_checkpointing:
        _checkpoint_activations(wrapper, unit_set, settings)
    return wrapper


def _shard_fsdp2(model: nn.Module, units: list[nn.Module], plan: LightningPlan, settings: FsdpSettings) -> nn.Module:
    if settings.activation_checkpointing:
        units = _checkpoint_activations(model, set(units), settings)
    can_pin = torch.device(plan.device).type != "cpu"
    dtype = _HALF.get(plan.precision)
    options: dict[str, Any] = {
        "mesh": make_device_mesh(plan),
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=can_pin) if settings.cpu_offload else fsdp.OffloadPolicy(),
        # Outputs stay in float32: a half-precision loss has a resolution of 0.02 in logs, and overflows when scaled.
        "mp_policy": fsdp.MixedPrecisionPolicy() if dtype is None else fsdp.MixedPrecisionPolicy(dtype, dtype),
    }
    should_reshard = settings.strategy == "full_shard"
    for unit in units:
        fsdp.fully_shard(unit, reshard_after_forward=should_reshard, **options)
    # The outermost unit is needed first in the backward pass, so torch's default keeps it gathered.
    fsdp.fully_shard(model, reshard_after_forward=None if should_reshard else False, **options)
    return model


def _checkpoint_activations(model: nn.Module, units: set[nn.Module], settings: FsdpSettings) -> list[nn.Module]:
    """Wrap the units for activation checkpointing.

    Returns the wrappers, which FSDP must wrap, so that recomputation does not gather again.
    """
    wrappers: list[nn.Module] = []

    def wrap(module: nn.Module) -> nn.Module:
        wrapper = wrapping.checkpoint_wrapper(module, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT)
        wrappers.append(wrapping.offload_wrapper(wrapper) if settings.activation_checkpointing_offload else wrapper)
        return wrappers[-1]

    wrapping.apply_activation_checkpointing(model, wrap, units.__contains__)
    return wrappers
