"""`TFAutoModelFor…` and `TFBertFor…` of transformers 4 where transformers has none: torch's classes of these names."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from hftrainer_tensorflow.h5_weights import WEIGHTS, files_in, load_weights


def torch_class(transformers: Any, name: str) -> type | None:
    """A class that makes torch models, for the name of a TensorFlow class; None if there is no such model.

    Args:
        transformers: the package.
        name: such as 'TFBertForSequenceClassification'.
    """
    base = getattr(transformers, name.removeprefix("TF"), None) if name.startswith("TF") else None
    if not isinstance(base, type) or not callable(getattr(base, "from_pretrained", None)):
        return None
    if not (name.startswith("TFAuto") or hasattr(base, "base_model_prefix")):
        return None  # a config or a tokenizer
    return _made(base, name)


@functools.cache
def _made(base: Any, name: str) -> type:
    """A class whose models are those of `base`."""

    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    def from_pretrained(_: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of the torch class; TensorFlow's weights are read where there are no others."""
        kwargs.pop("from_pt", None)
        folder = _folder_of_tensorflow(str(pretrained_model_name_or_path), kwargs)
        if folder is None:
            return base.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return _from_tensorflow(base, folder, kwargs)

    doc = f"{base.__name__} under its name in TensorFlow; reads {WEIGHTS} too."
    return type(
        name,
        (base,),
        {
            "__new__": make,
            "from_pretrained": classmethod(from_pretrained),
            "__doc__": doc,
            "__module__": base.__module__,
        },
    )


def _folder_of_tensorflow(name_or_path: str, kwargs: dict[str, Any]) -> str | None:
    """The folder with a model's TensorFlow weights, if it has no others; of a model on the Hub, the downloaded one."""
    if os.path.isdir(name_or_path):
        folder = os.path.join(name_or_path, kwargs.get("subfolder", ""))
        of_torch = any(file.endswith((".safetensors", ".bin")) for file in os.listdir(folder))
        return folder if files_in(folder) and not of_torch else None
    cached_file: Any = importlib.import_module("transformers.utils").cached_file

    keys = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    options = {key: kwargs[key] for key in keys if key in kwargs}
    options |= {"_raise_exceptions_for_missing_entries": False}
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    if any(cached_file(name_or_path, each, **options) is not None for each in names):
        return None
    found = cached_file(name_or_path, WEIGHTS, **options)
    return os.path.dirname(found) if found is not None else None


def _from_tensorflow(base: Any, folder: str, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config = kwargs.pop("config", None)
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(folder if config is None else config)
    for key in list(kwargs):
        if hasattr(config, key):  # as from_pretrained does
            setattr(config, key, kwargs.pop(key))
    model = base._from_config(config) if hasattr(base, "base_model_prefix") else base.from_config(config)
    load_weights(model, files_in(folder))
    return model.eval()
