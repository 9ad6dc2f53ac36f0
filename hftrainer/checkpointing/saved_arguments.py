"""Reads the values in `training_args.bin`, a pickle, without running its code or creating its objects."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from hftrainer.arguments.accelerator_config import CONSTRUCTION_KEY
from hftrainer.errors import DamagedCheckpoint

#: Attributes that are not arguments: objects of accelerate, a copy of DeepSpeed's configuration, and
#: `use_configured_state`, which only affects how arguments are created.
_OTHERS = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config", CONSTRUCTION_KEY)


class _StandIn(dict[Any, Any]):
    """A placeholder for an object in the pickle. It keeps the object's arguments and state."""

    args: tuple[Any, ...] = ()
    state: Any = None
    __hash__ = object.__hash__  # type: ignore[assignment]  # objects may be keys

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing: each object becomes a `_StandIn`."""

    def find_class(self, module: str, name: str) -> Any:
        return type(f"{module}.{name}", (_StandIn,), {})

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()


def read_arguments(path: str | Path) -> dict[str, Any]:
    """The training arguments in a file of `torch.save`, ours or transformers', as plain values, without tokens.

    Raises:
        DamagedCheckpoint: if it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _fields(_Unpickler(io.BytesIO(archive.read(pickled))).load().state)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedCheckpoint(
            f"{path} cannot be read ({error!r}): save the arguments again with trainer.save_model()."
        ) from error


def _fields(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value)
        for name, value in state.items()
        if not (name.startswith("_") or name.endswith("_token") or name in _OTHERS)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, type):  # such as torch.float32
        return value.__name__
    if isinstance(value, _StandIn):
        if value.state is not None:
            return _fields(value.state) if isinstance(value.state, dict) else _plain(value.state)
        args = [_plain(item) for item in value.args]
        # An enum has one argument, its value.
        return args[0] if len(args) == 1 else f"{type(value).__name__}{tuple(args)}"
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
