"""Loads TensorFlow models of transformers 4 into torch, by h5py alone, and provides their class names."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.checkpointing.weights import list_shards
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed

logger = logging.getLogger(__name__)

WEIGHTS, INDEX = "tf_model.h5", "tf_model.h5.index.json"
#: Keras' name of a layer's weight → torch's name.
_NAMES = {
    "kernel": "weight",
    "depthwise_kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
#: Number of axes of a Keras kernel → their order in torch: dense, 1-D and 2-D convolution.
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1)}


def torch_name(name: str) -> tuple[str, str]:
    """The torch name of a TensorFlow weight, and Keras' name of its last part."""
    # `_._` means a dot and `x___y` means y. The first of several parts is the model.
    parts = [part.rpartition("___")[2] for part in name.removesuffix(":0").replace("_._", "/").split("/") if part]
    *path, last = parts[1:] or parts
    return ".".join([*path, _NAMES.get(last, last)]), last


def _to_torch_order(value: torch.Tensor, keras_name: str) -> torch.Tensor:
    if keras_name == "depthwise_kernel":
        return value.permute(2, 3, 0, 1)
    return value.permute(_AXES[value.ndim]) if keras_name == "kernel" and value.ndim in _AXES else value


def read_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and values of the weights in a file.

    Raises:
        MissingPackage: without h5py.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingPackage(f"Reading {path} needs h5py: pip install 'hftrainer[tf]'") from cause_if_installed(error)
    with h5py.File(path) as file:
        for layer in file.attrs["layer_names"]:
            entry = file[layer]
            # Sharded files hold each weight directly, without the model's name.
            if isinstance(entry, h5py.Dataset):
                yield f"model/{_decode(layer)}", torch.from_numpy(entry[()])
                continue
            for name in entry.attrs["weight_names"]:
                yield _decode(name), torch.from_numpy(entry[name][()])


def _decode(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def find_weight_files(folder: str) -> list[str]:
    """The files of TensorFlow weights in a folder; several if they are in shards."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        return list_shards(index)
    path = os.path.join(folder, WEIGHTS)
    return [path] if os.path.isfile(path) else []


def load_weights(model: nn.Module, paths: list[str]) -> None:
    """Load the file's weights that the model has. Logs missing and unused weights.

    Args:
        model: a torch model of transformers.
        paths: the files.

    Raises:
        InvalidArgument: if a weight has another shape, or the files have none of the model's weights.
    """
    state = model.state_dict()
    loaded_keys: set[str] = set()
    unused_names: list[str] = []
    for path in paths:
        for name, value in read_weights(path):
            torch_key, keras_name = torch_name(name)
            key = next((candidate for candidate in _candidates(torch_key, model) if candidate in state), None)
            if key is None:
                unused_names.append(name)
                continue
            _copy_weight(_to_torch_order(value, keras_name), state[key], name, key)
            loaded_keys.add(key)
    if not loaded_keys:
        raise InvalidArgument(f"{', '.join(paths)}: none of the weights belongs to {type(model).__name__}.")
    _report_weights(model, state, loaded_keys, unused_names)


def _candidates(name: str, model: nn.Module) -> Iterator[str]:
    yield name
    # A model without a head may load a file of a model with a head.
    yield name.partition(".")[2]
    yield f"{getattr(model, 'base_model_prefix', '')}.{name}"
    if name.endswith(".weight.weight"):
        yield name.removesuffix(".weight")


def _copy_weight(value: torch.Tensor, target: torch.Tensor, name: str, key: str) -> None:
    if value.shape != target.shape:
        if value.squeeze().shape != target.squeeze().shape:
            raise InvalidArgument(
                f"{name} in the TensorFlow weights has the shape {tuple(value.shape)}, but {key} of the model has "
                f"{tuple(target.shape)}: the config is of another model, or num_labels differs."
            )
        value = value.reshape(target.shape)
    with torch.no_grad():
        target.copy_(value)


def _report_weights(model: nn.Module, state: dict[str, Any], loaded_keys: set[str], unused_names: list[str]) -> None:
    # Tied weights have several names.
    pointers = {state[key].data_ptr() for key in loaded_keys}
    missing_keys = [key for key, value in state.items() if key not in loaded_keys and value.data_ptr() not in pointers]
    if unused_names:
        logger.warning("%s does not use these TensorFlow weights: %s", type(model).__name__, ", ".join(unused_names))
    if missing_keys:
        logger.warning(
            "%s keeps initial values for these weights, which the TensorFlow files lack. Train them before you use "
            "it: %s",
            type(model).__name__,
            ", ".join(missing_keys),
        )


# ---- torch's classes under the names `TFAutoModelFor…` and `TFBertFor…`, if transformers lacks them -----------------


def torch_class(transformers: Any, name: str) -> type | None:
    """A class that creates torch models under a TensorFlow class's name; None if torch has none.

    Args:
        transformers: the package.
        name: the class name, such as 'TFBertForSequenceClassification'.
    """
    base = getattr(transformers, name.removeprefix("TF"), None) if name.startswith("TF") else None
    if not isinstance(base, type) or not callable(getattr(base, "from_pretrained", None)):
        return None
    # Configs and tokenizers lack this attribute.
    if not (name.startswith("TFAuto") or hasattr(base, "base_model_prefix")):
        return None
    return _make_class(base, name)


@functools.cache
def _make_class(base: Any, name: str) -> type:
    """A class that creates models of `base`."""

    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    def from_pretrained(_: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of the torch class. Reads TensorFlow's weights if there are no others."""
        kwargs.pop("from_pt", None)
        folder = _find_tensorflow_folder(str(pretrained_model_name_or_path), kwargs)
        if folder is None:
            return base.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return _load_from_tensorflow(base, folder, kwargs)

    doc = f"{base.__name__} under its name in TensorFlow; reads {WEIGHTS} too."
    methods: dict[str, Any] = {"__new__": make, "from_pretrained": classmethod(from_pretrained)}
    return type(name, (base,), {**methods, "__doc__": doc, "__module__": base.__module__})


def _find_tensorflow_folder(name_or_path: str, kwargs: dict[str, Any]) -> str | None:
    """The folder with a model's TensorFlow weights, downloaded if needed; None unless it has only these."""
    if os.path.isdir(name_or_path):
        folder = os.path.join(name_or_path, kwargs.get("subfolder", ""))
        has_torch_weights = any(file.endswith((".safetensors", ".bin")) for file in os.listdir(folder))
        return folder if find_weight_files(folder) and not has_torch_weights else None
    cached_file: Any = importlib.import_module("transformers.utils").cached_file

    keys = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    options = {key: kwargs[key] for key in keys if key in kwargs}
    options |= {"_raise_exceptions_for_missing_entries": False}
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    if any(cached_file(name_or_path, name, **options) is not None for name in names):
        return None
    path = cached_file(name_or_path, WEIGHTS, **options)
    return os.path.dirname(path) if path is not None else None


def _load_from_tensorflow(base: Any, folder: str, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config = kwargs.pop("config", None)
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(folder if config is None else config)
    for key in list(kwargs):
        # As in `from_pretrained`, the config gets the arguments that it has as attributes.
        if hasattr(config, key):
            setattr(config, key, kwargs.pop(key))
    model = base._from_config(config) if hasattr(base, "base_model_prefix") else base.from_config(config)
    load_weights(model, find_weight_files(folder))
    return model.eval()
