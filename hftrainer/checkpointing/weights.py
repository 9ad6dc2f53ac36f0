"""The model's weights: writing them to a folder, and reading them back in any layout that a Trainer has written."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import safetensors
import safetensors.torch
import torch

from hftrainer import peers
from hftrainer.checkpointing import names
from hftrainer.errors import CheckpointNotFound

logger = logging.getLogger(__name__)


def save_weights(model: torch.nn.Module, folder: str, state_dict: dict[str, Any] | None = None) -> None:
    """Write `model` to `folder`: by its own `save_pretrained` if it is a library's model, else its state dict."""
    if peers.is_pretrained(model) or peers.is_peft(model):
        model.save_pretrained(folder, state_dict=state_dict)  # type: ignore[operator]
        return
    path = os.path.join(folder, names.SAFE_WEIGHTS_NAME)
    if state_dict is None:
        safetensors.torch.save_model(model, path, metadata={"format": "pt"})  # writes tied weights once
    else:
        safetensors.torch.save_file(state_dict, path, metadata={"format": "pt"})


def has_weights(folder: str) -> bool:
    """Whether `folder` holds weights in a layout that `load_weights` reads."""
    return bool(_weights_files(folder) or _adapter_folders(folder))


def load_weights(model: torch.nn.Module, folder: str) -> None:
    """Load the weights in `folder` into `model`, in place.

    Raises:
        CheckpointNotFound: when there are none.
    """
    if paths := _weights_files(folder):
        _load_files(model, paths) if _names_fit(model, paths) else _load_converted(model, folder)
    elif adapters := _adapter_folders(folder):
        _load_adapters(model, adapters)
    else:
        raise CheckpointNotFound(
            f"There are no weights in {folder}: expected {names.SAFE_WEIGHTS_NAME}, {names.WEIGHTS_NAME}, an index of "
            "shards, or adapters."
        )


def _first_file(folder: str, *candidates: str) -> str | None:
    paths = (os.path.join(folder, candidate) for candidate in candidates)
    return next((path for path in paths if os.path.isfile(path)), None)


def _weights_files(folder: str) -> list[str]:
    """The file with the weights, or the shards that an index lists."""
    if (whole := _first_file(folder, names.SAFE_WEIGHTS_NAME, names.WEIGHTS_NAME)) is not None:
        return [whole]
    if (index := _first_file(folder, names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME)) is None:
        return []
    with open(index, encoding="utf-8") as file:
        return [os.path.join(folder, shard) for shard in sorted(set(json.load(file)["weight_map"].values()))]


def _adapter_folders(folder: str) -> dict[str | None, str]:
    """Folders with adapter weights by adapter name; None names the one in `folder` itself."""
    found: dict[str | None, str] = {}
    for name in (None, *sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())):
        path = folder if name is None else os.path.join(folder, name)
        if _first_file(path, names.ADAPTER_SAFE_WEIGHTS_NAME, names.ADAPTER_WEIGHTS_NAME):
            found[name] = path
    return found


def _names_fit(model: torch.nn.Module, paths: list[str]) -> bool:
    """Whether the files have no weight that the model lacks, by name; read from the headers alone."""
    expected = model.state_dict(keep_vars=True).keys()
    for path in paths:
        if path.endswith(".safetensors"):
            with safetensors.safe_open(path, framework="pt") as file:
                if not expected >= set(file.keys()):
                    return False
    return True


def _load_converted(model: Any, folder: str) -> None:
    """Load weights that transformers has saved under other names than the model's own.

    Since v5 `save_pretrained` writes some architectures (ViT for one) in the names of older releases, and only
    `from_pretrained` knows the way back.
    """
    if not peers.is_pretrained(model):
        _load_files(model, _weights_files(folder))
        return
    converted = type(model).from_pretrained(folder, config=model.config).state_dict()
    missing, unexpected = model.load_state_dict(converted, strict=False)
    if missing or unexpected:
        logger.warning("%s does not match the model: missing %s, unknown %s", folder, missing, unexpected)


def _load_files(model: torch.nn.Module, paths: list[str]) -> None:
    """Load file after file, so that one shard at a time is in memory."""
    expected = model.state_dict(keep_vars=True)
    loaded: set[str] = set()
    for path in paths:
        if path.endswith(".safetensors"):
            state_dict = safetensors.torch.load_file(path, device="cpu")
        else:
            state_dict = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state_dict, strict=False)
        loaded.update(state_dict)
    filled = {id(expected[name]) for name in loaded & expected.keys()}
    missing = [name for name, tensor in expected.items() if name not in loaded and id(tensor) not in filled]
    unexpected = sorted(loaded - expected.keys())
    if missing:
        logger.warning("The checkpoint lacks these weights of the model, left as they are: %s", missing)
    if unexpected:
        logger.warning("The checkpoint has weights that the model lacks, left out: %s", unexpected)


def _load_adapters(model: Any, adapters: dict[str | None, str]) -> None:
    if not peers.is_peft(model):
        raise CheckpointNotFound(
            f"{next(iter(adapters.values()))} holds adapters only, and the model is no PEFT model: wrap it with "
            "peft.get_peft_model before resuming."
        )
    active = model.active_adapters[0]
    alone = len(adapters) == 1
    for name, path in adapters.items():
        adapter = name if name is not None else (active if alone else "default")
        model.load_adapter(path, adapter, is_trainable=adapter == active)
    model.set_adapter(active)
