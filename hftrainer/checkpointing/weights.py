"""Writes the model's weights to a folder, and reads them in any layout that a Trainer writes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict

from hftrainer.checkpointing import names
from hftrainer.checkpointing.names import PARTS, WHOLES, holds
from hftrainer.compat import peers
from hftrainer.compat.reading import check_file_name, fitting, read_weights
from hftrainer.errors import CheckpointNotFound, InvalidArgument
from hftrainer.releases.followed import installed_release

logger = logging.getLogger(__name__)

#: Maximum size of a file of a plain module's weights; libraries' `save_pretrained` has its own limit.
MAX_SHARD_SIZE = "5GB"
_ADAPTERS = (names.ADAPTER_SAFE_WEIGHTS_NAME, names.ADAPTER_WEIGHTS_NAME)
#: DeepSpeed's files with the name of the folder of the newest states.
_LATEST, _UNIVERSAL = "latest", "latest_universal"
#: File name of a process's part of parameters or optimizer states: the rank, and the suffix shared by all ranks.
_PART = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_(\w+\.pt)$")
_MODEL_STATES = "model_states.pt"


def save_weights(model: Any, folder: str, state_dict: dict[str, Any] | None = None, *, safe: bool = True) -> None:
    """Write `model` to `folder`: with `save_pretrained` for models of transformers and PEFT, else its state dict.

    Args:
        model: the model; tied weights are written once. None for a plain module whose `state_dict` is given.
        folder: an existing folder.
        state_dict: the weights to write instead of the model's current ones.
        safe: write safetensors; otherwise `torch.save` files with the names of v4.
    """
    if peers.is_transformers_model(model) or peers.is_peft(model):
        with _without_distributed_config(model), _without_progress_bar():
            _save_pretrained(model, folder, state_dict, safe)
        return
    logger.info("The model has no save_pretrained: saving its state dict.")
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    if safe:
        save_torch_state_dict(weights, folder, max_shard_size=MAX_SHARD_SIZE)
    else:
        torch.save(weights, os.path.join(folder, names.WEIGHTS_NAME))


def without_tensors(model: Any) -> Any:
    """A copy of a model of transformers, with its tensors on 'meta', to be pickled; None for a plain module.

    With it, `save_weights` writes given weights in another process.

    Raises:
        TypeError: if the model's class has its own `save_pretrained`, which may depend on this process.
    """
    if not peers.is_transformers_model(model):
        return None
    if not type(model).save_pretrained.__module__.startswith("transformers."):
        raise TypeError(f"{type(model).__name__} has its own save_pretrained")
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {
        id(each): torch.nn.Parameter(each.to("meta"), each.requires_grad)
        if isinstance(each, torch.nn.Parameter)
        else each.to("meta")
        for each in tensors
    }
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _without_distributed_config(model: Any) -> Iterator[None]:
    """Let one process save a distributed model's gathered weights. transformers would wait for the other processes."""
    config: Any = getattr(model, "config", None)
    loaded = getattr(config, "distributed_config", None)
    if loaded is None:
        yield
        return
    config.distributed_config = None
    try:
        yield
    finally:
        config.distributed_config = loaded


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the bar of `save_pretrained`, which would leave a line on the terminal for each checkpoint."""
    library = importlib.import_module("transformers.utils.logging")
    if not library.is_progress_bar_enabled():
        yield
        return
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.enable_progress_bar()


def save_configs(model: Any, folder: str) -> None:
    """Write the configs that `save_weights` writes beside the weights, for a model whose weights are in other files."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            config.save_pretrained(folder)


def _save_pretrained(model: Any, folder: str, state_dict: dict[str, Any] | None, safe: bool) -> None:
    takes_format = "safe_serialization" in inspect.signature(model.save_pretrained).parameters
    # As v4 does, always pass the format: a model's own `save_pretrained` may have another default (SpanMarker).
    passes_format = takes_format and (not safe or installed_release() < (5, 0))
    keywords = {"safe_serialization": safe} if passes_format else {}
    model.save_pretrained(folder, state_dict=state_dict, **keywords)
    if not (safe or passes_format):  # transformers v5 writes safetensors only
        _rewrite_as_bin(model, folder)


def _rewrite_as_bin(model: torch.nn.Module, folder: str) -> None:
    """Convert the safetensors files in `folder` to .bin, one by one, with tied weights under all their names."""
    same: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        same.setdefault(id(tensor), []).append(name)
    weight_map: dict[str, str] = {}
    safe_files = weights_files(folder, [names.SAFE_WEIGHTS_NAME], [names.SAFE_WEIGHTS_INDEX_NAME])
    for path in safe_files or [os.path.join(folder, names.ADAPTER_SAFE_WEIGHTS_NAME)]:
        written = {name: tensor.clone() for name, tensor in read_weights(path).items()}
        for name in [name for name in written if name in tensors]:
            written.update(dict.fromkeys(same[id(tensors[name])], written[name]))
        stem = os.path.basename(path).removesuffix(".safetensors")
        file = (stem if stem.startswith("adapter") else f"pytorch_{stem}") + ".bin"
        torch.save(written, os.path.join(folder, file))
        weight_map.update(dict.fromkeys(written, file))
        os.remove(path)
    if (index := first_file(folder, names.SAFE_WEIGHTS_INDEX_NAME)) is not None:
        metadata = _read_index(index)["metadata"]
        with open(os.path.join(folder, names.WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as opened:
            json.dump({"metadata": metadata, "weight_map": weight_map}, opened, indent=2, sort_keys=True)
        os.remove(index)


def has_weights(folder: str) -> bool:
    """Whether `folder` holds weights in a layout that `load_weights` reads."""
    by_name = names.folder_of_parts("model", folder) is not None or holds(WHOLES, "model", folder)
    return by_name or holds_parts(folder) or bool(weights_files(folder) or _adapter_folders(folder))


def missing_shard(folder: str) -> str | None:
    """The first missing file of weights in several files, shards or parts; None if none is missing."""
    lists = [os.path.join(folder, parts, names.LIST_OF_PARTS) for parts in PARTS.values()]
    if any(name.endswith(names.PART_SUFFIX) for name in _names_in(os.path.join(folder, names.DCP))):
        lists.append(os.path.join(folder, names.DCP, names.LIST_OF_PARTS))
    needed = [*weights_files(folder), *(path for path in lists if os.path.isdir(os.path.dirname(path)))]
    return next((path for path in needed if not os.path.isfile(path)), None) or missing_part(folder)


class LoadResult(NamedTuple):
    """Missing and unexpected weights of a load, under the names of torch's own result.

    Attributes:
        missing_keys: weights of the model that the files lack; they are unchanged.
        unexpected_keys: weights in the files that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(model: torch.nn.Module, folder: str) -> LoadResult | None:
    """Load the weights in `folder` into `model`, in place.

    Returns:
        Missing and unexpected weights; None for adapters and parts, where all must match.

    Raises:
        CheckpointNotFound: if there are no weights.
    """
    if names.folder_of_parts("model", folder) is not None:
        from hftrainer.checkpointing.sharded import load_model_parts  # imports torch's FSDP

        load_model_parts(model, folder, only_trainable=peers.is_peft(model))
    elif paths := weights_files(folder):
        expected = model.state_dict(keep_vars=True).keys()
        has_all = not peers.is_transformers_model(model) or all(expected >= read_weights(path).keys() for path in paths)
        return _load_files(model, paths) if has_all else _load_converted(model, folder)
    elif adapters := _adapter_folders(folder):
        _load_adapters(model, adapters)
    elif (whole := first_file(folder, WHOLES["model"])) is not None:
        return _load_files(model, [whole])
    elif has_states(folder):
        raise CheckpointNotFound(
            f"{folder} holds weights partitioned by DeepSpeed: resume with deepspeed, or merge them into one file by "
            "running python zero_to_fp32.py . in that folder."
        )
    else:
        raise CheckpointNotFound(
            f"There are no weights in {folder}: expected {names.SAFE_WEIGHTS_NAME}, {names.WEIGHTS_NAME}, an index of "
            "shards, or adapters."
        )
    return None


def first_file(folder: str, *candidates: str) -> str | None:
    """The path of the first candidate that exists in a folder; None if none does."""
    paths = (os.path.join(folder, candidate) for candidate in candidates)
    return next((path for path in paths if os.path.isfile(path)), None)


def weights_files(
    folder: str,
    wholes: Sequence[str] = (names.SAFE_WEIGHTS_NAME, names.WEIGHTS_NAME),
    indices: Sequence[str] = (names.SAFE_WEIGHTS_INDEX_NAME, names.WEIGHTS_INDEX_NAME),
) -> list[str]:
    """The file with the weights, or the shards that an index lists: the first kind found."""
    if (whole := first_file(folder, *wholes)) is not None:
        return [whole]
    if (index := first_file(folder, *indices)) is None:
        return []
    with fitting(index):
        return shards_in(index)


def shards_in(index: str) -> list[str]:
    """The paths of the shards that an index lists; TensorFlow's indices have the same format.

    Raises:
        InvalidArgument: for a shard that is not in the folder of the index.
    """
    shards = sorted(set(_read_index(index)["weight_map"].values()))
    if outside := [shard for shard in shards if os.path.basename(shard) != shard]:
        raise InvalidArgument(f"{index} names {outside[0]!r}, which is not in its folder.")
    return [os.path.join(os.path.dirname(index), shard) for shard in shards]


def _read_index(path: str) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return index


def _adapter_folders(folder: str) -> dict[str | None, str]:
    """Folders with adapter weights, by adapter name; the key None stands for `folder` itself."""
    found: dict[str | None, str] = {}
    for name in (None, *sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())):
        path = folder if name is None else os.path.join(folder, name)
        if first_file(path, *_ADAPTERS):
            found[name] = path
    return found


def _load_converted(model: Any, folder: str) -> LoadResult:
    """Load weights that transformers has saved under other names than the model's own.

    Since v5 `save_pretrained` writes some architectures (such as ViT) with the names of older releases, and only
    `from_pretrained` can convert them back.
    """
    converted, found = type(model).from_pretrained(folder, config=model.config, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    # The model keeps its own values of these; the converted one has new random values.
    weights = {name: value for name, value in converted.state_dict().items() if name not in missing}
    model.load_state_dict(weights, strict=False)
    return LoadResult(missing, sorted(found["unexpected_keys"]))


def _load_files(model: torch.nn.Module, paths: list[str]) -> LoadResult:
    """Load one file after the other, so that only one shard at a time is in memory."""
    expected = model.state_dict(keep_vars=True)
    loaded: set[str] = set()
    for path in paths:
        weights = read_weights(path)
        model.load_state_dict(weights, strict=False)
        loaded |= weights.keys()
        del weights  # before the next shard is read
    filled = {id(expected[name]) for name in loaded & expected.keys()}
    missing = [name for name, tensor in expected.items() if name not in loaded and id(tensor) not in filled]
    return LoadResult(missing, sorted(loaded - expected.keys()))


def _load_adapters(model: Any, adapters: dict[str | None, str]) -> None:
    if not peers.is_peft(model):
        raise CheckpointNotFound(
            f"{next(iter(adapters.values()))} holds only adapters, but the model is not a PEFT model: wrap it with "
            "peft.get_peft_model before resuming."
        )
    active = model.active_adapters[0]
    for name, path in adapters.items():
        adapter = name if name is not None else (active if len(adapters) == 1 else "default")
        read_weights(str(first_file(path, *_ADAPTERS)))  # its error for an unreadable file is clearer than PEFT's
        known = adapter in model.peft_config  # known adapters keep trainability and precision, a new one is frozen
        model.load_adapter(path, adapter, is_trainable=known, autocast_adapter_dtype=not known)


# ---- Parts in DeepSpeed's files; they are read without DeepSpeed -----------------------------------------------------


def has_states(folder: str, *, universal: bool = False) -> bool:
    """Whether a checkpoint holds DeepSpeed states."""
    return os.path.isfile(os.path.join(folder, _UNIVERSAL if universal else _LATEST))


def read_tag(folder: str, *, universal: bool = False) -> str:
    """The folder of the newest states in a checkpoint; '' if `latest` does not exist.

    Raises:
        DamagedCheckpoint: if the name is not that of a folder in the checkpoint.
    """
    path = os.path.join(folder, _UNIVERSAL if universal else _LATEST)
    if not os.path.isfile(path):
        return ""
    with fitting(path), open(path, encoding="utf-8") as file:
        return check_file_name(file.read().strip())


def write_tag(folder: str, tag: str) -> None:
    """Write the file `latest`, which names the folder of the newest states, as DeepSpeed does."""
    Path(folder, _LATEST).write_text(tag, encoding="utf-8")


def holds_parts(folder: str) -> bool:
    """Whether a checkpoint holds the model in a folder that one of DeepSpeed's `latest` files names."""
    tags = (read_tag(folder, universal=universal) for universal in (False, True))
    return any(name.endswith(_MODEL_STATES) for tag in tags if tag for name in _names_in(os.path.join(folder, tag)))


def missing_part(folder: str) -> str | None:
    """The first missing file of DeepSpeed's states; None if none is missing, or without such states."""
    if not (tag := read_tag(folder)):
        return None
    states = os.path.join(folder, tag)
    if not (found := _names_in(states)):
        return None
    if not any(name.endswith(_MODEL_STATES) for name in found):
        return os.path.join(states, f"mp_rank_00_{_MODEL_STATES}")
    # Expect every kind of part that any rank has written from each rank up to the highest.
    parts = [(name, match) for name in found if (match := _PART.match(name))]
    kinds = sorted({(name[: match.start(1)], match[2]) for name, match in parts})
    ranks = range(1 + max((int(match[1]) for _, match in parts), default=-1))
    expected = (f"{before}{rank}_{after}" for rank in ranks for before, after in kinds)
    return next((os.path.join(states, name) for name in expected if name not in found), None)


def _names_in(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
