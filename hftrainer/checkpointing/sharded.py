"""Saves and loads states of sharded models: one full file, or a shard per process.

All states are keyed by parameter name, so that FSDP1, FSDP2 and plain models can read each other's checkpoints, with
any number of processes. All processes must call the functions that communicate.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType

from hftrainer.base.content_checks import check_file_name, name_file_in_errors
from hftrainer.base.safe_loading import load_torch_file, projectors, read_pickle, read_weights, weights_only
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.layout import FULL_STATE_FILES, SHARD_FOLDERS, has_state_files
from hftrainer.checkpointing.weights import LoadResult, first_file, weights_files
from hftrainer.compat import libraries
from hftrainer.compat.libraries import bare_name
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint, UnsupportedArgument
from hftrainer.parallel.process_group import CollectiveCall

# torch warns when no process group exists, but one process may write and read all shards.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

#: Module → classes and functions that the pickled list of shards may use.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}
_ALLOWED = frozenset(f"{module}.{name}" for module, kinds in _CLASSES.items() for name in kinds)


def _state_dict_options(model: nn.Module, full: bool, only_trainable: bool = False) -> Any:
    # On the CPU there is nothing to offload, and FSDP1 crashes if it tries.
    on_cpu = not torch.cuda.is_initialized() and all(parameter.device.type == "cpu" for parameter in model.parameters())
    return StateDictOptions(full_state_dict=full, cpu_offload=not on_cpu, ignore_frozen_params=only_trainable)


def model_state(model: nn.Module, *, full: bool, only_trainable: bool = False) -> dict[str, Any]:
    """The weights by name; full weights are guaranteed only on rank 0.

    Args:
        model: the model.
        full: gather the full weights, instead of this process's shard.
        only_trainable: exclude frozen weights.
    """
    reshard(model)
    state = state_dict.get_model_state_dict(model, options=_state_dict_options(model, full, only_trainable))
    return prepare_for_saving(state, model) if full else state


def prepare_for_saving(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Prepare full weights for saving: clone views, and let tied parameters share one tensor."""
    for name, value in state.items():
        # torch.save would write the full storage of a view.
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
            state[name] = value.clone()
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(id(parameter), bare_name(name))
        if first_name in state and bare_name(name) in state:
            state[bare_name(name)] = state[first_name]
    return state


def reshard(model: nn.Module) -> None:
    """Reshard all parameters. FSDP2 keeps them gathered after a forward pass without a backward pass.

    The optimizer holds the sharded parameters, not the gathered ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0, as DDP does. Each rank has other statistics."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            with CollectiveCall("the buffers of rank 0"):
                distributed.broadcast(buffer, 0)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> dict[str, Any]:
    """The optimizer's state by parameter name; a full state is guaranteed only on rank 0."""
    reshard(model)
    return state_dict.get_optimizer_state_dict(model, optimizer, options=_state_dict_options(model, full))


def load_sharded_weights(model: nn.Module, folder: str, *, only_trainable: bool = False) -> LoadResult | None:
    """Load the weights in `folder` into a sharded model. All processes must call this function.

    Args:
        model: the model.
        folder: a checkpoint of any model, sharded or not.
        only_trainable: do not load frozen weights, as with adapters.

    Returns:
        Missing and unexpected weights; None for a folder of shards, where all must match.

    Raises:
        CheckpointNotFound: if there are no weights, or only adapters, which a sharded model cannot load.
    """
    if layout.find_shard_folder("model", folder) is not None:
        load_model_shards(model, folder, only_trainable=only_trainable)
        return None
    full_file = first_file(folder, FULL_STATE_FILES["model"])
    paths = weights_files(folder) if full_file is None else [full_file]
    if not paths:
        raise CheckpointNotFound(f"There are no weights in {folder} that a sharded model can load.")
    # FSDP2 gets the weights from rank 0.
    if not (isinstance(model, FullyShardedDataParallel) or _is_reader()):
        paths = []
    weights = {name: value for path in paths for name, value in read_weights(path).items()}
    if full_file is None and paths and not {bare_name(name) for name, _ in model.named_parameters()} <= weights.keys():
        weights = _convert_weights(model, folder) or weights
    missing, unexpected = _load_full_weights(model, weights)
    return LoadResult([] if only_trainable else missing, unexpected)


def _convert_weights(model: nn.Module, folder: str) -> dict[str, torch.Tensor]:
    """The weights in a folder under a transformers model's names; empty for other models."""
    unwrapped: Any = getattr(model, "_fsdp_wrapped_module", model)
    if not libraries.is_transformers_model(unwrapped):
        return {}
    # FSDP2 creates a new class: find the original one.
    original_class: Any = next(kind for kind in type(unwrapped).__mro__ if not issubclass(kind, FSDPModule))
    return original_class.from_pretrained(folder, config=unwrapped.config).state_dict()


def _load_full_weights(model: nn.Module, weights: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load full weights in place. Returns the missing and the unexpected names."""
    # torch's newer API cannot load flat parameters.
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            missing, unexpected = model.load_state_dict(weights, strict=False)
        return [bare_name(name) for name in missing], list(unexpected)
    reshard(model)
    expected = {bare_name(name) for name in model.state_dict()}
    differences = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    state_dict.set_model_state_dict(model, weights, options=_broadcast_options())
    return differences if _is_reader() else ([], [])


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, read_unsharded: Callable[[], dict[str, Any]]
) -> None:
    """Load the optimizer's state in place. All processes must call this function.

    Args:
        model: the model that the optimizer trains, sharded or not.
        optimizer: the optimizer.
        folder: a checkpoint of any number of processes.
        read_unsharded: reads the state of a model that was not sharded, in which torch numbers the parameters.
    """
    # torch initializes the states with a step, which schedule-free optimizers refuse in evaluation mode.
    for group in optimizer.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True
    if (shard_folder := layout.find_shard_folder("optimizer", folder)) is not None:
        state = optimizer_state(model, optimizer, full=False)
        if os.path.basename(shard_folder) == layout.DCP_FOLDER:
            check_unread_states(state["state"], shard_folder)
            _unflatten_optimizer_state(_load_shards("optimizer", _flatten_optimizer_state(state), shard_folder), state)
        else:
            _load_shards("optimizer", state, shard_folder)
        state_dict.set_optimizer_state_dict(model, optimizer, state)
        _remove_unstored(model, optimizer, state, shard_folder)
        return
    if has_state_files(FULL_STATE_FILES, "optimizer", folder):
        state = load_torch_file(os.path.join(folder, FULL_STATE_FILES["optimizer"])) if _is_reader() else {}
    else:
        state = _key_by_name(read_unsharded(), model, optimizer)
    # Not strict: a parameter that was never stepped has no state.
    state_dict.set_optimizer_state_dict(model, optimizer, state, options=_broadcast_options())


def _broadcast_options() -> Any:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed.is_initialized(), strict=False)


def _is_reader() -> bool:
    """Whether this process reads the states for all others: rank 0, or the only process."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


# ---- A shard from each process --------------------------------------------------------------------------------------


def save_shards(states: dict[str, Any], folder: str, group: Any = None) -> None:
    """Write this process's shard of each state, as transformers does.

    Args:
        states: the states 'model' and 'optimizer'.
        folder: the checkpoint.
        group: the process group that coordinates the write; None for the default one.

    Raises:
        OSError: the first error of any process.
    """
    for state_name, state in states.items():
        _save({state_name: state}, os.path.join(folder, SHARD_FOLDERS[state_name]), group)


def states_for_dcp(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, shards: bool = True) -> dict[str, Any]:
    """The weights by name and the optimizer's state, as in torchtitan.

    Args:
        model: the model.
        optimizer: its optimizer; None for weights only.
        shards: whether this process has only a part of both.
    """
    only_trainable = libraries.is_peft(getattr(model, "_fsdp_wrapped_module", model))
    states = model_state(model, full=False, only_trainable=only_trainable)
    if optimizer is not None:
        # torch's function takes a step if there is no state. FSDP1 needs it, since only some ranks may have a state.
        if isinstance(model, FullyShardedDataParallel) or (shards and optimizer.state):
            state = optimizer_state(model, optimizer, full=False)
        else:
            state = _key_by_name(optimizer.state_dict(), model, optimizer)
        states["optimizer"] = _flatten_optimizer_state(state)
    return states


def _flatten_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with keys such as 'state.NAME.exp_avg' and 'param_groups.NAME.lr'.

    This is torch's flat form, which torch itself cannot read if a group is empty.
    """
    flat = {f"state.{name}.{key}": value for name, values in state["state"].items() for key, value in values.items()}
    for group in state["param_groups"]:
        # GrokAdamW keeps tensors by parameter in a setting, which no checkpoint can restore. Groups have no names here,
        # since each parameter has its settings under its own name.
        excluded = ("params", "name", "param_names")
        settings = {key: value for key, value in group.items() if key not in excluded and not _has_parameters(value)}
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()}
    return flat


def _has_parameters(setting: Any) -> bool:
    return isinstance(setting, dict) and any(isinstance(key, torch.Tensor) for key in setting)


def _unflatten_optimizer_state(flat: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the values of a flat state into a nested one with the same names."""
    for name, values in state["state"].items():
        values.update({key: flat[f"state.{name}.{key}"] for key in values})
    for group in state["param_groups"]:
        for name in group["params"][:1]:
            group.update({key: flat.get(f"param_groups.{name}.{key}", value) for key, value in group.items()})


def check_unread_states(state: dict[str, dict[str, Any]], path: str) -> None:
    """Refuse stored states that torch would not load into a sharded model's optimizer.

    The optimizer lacks such states before its first step.

    Args:
        state: parameter name → its states that torch reads.
        path: the folder of shards.

    Raises:
        UnsupportedArgument: if other states of these parameters are stored.
    """
    for key in _ShardsReader(path).read_metadata().state_dict_metadata:
        name = _find_parameter(key.removeprefix("optimizer."), state)
        state_name = key.removeprefix(f"optimizer.state.{name}.").partition(".")[0]
        if name is not None and state_name not in state[name]:
            raise UnsupportedArgument(
                f"{path} holds {state_name!r} of {name}, which this optimizer cannot read for a sharded model: train "
                "on one device or with DDP, or write checkpoints with checkpoint_format='transformers'."
            )


def _remove_unstored(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], path: str) -> None:
    """Remove the states that torch has initialized for parameters without a stored state."""
    keys = (key.removeprefix("optimizer.") for key in _ShardsReader(path).read_metadata().state_dict_metadata)
    stored_names = {_find_parameter(key, state["state"]) for key in keys}
    for name, parameter in model.named_parameters():
        if bare_name(name) in state["state"].keys() - stored_names:
            optimizer.state.pop(parameter, None)


def read_dcp_optimizer(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read the full optimizer state of an unsharded model, with parameters numbered as in torch.

    Args:
        path: the folder of shards.
        model: the model.
        optimizer: its optimizer. Its current state is ignored: before the first step it may hold other keys.
    """
    states: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"optimizer"})
    with weights_only(path, projectors()), _unwrap_errors(name_file_in_errors(path)):
        _load_state_dict(states, storage_reader=_ShardsReader(path), planner=planner, no_dist=True)
    flat = states["optimizer"]
    # A script may have written torch's nested form.
    if "state" in flat:
        flat = _flatten_optimizer_state(flat)
    order = _parameter_names(model, optimizer)
    numbers = {name: number for number, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        if (name := _find_parameter(key, numbers)) is not None:
            state.setdefault(numbers[name], {})[key.removeprefix(f"state.{name}.")] = value
    groups: list[dict[str, Any]] = []
    start = 0
    for group in optimizer.param_groups:
        parameter_count = len(group["params"])
        prefix = f"param_groups.{order[start]}." if parameter_count else ""
        settings = {key.removeprefix(prefix): value for key, value in flat.items() if prefix and key.startswith(prefix)}
        groups.append({**(settings or group), "params": [*range(start, start + parameter_count)]})
        start += parameter_count
    return {"state": state, "param_groups": groups}


def _find_parameter(key: str, parameter_names: Container[str]) -> str | None:
    """The parameter in a key 'state.NAME.exp_avg'; None for groups and unknown parameters."""
    section, *name_parts = key.split(".")
    candidates = (".".join(name_parts[:count]) for count in range(1, len(name_parts)))
    return next((name for name in candidates if name in parameter_names), None) if section == "state" else None


def save_dcp(states: dict[str, Any], folder: str, group: Any = None, *, is_only_writer: bool = False) -> None:
    """Write the states of `states_for_dcp` in torch's distributed checkpoint format (DCP).

    Args:
        states: the states.
        folder: the checkpoint.
        group: the process group that coordinates the write; None for the default one.
        is_only_writer: whether only this process writes.
    """
    _save(states, os.path.join(folder, layout.DCP_FOLDER), group, is_only_writer=is_only_writer)


def _save(states: dict[str, Any], path: str, group: Any, *, is_only_writer: bool = False) -> None:
    with _unwrap_errors():
        # `save` accepts `no_dist` only in newer releases; torch's own tool also calls this function.
        no_dist = is_only_writer or not distributed.is_initialized()
        _save_state_dict(states, FileSystemWriter(path), group, no_dist=no_dist)


def load_model_shards(model: nn.Module, folder: str, *, only_trainable: bool = False) -> None:
    """Load weights in place, whatever number of processes wrote them."""
    shard_folder = layout.find_shard_folder("model", folder)
    assert shard_folder is not None
    state = _load_shards("model", model_state(model, full=False, only_trainable=only_trainable), shard_folder)
    state_dict.set_model_state_dict(model, state, options=StateDictOptions(strict=not only_trainable))


def holds_optimizer(shard_folder: str) -> bool:
    """Whether a folder of shards holds an optimizer's state."""
    stored = _ShardsReader(shard_folder).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in stored)


def _load_shards(state_name: str, state: dict[str, Any], shard_folder: str) -> dict[str, Any]:
    reader = _ShardsReader(shard_folder)
    stored = reader.read_metadata().state_dict_metadata
    # We and torchtitan store the weights under their plain names. Scripts often write {"model": ...}.
    is_bare = state_name == "model" and sum(name in stored for name in state) > sum(
        f"{state_name}.{name}" in stored for name in state
    )
    # Parameters that were never stepped have no state, so none was written.
    planner = DefaultLoadPlanner(allow_partial_load=state_name == "optimizer")
    with weights_only(shard_folder, projectors()), _unwrap_errors(name_file_in_errors(shard_folder)):
        load(state if is_bare else {state_name: state}, storage_reader=reader, planner=planner)
    return state


@contextlib.contextmanager
def _unwrap_errors(context: contextlib.AbstractContextManager[None] | None = None) -> Iterator[None]:
    """Raise the first error of a process without torch's wrapper.

    `except Exception` does not catch the wrapper. Communication errors have none, and are raised unchanged.

    Args:
        context: a context in which to raise the error.
    """
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        with context or contextlib.nullcontext():
            raise first from error


class _ShardsReader(FileSystemReader):
    """torch's reader of a folder of shards.

    Args:
        shard_folder: the folder, such as `optimizer_0` or `dcp` in a checkpoint.

    Raises:
        UnsafeCheckpoint: if its list of shards holds an object of a class that torch does not write.
        DamagedCheckpoint: if the list cannot be read, or names a file that is not in the folder.
    """

    def __init__(self, shard_folder: str) -> None:
        super().__init__(shard_folder)
        path = os.path.join(shard_folder, layout.LIST_OF_SHARDS)
        if not os.path.isfile(path):
            raise DamagedCheckpoint(f"{path} is missing{DamagedCheckpoint.REMEDY}")
        self._metadata: Metadata = read_pickle(path, _ALLOWED)
        with name_file_in_errors(path):
            _check_list(self._metadata, shard_folder)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    # Without a parameter for the rank, torch does not look for a separate list for each rank.
    def read_metadata(self) -> Metadata:
        """The list of shards."""
        return self._metadata


def _check_list(metadata: Any, shard_folder: str) -> None:
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is of type {type(metadata).__name__}")
    stored = metadata.state_dict_metadata
    if not isinstance(stored, Mapping) or not all(isinstance(name, str) for name in stored):
        raise TypeError("state_dict_metadata is no dict of names")
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(shard_folder) if entry.is_file()}
    for shard in metadata.storage_data.values():
        name = check_file_name(shard.relative_path)
        if name not in sizes:
            raise ValueError(f"{name!r} is missing")
        if not 0 <= shard.offset <= shard.offset + shard.length <= sizes[name]:
            raise ValueError(f"{name!r} has {sizes[name]} bytes, too few for {shard}")


# ---- Optimizer states of models that are not sharded ----------------------------------------------------------------


def _key_by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Convert an optimizer's state from parameter indices to parameter names."""
    order = _parameter_names(model, optimizer)
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order of their numbers."""
    names_by_id = {id(parameter): bare_name(name) for name, parameter in model.named_parameters()}
    return [names_by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
