"""How processes share model and batches, by `parallelism_config` or by how the model was loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import WrongConfig
from hftrainer.parallel.config_files import env_flag
from hftrainer.parallel.fsdp.settings import FsdpSettings, nearest

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
#: Keys with details of a kind of parallelism, without effect while its size is 1; tensor parallelism needs none.
_DETAILS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
_REFUSED = {
    "cp_size": "ring attention needs hooks around the model that Lightning's loop does not have",
    "sp_size": "Ulysses sequence parallelism is part of DeepSpeed, and not supported yet",
}
#: Other kinds of parallelism of a loaded model, by their key in transformers' `DistributedConfig`.
_LOADED_REFUSED = {"pp_size": "pipeline", "ep_size": "expert"}


@dataclass(frozen=True)
class Layout:
    """The `dp_replicate_size x dp_shard_size x tp_size` processes of a run; all 1 by default.

    Attributes:
        dp_replicate_size: copies of the sharded model.
        dp_shard_size: processes that shard the parameters of a copy, each with its own batches.
        tp_size: neighbouring ranks that split each layer's computation, and get the same batches.
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


def read_layout(given: Any, model: Any = None, environment: Mapping[str, str] = os.environ) -> Layout:
    """The layout of `parallelism_config`, or else of the launcher, or else of the loaded model.

    Args:
        given: a dict, accelerate's `ParallelismConfig`, or None.
        model: the model, if it exists: transformers may have split it while loading.
        environment: the environment variables, which hold the settings of `accelerate launch`.

    Raises:
        WrongConfig: for unknown keys (the message suggests the nearest), for sizes that are invalid or not supported,
            and if the model has been split differently.
    """
    asked = _checked(_given(given, environment))
    loaded = loaded_layout(model)
    if loaded == Layout() or loaded == asked:
        return asked
    if asked != Layout():
        raise WrongConfig(f"parallelism_config sets {_shown(asked)}, but the model was loaded with {_shown(loaded)}.")
    return loaded


def loaded_layout(model: Any) -> Layout:
    """The layout in which transformers has loaded a model.

    Raises:
        WrongConfig: for pipeline and expert parallelism.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if config is None or not getattr(model, "_is_distributed_loading_by_transformers", False):
        return Layout()
    for name, kind in _LOADED_REFUSED.items():
        if (getattr(config, name, None) or 1) > 1:
            raise WrongConfig(
                f"The model was loaded with {name}={getattr(config, name)}, but {kind} parallelism is not supported "
                "yet: load it with tp_size and fsdp_size only."
            )
    return Layout(*((getattr(config, name, None) or 1) for name in ("dp_replicate_size", "fsdp_size", "tp_size")))


def check_layout(layout: Layout, fsdp: FsdpSettings | None, world_size: int) -> list[str]:
    """A sentence for each contradiction between a layout and the other arguments."""
    if layout == Layout():
        return []
    found = []
    if layout.total_size != world_size:
        found.append(
            f"parallelism_config: {_shown(layout)} needs {layout.total_size} processes, but there are {world_size}."
        )
    if fsdp is not None and fsdp.version == 1:
        found.append("parallelism_config needs FSDP2: leave out the keys of FSDP1, or leave out parallelism_config.")
    elif fsdp is not None and not layout.shards:
        found.append(
            f"fsdp shards over dp_shard_size processes, but parallelism_config ({_shown(layout)}) has one: set "
            "dp_shard_size, or leave out fsdp."
        )
    if layout.tp_size > 1 and layout.dp_replicate_size > 1 and not layout.shards:
        found.append("parallelism_config: with tp_size, copies must be sharded: set dp_shard_size too.")
    return found


def check_model_layout(layout: Layout, model: Any) -> str | None:
    """Why a model cannot be trained in a layout, or None: tensor parallelism is set up while a model is loaded."""
    loaded = loaded_layout(model)
    if loaded == Layout() and layout.tp_size > 1:
        return (
            f"parallelism_config['tp_size']={layout.tp_size}: each process has the whole model. Load it with "
            f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={layout.tp_size}, "
            f"fsdp_size={layout.dp_shard_size})) of transformers, or shard it with fsdp."
        )
    if loaded not in (Layout(), layout):
        return (
            f"model_init returned a model that was loaded with {_shown(loaded)}, but the layout of the processes is "
            f"{_shown(layout)}: set parallelism_config to the former."
        )
    return None


def _given(given: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    if given is None and env_flag("ACCELERATE_USE_PARALLELISM_CONFIG", environment=environment):
        return {name: environment.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") for name in _SIZES}
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if not hasattr(given, _SIZES[0]):
            raise WrongConfig(f"parallelism_config={given!r}: give a dict of sizes, or accelerate's ParallelismConfig.")
        return {name: getattr(given, name, 1) for name in _SIZES}
    for name in given:
        if name not in (*_SIZES, *_DETAILS):
            raise WrongConfig(f"parallelism_config: {name!r} is not a valid key{nearest(name, (*_SIZES, *_DETAILS))}")
    return {name: value for name, value in given.items() if name in _SIZES and value is not None}


def _checked(sizes: dict[str, Any]) -> Layout:
    for name, value in sizes.items():
        if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
            raise WrongConfig(f"parallelism_config[{name!r}]={value!r}: it must be a number of processes, at least 1.")
    for name, reason in _REFUSED.items():
        if int(sizes.pop(name, 1)) > 1:
            raise WrongConfig(f"parallelism_config[{name!r}] is not supported: {reason}. Use dp_shard_size or fsdp.")
    return Layout(**{name: int(value) for name, value in sizes.items()})


def _shown(layout: Layout) -> str:
    named = {name: getattr(layout, name) for name in _SIZES[:3]}
    return ", ".join(f"{name}={size}" for name, size in named.items() if size > 1) or "one process"
