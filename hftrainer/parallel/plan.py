"""Defines `LightningPlan`, the settings of a `lightning.Trainer`, and `ParallelLayout`, which splits its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from hftrainer.base.config_files import env_flag
from hftrainer.errors import InvalidConfig, suggest_nearest
from hftrainer.parallel.fsdp_settings import FsdpSettings

if TYPE_CHECKING:
    from hftrainer.parallel.processes import Processes

#: Sizes in `parallelism_config` → why a size above 1 is not supported; None if it is supported.
_SIZES = {
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size", "tp_size")),
    "cp_size": "ring attention needs hooks around the model that Lightning's loop does not have",
    "sp_size": "Ulysses sequence parallelism is part of DeepSpeed, and not supported yet",
}
#: Keys with details of one kind of parallelism. They have no effect: the other kinds have size 1, and tensor
#: parallelism has no details.
_DETAILS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
#: Key of transformers' `DistributedConfig` → unsupported kind of parallelism.
_UNSUPPORTED_SIZES = {"pp_size": "pipeline", "ep_size": "expert"}


@dataclass(frozen=True)
class ParallelLayout:
    """The `dp_replicate_size x dp_shard_size x tp_size` processes of a run; all 1 by default.

    Attributes:
        dp_replicate_size: number of replicas of the sharded model.
        dp_shard_size: processes that shard the parameters of a replica, each with its own batches.
        tp_size: consecutive ranks that split each layer's computation, and get the same batches.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1

    @property
    def total_size(self) -> int:
        """Number of processes."""
        return self.dp_replicate_size * self.dp_shard_size * self.tp_size

    @property
    def shards(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.dp_shard_size > 1

    def __str__(self) -> str:
        named = zip(_SIZES, astuple(self), strict=False)
        return ", ".join(f"{name}={size}" for name, size in named if size > 1) or "one process"


def read_layout(config: Any, model: Any = None, environment: Mapping[str, str] = os.environ) -> ParallelLayout:
    """The layout of `parallelism_config`, else of the launcher, else of the loaded model.

    Args:
        config: a dict, accelerate's `ParallelismConfig`, or None.
        model: the model, if it exists: transformers may have split it while loading.
        environment: the environment variables, which hold the settings of `accelerate launch`.

    Raises:
        InvalidConfig: for unknown keys (the message suggests the nearest), for sizes that are invalid or not supported,
            and if transformers split the model differently.
    """
    requested_layout = _parse_sizes(_read_sizes(config, environment))
    loaded = loaded_layout(model)
    if loaded in (ParallelLayout(), requested_layout):
        return requested_layout
    if requested_layout != ParallelLayout():
        raise InvalidConfig(f"parallelism_config sets {requested_layout}, but the model was loaded with {loaded}.")
    return loaded


def _read_sizes(config: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    if config is None and env_flag("ACCELERATE_USE_PARALLELISM_CONFIG", environment=environment):
        return {name: environment.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") for name in _SIZES}
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        if not hasattr(config, "dp_replicate_size"):
            raise InvalidConfig(f"parallelism_config={config!r}: use a dict of sizes or a ParallelismConfig.")
        return {name: getattr(config, name, 1) for name in _SIZES}
    for name in config:
        if name not in (*_SIZES, *_DETAILS):
            raise InvalidConfig(
                f"parallelism_config: {name!r} is not a valid key{suggest_nearest(name, (*_SIZES, *_DETAILS))}"
            )
    return {name: value for name, value in config.items() if name in _SIZES and value is not None}


def _parse_sizes(sizes: dict[str, Any]) -> ParallelLayout:
    for name, value in sizes.items():
        if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
            raise InvalidConfig(f"parallelism_config[{name!r}]={value!r}: it must be a positive number of processes.")
        if (reason := _SIZES[name]) is not None and int(value) > 1:
            raise InvalidConfig(f"parallelism_config[{name!r}] is not supported: {reason}. Use dp_shard_size or fsdp.")
    return ParallelLayout(**{name: int(value) for name, value in sizes.items() if _SIZES[name] is None})


def loaded_layout(model: Any) -> ParallelLayout:
    """The layout in which transformers has loaded a model.

    Raises:
        InvalidConfig: for pipeline and expert parallelism.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if config is None or not getattr(model, "_is_distributed_loading_by_transformers", False):
        return ParallelLayout()
    for name, kind in _UNSUPPORTED_SIZES.items():
        if (getattr(config, name, None) or 1) > 1:
            raise InvalidConfig(
                f"The model was loaded with {name}={getattr(config, name)}, but {kind} parallelism is not supported "
                "yet: load it with tp_size and fsdp_size only."
            )
    sizes = ("dp_replicate_size", "fsdp_size", "tp_size")
    return ParallelLayout(*((getattr(config, name, None) or 1) for name in sizes))


def check_layout(layout: ParallelLayout, fsdp: FsdpSettings | None, world_size: int) -> list[str]:
    """An error message for each contradiction between a layout and the other arguments."""
    if layout == ParallelLayout():
        return []
    errors = []
    if layout.total_size != world_size:
        errors.append(f"parallelism_config: {layout} needs {layout.total_size} processes, but there are {world_size}.")
    if fsdp is not None and fsdp.version == 1:
        errors.append("parallelism_config needs FSDP2: remove the keys of FSDP1, or parallelism_config.")
    elif fsdp is not None and not layout.shards:
        errors.append(
            f"fsdp shards over dp_shard_size processes, but parallelism_config ({layout}) has one: set dp_shard_size, "
            "or remove fsdp."
        )
    if layout.tp_size > 1 and layout.dp_replicate_size > 1 and not layout.shards:
        errors.append("parallelism_config: with tp_size, replicas must be sharded: set dp_shard_size too.")
    return errors


def check_model_layout(layout: ParallelLayout, model: Any) -> str | None:
    """Why a model does not match a layout, or None. Tensor parallelism is set up while a model is loaded."""
    loaded = loaded_layout(model)
    if loaded == ParallelLayout() and layout.tp_size > 1:
        return (
            f"parallelism_config['tp_size']={layout.tp_size}: each process has the full model. Load it with "
            f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={layout.tp_size}, "
            f"fsdp_size={layout.dp_shard_size})) of transformers, or shard it with fsdp."
        )
    if loaded not in (ParallelLayout(), layout):
        return (
            f"model_init returned a model that was loaded with {loaded}, but the processes have the layout {layout}: "
            f"set parallelism_config to {loaded}."
        )
    return None


#: Lightning's precisions that convert the weights → their type.
TRUE_TYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@dataclass(frozen=True)
class LightningPlan:
    """The training arguments, translated for Lightning.

    Attributes:
        device: the torch device, as a string.
        precision: Lightning's precision; mixed precision applies to the model's forward pass only.
        accumulate_grad_batches: micro-batches per optimizer step.
        deterministic: whether torch is restricted to deterministic kernels.
        default_root_dir: where Lightning callbacks write by default.
        processes: the processes of the run.
        process_group_backend: backend of the process group; None uses the device's default.
        ddp: the user's keyword arguments of `DistributedDataParallel`.
        sharding: how FSDP shards the model; None without FSDP.
        layout: how the processes share the model and the batches.
        deepspeed: DeepSpeed's configuration; None without DeepSpeed.
        async_checkpoint: whether checkpoints are written in the background.
        stop_on_save_error: whether training stops if a checkpoint cannot be written.
        read_once: argument → its value when the plan was made; later changes of these have no effect.
        trainer_overrides: keyword arguments of `lightning.Trainer` from `lightning_config`; they override the others.
    """

    device: str
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
    accumulate_grad_batches: int
    deterministic: bool
    default_root_dir: str
    processes: Processes
    process_group_backend: str | None
    ddp: Mapping[str, Any]
    sharding: FsdpSettings | None
    layout: ParallelLayout
    deepspeed: Any
    async_checkpoint: bool
    stop_on_save_error: bool
    read_once: Mapping[str, Any]
    trainer_overrides: Mapping[str, Any]

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name of the precision."""
        return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(self.precision, "no")

    @property
    def saves_dcp(self) -> bool:
        """Whether weights and optimizer are saved as one of torch's distributed checkpoints."""
        return self.read_once.get("checkpoint_format") == "dcp"

    @property
    def has_fractional_limit(self) -> bool:
        """Whether `lightning_config` limits an evaluation to a fraction of its batches."""
        limits = [value for name, value in self.trainer_overrides.items() if name.startswith("limit_")]
        return any(isinstance(value, float) and value < 1 for value in limits)

    @property
    def spreads_model(self) -> bool:
        """Whether each process has only a part of the model or of the optimizer's state."""
        return (
            (self.sharding is not None and not self.uses_spmd) or self.layout.tp_size > 1 or self.deepspeed is not None
        )

    @property
    def uses_spmd(self) -> bool:
        """Whether one process drives several XLA devices, which shard the model's tensors (SPMD)."""
        return self.sharding is not None and self.sharding.xla is not None and self.sharding.xla.spmd

    def trainer_keywords(self) -> dict[str, Any]:
        """Keyword arguments of `lightning.Trainer` that follow from the training arguments."""
        device = torch.device(self.device)
        # The process sees only one device if that device's index is not the local rank.
        has_one_device = device.index not in (None, self.processes.local_rank)
        return {
            "accelerator": device.type,
            "devices": 1 if has_one_device else self.processes.local_world_size,
            "num_nodes": self.processes.nodes,
            "precision": self.precision,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "deterministic": self.deterministic or None,
            "default_root_dir": self.default_root_dir,
            **self.trainer_overrides,
        }
