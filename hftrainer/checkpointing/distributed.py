"""Weights and optimizer states of models that are sharded over processes: whole in one file, or a part from each.

torch keys all states by parameter name here, in FSDP1, FSDP2 and plain models alike, so that each can read the
checkpoints of the others, with any number of processes. All processes must call the functions that communicate.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from hftrainer.checkpointing import names
from hftrainer.compat.reading import data_only, fitting
from hftrainer.parallel.process_group import Awaiting

#: State in a checkpoint of parts → its folder.
PARTS = {"model": f"{names.FSDP_MODEL_NAME}_0", "optimizer": f"{names.FSDP_OPTIMIZER_NAME}_0"}
#: State in a checkpoint of whole states → its file.
WHOLES = {"model": f"{names.FSDP_MODEL_NAME}.bin", "optimizer": f"{names.FSDP_OPTIMIZER_NAME}.bin"}
#: Components that wrappers add to parameter names.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def holds(files: dict[str, str], kind: str, folder: str) -> bool:
    """Whether a checkpoint holds the 'model' or the 'optimizer' in the layout `files`, `PARTS` or `WHOLES`."""
    return os.path.exists(os.path.join(folder, files[kind]))


def _options(model: nn.Module, whole: bool, only_trained: bool = False) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    # On the CPU there is nothing to offload, and FSDP1 crashes if it tries.
    on_cpu = not torch.cuda.is_initialized() and all(each.device.type == "cpu" for each in model.parameters())
    return StateDictOptions(full_state_dict=whole, cpu_offload=not on_cpu, ignore_frozen_params=only_trained)


def model_state(model: nn.Module, *, whole: bool, only_trained: bool = False) -> dict[str, Any]:
    """The weights by name; whole weights are guaranteed only on rank 0.

    Args:
        model: the model.
        whole: gather the whole weights, instead of this process's part.
        only_trained: exclude frozen weights.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from hftrainer.parallel.fsdp_sharding import reshard

    reshard(model)
    state = get_model_state_dict(model, options=_options(model, whole, only_trained))
    return to_be_written(state, model) if whole else state


def to_be_written(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Whole weights, none a view of a larger tensor; the names of a tied parameter share one tensor, written once."""
    state = {name: _without_view(value) for name, value in state.items()}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), _clean(name))
        if same in state and _clean(name) in state:
            state[_clean(name)] = state[same]
    return state


def share_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0, as for replicas; each process has statistics of its own data."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            with Awaiting("the buffers of rank 0"):
                distributed.broadcast(buffer, 0)


def _without_view(value: Any) -> Any:
    """A tensor that is not a view of a larger one, which safetensors would refuse."""
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> dict[str, Any]:
    """The optimizer's state by parameter name; a whole state is guaranteed only on rank 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from hftrainer.parallel.fsdp_sharding import reshard

    reshard(model)
    return get_optimizer_state_dict(model, optimizer, options=_options(model, whole))


def needs_whole_weights(model: nn.Module) -> bool:
    """Whether this process must read whole weights: all of them for FSDP1, else rank 0, which broadcasts them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel) or is_first()


def load_whole_model(model: nn.Module, weights: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load whole weights, in place; returns the missing and the unexpected names."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from hftrainer.parallel.fsdp_sharding import reshard

    if isinstance(model, FullyShardedDataParallel):  # torch's newer API cannot load flat parameters
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            missing, unexpected = model.load_state_dict(weights, strict=False)
        return [_clean(name) for name in missing], list(unexpected)
    reshard(model)
    own = {_clean(name) for name in model.state_dict()}
    differ = sorted(own - weights.keys()), sorted(weights.keys() - own)
    set_model_state_dict(model, weights, options=_broadcast_options(strict=False))
    return differ if is_first() else ([], [])


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state by parameter name, in place, from rank 0."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    _allow_step(optimizer)
    # Not strict: a parameter that was never stepped has no state.
    set_optimizer_state_dict(model, optimizer, state, options=_broadcast_options(strict=False))


def _allow_step(optimizer: torch.optim.Optimizer) -> None:
    """Allow the empty step by which torch makes states: schedule-free optimizers step only in training mode."""
    for group in optimizer.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True


def _broadcast_options(strict: bool) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed.is_initialized(), strict=strict)


def is_first() -> bool:
    """Whether this process reads the states for all: rank 0, or the only process."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


# ---- A part from each process ---------------------------------------------------------------------------------------


def save_parts(states: dict[str, Any], folder: str) -> None:
    """Write this process's part of each state, by 'model' and 'optimizer'.

    Raises:
        OSError: the first one of any process.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    for kind, state in states.items():
        with _plain_errors():
            save({kind: state}, storage_writer=FileSystemWriter(os.path.join(folder, PARTS[kind])))


def load_model_parts(model: nn.Module, folder: str, *, only_trained: bool = False) -> None:
    """Load weights that were written by any number of processes, in place."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = _loaded("model", model_state(model, whole=False, only_trained=only_trained), folder)
    set_model_state_dict(model, state, options=StateDictOptions(strict=not only_trained))


def load_optimizer_parts(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load an optimizer's state that was written by any number of processes, in place."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    _allow_step(optimizer)
    state = _loaded("optimizer", optimizer_state(model, optimizer, whole=False), folder)
    set_optimizer_state_dict(model, optimizer, state)


def _loaded(kind: str, state: dict[str, Any], folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    from hftrainer.checkpointing.parts_reader import PartsReader

    path = os.path.join(folder, PARTS[kind])
    # Parameters that were never stepped have no state, so none was written.
    planner = DefaultLoadPlanner(allow_partial_load=kind == "optimizer")
    with data_only(path), _plain_errors(fitting(path)):
        load({kind: state}, storage_reader=PartsReader(path), planner=planner)
    return state


@contextlib.contextmanager
def _plain_errors(within: contextlib.AbstractContextManager[None] | None = None) -> Iterator[None]:
    """Raise the first error of a process; torch wraps it in an exception that `except Exception` does not catch.

    Args:
        within: where to raise it; errors of the communication are not torch's to wrap, and are raised as they are.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        with within or contextlib.nullcontext():
            raise first from error


# ---- Optimizer states of models that are not sharded ----------------------------------------------------------------


def by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, from torch's own form, which numbers the parameters."""
    names_of = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
    order = [names_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def names_of(model: nn.Module) -> set[str]:
    """The parameter names, without components that wrappers add."""
    return {_clean(name) for name, _ in model.named_parameters()}


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
