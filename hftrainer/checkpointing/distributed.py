"""Weights and optimizer states of models that are spread over processes: whole in one file, or a part from each.

torch names everything by parameter here, whatever holds it (FSDP1, FSDP2, a plain model), so that a checkpoint of any
of them can be read by any other, with any number of processes. All processes must call what talks to the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from hftrainer.checkpointing import names

#: What is in a checkpoint of parts → the folder with it.
PARTS = {"model": f"{names.FSDP_MODEL_NAME}_0", "optimizer": f"{names.FSDP_OPTIMIZER_NAME}_0"}
#: What is in a checkpoint of whole states → the file with it.
WHOLES = {"model": f"{names.FSDP_MODEL_NAME}.bin", "optimizer": f"{names.FSDP_OPTIMIZER_NAME}.bin"}
#: What wrappers add to the names of parameters.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def holds(files: dict[str, str], kind: str, folder: str) -> bool:
    """Whether a checkpoint holds the 'model' or the 'optimizer' in this way, `PARTS` or `WHOLES`."""
    return os.path.exists(os.path.join(folder, files[kind]))


def _options(model: nn.Module, whole: bool, only_trained: bool = False) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    # On the CPU there is nothing to move, and FSDP1 crashes when it is asked to.
    on_cpu = not torch.cuda.is_initialized() and all(each.device.type == "cpu" for each in model.parameters())
    return StateDictOptions(full_state_dict=whole, cpu_offload=not on_cpu, ignore_frozen_params=only_trained)


def model_state(model: nn.Module, *, whole: bool, only_trained: bool = False) -> dict[str, Any]:
    """The weights by name; only the first process can count on whole ones.

    Args:
        model: the model.
        whole: gather them, instead of this process's part.
        only_trained: leave out what is frozen.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from hftrainer.parallel.fsdp.sharding import reshard

    reshard(model)
    state = get_model_state_dict(model, options=_options(model, whole, only_trained))
    return to_be_written(state, model) if whole else state


def to_be_written(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Whole weights that are no parts of larger tensors; the names of one parameter have one tensor, written once."""
    state = {name: _alone(value) for name, value in state.items()}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), _clean(name))
        if same in state and _clean(name) in state:
            state[_clean(name)] = state[same]
    return state


def share_buffers(model: nn.Module) -> None:
    """Give all processes the buffers of the first, as replicas have them; each has statistics of its own data."""
    if distributed.is_initialized():
        for buffer in model.buffers():
            distributed.broadcast(buffer, 0)


def _alone(value: Any) -> Any:
    """A tensor that is no part of a larger one, which safetensors would not write."""
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value
    return value.clone()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters; only the first process can count on a whole one."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from hftrainer.parallel.fsdp.sharding import reshard

    reshard(model)
    return get_optimizer_state_dict(model, optimizer, options=_options(model, whole))


def needs_whole_weights(model: nn.Module) -> bool:
    """Whether this process has to read whole weights: for FSDP1 all, else the first, which sends them to the others."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel) or is_first()


def load_whole_model(model: nn.Module, weights: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load whole weights, in place; returns the names that the model has alone, and those that it lacks."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from hftrainer.parallel.fsdp.sharding import reshard

    if isinstance(model, FullyShardedDataParallel):  # torch's newer way cannot load flat parameters
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            missing, unexpected = model.load_state_dict(weights, strict=False)
        return [_clean(name) for name in missing], list(unexpected)
    reshard(model)
    own = {_clean(name) for name in model.state_dict()}
    differ = sorted(own - weights.keys()), sorted(weights.keys() - own)
    set_model_state_dict(model, weights, options=_from_first(strict=False))
    return differ if is_first() else ([], [])


def load_whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state by names, in place; that of the first process."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    _let_step(optimizer)
    # Not strict: a parameter that no step has used has no state.
    set_optimizer_state_dict(model, optimizer, state, options=_from_first(strict=False))


def _let_step(optimizer: torch.optim.Optimizer) -> None:
    """Let torch make states by an empty step, which schedule-free optimizers take in their training mode only."""
    for group in optimizer.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True


def _from_first(strict: bool) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=distributed.is_initialized(), strict=strict)


def is_first() -> bool:
    """Whether this process has to read what all load."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


# ---- A part from each process ---------------------------------------------------------------------------------------


def save_parts(states: dict[str, Any], folder: str) -> None:
    """Write this process's part of each state, by 'model' and 'optimizer'.

    Raises:
        OSError: the first that one of the processes ran into.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    for kind, state in states.items():
        with _plain_errors():
            save({kind: state}, storage_writer=FileSystemWriter(os.path.join(folder, PARTS[kind])))


def load_model_parts(model: nn.Module, folder: str, *, only_trained: bool = False) -> None:
    """Load weights that any number of processes have written, in place."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = _loaded("model", model_state(model, whole=False, only_trained=only_trained), folder)
    set_model_state_dict(model, state, options=StateDictOptions(strict=not only_trained))


def load_optimizer_parts(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load an optimizer's state that any number of processes have written, in place."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    _let_step(optimizer)
    state = _loaded("optimizer", optimizer_state(model, optimizer, whole=False), folder)
    set_optimizer_state_dict(model, optimizer, state)


def _loaded(kind: str, state: dict[str, Any], folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _plain_errors():
        reader = FileSystemReader(os.path.join(folder, PARTS[kind]))
        # What no step has used has no state, and was not written.
        planner = DefaultLoadPlanner(allow_partial_load=kind == "optimizer")
        load({kind: state}, storage_reader=reader, planner=planner)
    return state


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong in a process; torch gathers it into an exception that no `except Exception` sees."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error


# ---- Optimizer states of models that are not spread -----------------------------------------------------------------


def by_name(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by the parameters' names, from torch's own form, which numbers them."""
    names_of = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
    order = [names_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def names_of(model: nn.Module) -> set[str]:
    """The names of the parameters, without what wrappers add."""
    return {_clean(name) for name, _ in model.named_parameters()}


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
