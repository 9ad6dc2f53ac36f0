"""Checks of a checkpoint's files: whether each can be read, and whether its values can be those of this run.

Wrong values would otherwise raise an error later, in a step of training, that does not name the file.
"""

from __future__ import annotations

import json
import os
import reprlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from hftrainer.checkpointing import names
from hftrainer.compat.reading import load_torch_file
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint

#: Suffixes of files that `torch.save` writes.
_TORCH = (".pt", ".pth", ".bin")
#: First bytes and length in bytes of the last record of a `torch.save` archive, which has no comment.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22

_NUMBERS = (int, float, torch.Tensor)
#: Types of values that must not be None in the checkpoint.
_NEEDED = (*_NUMBERS, list, tuple)
#: Booleans of torch's optimizers for which None lets torch choose.
_MAYBE_NONE = ("fused", "foreach")
#: Adam's state of each parameter that it has updated.
_OF_ADAM = {"step", "exp_avg", "exp_avg_sq"}
#: Optimizer settings of every torch release. Later releases added settings, which have defaults.
_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"}


# ---- Files ---------------------------------------------------------------------------------------------------------


def has_format(path: Path) -> bool:
    """Whether a file's name shows a format that can be checked."""
    return path.suffix in (".safetensors", ".json", *_TORCH)


def unreadable_reason(path: Path, *, load: bool = True) -> str | None:
    """Why a file cannot be read, to be appended to its path; None if it can be read.

    Args:
        path: the file.
        load: also load files of `torch.save`, and read text files; otherwise check only how the former begin and end.
    """
    if path.suffix == ".json":
        return _why_not_json(path)
    if path.suffix in _TORCH:
        return _why_not_torch(path, load)
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt"):  # compares the file's length with its header
                return None
        # Files of other formats are read as text: vocabularies, templates, model cards.
        return None if not load or path.read_text(encoding="utf-8") else "is empty"
    except UnicodeDecodeError:
        return "is not text, and its format cannot be checked"
    except Exception as error:
        if path.suffix != ".safetensors":
            raise
        return f"cannot be read ({error})"  # the library raises several exception classes


def _why_not_json(path: Path) -> str | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"cannot be read ({error})"
    if path.name == names.TRAINER_STATE_NAME and not (isinstance(value, dict) and "global_step" in value):
        return "does not contain a state"
    if path.name.endswith(".index.json") and not (
        isinstance(value, dict) and isinstance(value.get("weight_map"), dict)
    ):
        return "does not list shards"
    return None


def _why_not_torch(path: Path, load: bool) -> str | None:
    try:
        is_archive = zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # the file claims to continue in another file
        is_archive = False
    with path.open("rb") as file:
        if not (begin := file.read(1)):
            return "is empty"
        if not is_archive and begin != b"\x80":  # files from before torch 1.6 are pickles, not archives
            return "is truncated"
        if not load:
            return None
        if is_archive:
            file.seek(-_END_LENGTH, os.SEEK_END)
            if not file.read().startswith(_END_OF_ARCHIVE):
                return "has extra bytes at its end"
    try:
        load_torch_file(str(path), mmap=True)
    except UnsafeCheckpoint:  # such as training_args.bin: the archive can be checked without unpickling its objects
        damaged = _damaged_member(path) if is_archive else None
        return None if damaged is None else f"is damaged at {damaged}"
    except DamagedCheckpoint as error:
        return f"cannot be read ({error.__cause__})"
    return None


def _damaged_member(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return str(error)


# ---- Values --------------------------------------------------------------------------------------------------------


def check_values(found: Any, now: Any, name: str = "the state") -> None:
    """Check that plain values have the types of those that they replace; additional values are not checked.

    Raises:
        TypeError: the error names the value.
    """
    if isinstance(now, Mapping):
        if not isinstance(found, Mapping):
            raise TypeError(f"{name} is {reprlib.repr(found)}")
        if missing := [key for key in now if key not in found]:
            raise TypeError(f"{name} lacks {missing[0]!r}")
        for key, value in now.items():
            check_values(found[key], value, str(key))
    elif not _is_like(found, now) and not (found is None and name in _MAYBE_NONE):
        raise TypeError(f"{name} is {reprlib.repr(found)}, but must have the type of {reprlib.repr(now)}")


def _is_like(found: Any, now: Any) -> bool:
    if now is None or (found is None and not isinstance(now, _NEEDED)):
        return not isinstance(found, torch.Tensor) or found.numel() == 1
    # A list has a value for each parameter group; callbacks may have added groups.
    if isinstance(now, list):
        enough = isinstance(found, (list, tuple)) and len(found) >= len(now)
        return enough and all(_is_like(each, now[0]) for each in found if now)
    if isinstance(now, tuple):
        same = isinstance(found, (list, tuple)) and len(found) == len(now)
        return same and all(_is_like(one, each) for one, each in zip(found, now, strict=True))
    if isinstance(now, _NUMBERS) and not isinstance(now, bool):
        return isinstance(found, _NUMBERS) and (not isinstance(found, torch.Tensor) or found.numel() == 1)
    return isinstance(found, type(now))


def check_optimizer_state(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check settings and tensors of an optimizer's state.

    For Adam and SGD, each tensor except the step count must have its parameter's shape. Other optimizers are not
    checked.

    Raises:
        TypeError, KeyError, ValueError: if the state cannot belong to this optimizer.
    """
    groups = state["param_groups"]
    for saved, group in zip(groups, optimizer.param_groups, strict=False):
        check_values(saved, {key: value for key, value in group.items() if key in saved and key != "params"})
        if missing := (_SETTINGS & group.keys()) - saved.keys():
            raise ValueError(
                f"it was written with another optim, whose groups lack {min(missing)!r}: set optim as before"
            )
        if saved.get("fused") and saved.get("differentiable"):
            raise ValueError("param_groups has fused and differentiable")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    if not (type(optimizer).__module__.startswith("torch.optim.adam") or isinstance(optimizer, torch.optim.SGD)):
        return
    for index, parameter in zip(indices, parameters, strict=False):
        for name, value in state["state"].get(index, {}).items():
            _check_moment(name, value, parameter)
    for group in groups:
        _check_names([state["state"].get(index) for index in group["params"]], group, optimizer)


def _check_names(states: list[dict[str, Any] | None], group: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check that all states in a group have the same keys. For Adam, check its required keys."""
    kept = [state.keys() for state in states if state]
    if any(names != kept[0] for names in kept):
        raise KeyError("the states of the parameters have different keys")
    needed = _OF_ADAM | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    if kept and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and (missing := needed - kept[0]):
        raise KeyError(f"the states lack {min(missing)}")


def _check_moment(name: str, value: Any, parameter: torch.Tensor) -> None:
    """Check a tensor's shape. Fused kernels do not check it, and a wrong shape crashes them."""
    if name == "step":
        check_values(value, 0, name)
    elif isinstance(value, torch.Tensor) and value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
    elif not isinstance(value, torch.Tensor) and (value is not None or name != "momentum_buffer"):  # SGD's first step
        raise TypeError(f"{name} is {reprlib.repr(value)}")
