"""Training arguments as plain values, for files, trackers and other programs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.arguments.accelerator_config import OF_CONSTRUCTION

#: Keys whose `torch.dtype` is written by its name, at any depth ('torch_dtype' until v4.55).
_DTYPE_KEYS = ("dtype", "torch_dtype")


def plain_field(name: str, value: Any) -> Any:
    """The value of a field for `to_dict`: enumerations, dtypes and configurations are plain, tokens are hidden.

    Other objects are kept, so that arguments can be made from the dict again, as in transformers.

    Args:
        name: the field.
        value: its value, which is not modified.
    """
    if name.endswith("_token"):
        return f"<{name.upper()}>"
    if isinstance(value, enum.Enum):
        return value.value
    if name == "lightning_config" and isinstance(value, dict):
        return {key: item if _has_json_form(item) else str(item) for key, item in value.items()}
    if name == "accelerator_config" and callable(getattr(value, "to_dict", None)):
        return {key: item for key, item in value.to_dict().items() if key != OF_CONSTRUCTION}
    if name == "parallelism_config" and dataclasses.is_dataclass(value):
        return {key: size for key, size in vars(value).items() if key.endswith("_size")}
    if isinstance(value, list):
        return [item.value if isinstance(item, enum.Enum) else item for item in value]
    if name == "model_init_kwargs" and isinstance(value, dict):
        value = {key: _quantization(item) if key == "quantization_config" else item for key, item in value.items()}
    return _with_named_dtypes({name: value})[name]


def as_json(value: Any) -> Any:
    """The value in a form that JSON supports; other objects become their `to_dict()` or their text."""
    if isinstance(value, enum.Enum):
        return as_json(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, torch.dtype):
        return _name_of(value)
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return as_json(value.to_dict())
    return str(value)


def _with_named_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    named = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = _with_named_dtypes(value)
        elif key in _DTYPE_KEYS and isinstance(value, torch.dtype):
            value = _name_of(value)
        named[key] = value
    return named


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quantization(config: Any) -> Any:
    return config.to_dict() if callable(getattr(config, "to_dict", None)) else config


def _has_json_form(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, dict))
