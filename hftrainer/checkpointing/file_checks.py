"""Checks that a checkpoint's files can be read and that their values suit this run.

Otherwise a wrong value would raise an error later, in a training step, that does not name the file.
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

from hftrainer.base.safe_loading import load_torch_file
from hftrainer.checkpointing import layout
from hftrainer.errors import DamagedCheckpoint, InvalidSetup, UnsafeCheckpoint

#: Suffixes of files that `torch.save` writes.
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
#: First bytes and length in bytes of the last record of a `torch.save` archive, whose comment is empty.
_END_OF_ARCHIVE, _END_LENGTH = b"PK\x05\x06", 22

_NUMBER_TYPES = (int, float, torch.Tensor)
#: Types of values that must not be None in the checkpoint.
_NON_NULL = (*_NUMBER_TYPES, list, tuple)
#: Booleans of torch's optimizers for which None lets torch choose.
_NULLABLE_SWITCHES = ("fused", "foreach")
#: Keys of Adam's state for each parameter that it has updated.
_ADAM_KEYS = {"step", "exp_avg", "exp_avg_sq"}
#: Optimizer settings of every supported torch release. Later releases added settings with defaults.
_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay"}
#: What to do if an optimizer's state cannot be used.
FRESH_OPTIMIZER = (
    "To start optimizer and schedule afresh, delete optimizer.pt in that folder, then pass its path to "
    "resume_from_checkpoint: True would skip it."
)


# ---- Files ---------------------------------------------------------------------------------------------------------


def has_format(path: Path) -> bool:
    """Whether the file's suffix is that of a format that can be checked."""
    return path.suffix in (".safetensors", ".json", *_TORCH_SUFFIXES)


def unreadable_reason(path: Path, *, load_content: bool = True) -> str | None:
    """Why a file cannot be read, as text to follow its path; or None.

    Args:
        path: the file.
        load_content: also load `torch.save` files, and read text files; else check the ends of `torch.save` files.
    """
    if path.suffix == ".json":
        return _unreadable_json_reason(path)
    if path.suffix in _TORCH_SUFFIXES:
        return _unreadable_torch_reason(path, load_content)
    try:
        if path.suffix == ".safetensors":
            # Opening the file compares its length with its header.
            with safetensors.safe_open(path, framework="pt"):
                return None
        # Read files of other formats as text: vocabularies, templates, model cards.
        return None if not load_content or path.read_text(encoding="utf-8") else "is empty"
    except UnicodeDecodeError:
        return "is not text, and its format cannot be checked"
    # safetensors raises several exception classes.
    except Exception as error:
        if path.suffix != ".safetensors":
            raise
        return f"cannot be read ({error})"


def _unreadable_json_reason(path: Path) -> str | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"cannot be read ({error})"
    if path.name == layout.TRAINER_STATE_NAME and not (isinstance(value, dict) and "global_step" in value):
        return "does not contain a state"
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if path.name.endswith(".index.json") and not isinstance(weight_map, dict):
        return "does not list shards"
    return None


def _unreadable_torch_reason(path: Path, load_content: bool) -> str | None:
    try:
        is_archive = zipfile.is_zipfile(path)
    # The archive claims to continue in another file.
    except zipfile.BadZipFile:
        is_archive = False
    with path.open("rb") as file:
        if not (first_byte := file.read(1)):
            return "is empty"
        # torch wrote pickles before 1.6, not archives.
        if not is_archive and first_byte != b"\x80":
            return "is truncated"
        if not load_content:
            return None
        if is_archive:
            file.seek(-_END_LENGTH, os.SEEK_END)
            if not file.read().startswith(_END_OF_ARCHIVE):
                return "has extra bytes at its end"
    try:
        load_torch_file(str(path), mmap=True)
    # For instance training_args.bin. An archive can be checked without unpickling its objects.
    except UnsafeCheckpoint:
        member = _damaged_member(path) if is_archive else None
        return None if member is None else f"is damaged at {member}"
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


def check_value_types(value: Any, expected: Any, name: str = "the state") -> None:
    """Check that plain values have the types of those they replace.

    Additional values are not checked.

    Raises:
        TypeError: the error names the value.
    """
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} is {reprlib.repr(value)}, not a dict")
        if missing_keys := [key for key in expected if key not in value]:
            raise TypeError(f"{name} lacks {missing_keys[0]!r}")
        for key, expected_item in expected.items():
            check_value_types(value[key], expected_item, str(key))
    elif not _is_like(value, expected) and not (value is None and name in _NULLABLE_SWITCHES):
        raise TypeError(f"{name} is {reprlib.repr(value)}, but must have the type of {reprlib.repr(expected)}")


def _is_like(value: Any, expected: Any) -> bool:
    if expected is None or (value is None and not isinstance(expected, _NON_NULL)):
        return not isinstance(value, torch.Tensor) or value.numel() == 1
    # A list has a value for each parameter group. Callbacks may have added groups.
    if isinstance(expected, list):
        is_long_enough = isinstance(value, (list, tuple)) and len(value) >= len(expected)
        return is_long_enough and all(_is_like(other, expected[0]) for other in value if expected)
    if isinstance(expected, tuple):
        has_same_length = isinstance(value, (list, tuple)) and len(value) == len(expected)
        return has_same_length and all(_is_like(item, other) for item, other in zip(value, expected, strict=True))
    if isinstance(expected, _NUMBER_TYPES) and not isinstance(expected, bool):
        return isinstance(value, _NUMBER_TYPES) and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    return isinstance(value, type(expected))


def check_optimizer_state(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check the settings and tensors of an optimizer's state.

    For Adam and SGD, each tensor except the step count must have its parameter's shape. The tensors of other
    optimizers are not checked.

    Raises:
        InvalidSetup: if the state belongs to another optimizer, or to other parameters.
        TypeError, KeyError, ValueError: if the state is damaged.
    """
    groups = state["param_groups"]
    for saved, group in zip(groups, optimizer.param_groups, strict=False):
        _check_group(saved, group)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    if not (type(optimizer).__module__.startswith("torch.optim.adam") or isinstance(optimizer, torch.optim.SGD)):
        return
    for index, parameter in zip(indices, parameters, strict=False):
        for name, value in state["state"].get(index, {}).items():
            _check_moment(name, value, parameter)
    for group in groups:
        _check_state_keys([state["state"].get(index) for index in group["params"]], group, optimizer)


def _check_group(saved: dict[str, Any], group: dict[str, Any]) -> None:
    """Check that a saved parameter group has the settings and the number of tensors of the optimizer's."""
    check_value_types(saved, {key: value for key, value in group.items() if key in saved and key != "params"})
    tensor_count = len(group["params"])
    saved_count = len(saved["params"])
    if (missing := (_SETTINGS & group.keys()) - saved.keys()) or tensor_count != saved_count:
        problem = f"has {saved_count} parameters in a group, this run's {tensor_count}"
        if missing:
            problem = f"lacks {min(missing)!r}"
        advice = f"train the same parameters with the same optimizer. {FRESH_OPTIMIZER}"
        raise InvalidSetup(f"The checkpoint's optimizer {problem}: {advice}")
    if saved.get("fused") and saved.get("differentiable"):
        raise ValueError("param_groups sets both fused and differentiable")


def _check_state_keys(
    states: list[dict[str, Any] | None], group: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Check that a group's states have the same keys, and Adam's the required ones."""
    state_keys = [state.keys() for state in states if state]
    if any(names != state_keys[0] for names in state_keys):
        raise KeyError("the states of the parameters have different keys")
    required_keys = _ADAM_KEYS | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    if state_keys and is_adam and (missing_keys := required_keys - state_keys[0]):
        raise KeyError(f"the states lack {min(missing_keys)}")


def _check_moment(name: str, value: Any, parameter: torch.Tensor) -> None:
    """Check a tensor's shape. Fused kernels do not check it, and a wrong shape crashes them."""
    if name == "step":
        check_value_types(value, 0, name)
    elif isinstance(value, torch.Tensor) and value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
    # SGD's `momentum_buffer` may be None at the first step.
    elif not isinstance(value, torch.Tensor) and (value is not None or name != "momentum_buffer"):
        raise TypeError(f"{name} is {reprlib.repr(value)}")
