"""Writes the model's weights, and reads them in any layout that a Trainer writes."""

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

from hftrainer.base.content_checks import check_file_name, name_file_in_errors
from hftrainer.base.part import temporary_attributes
from hftrainer.base.safe_loading import read_weights
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.layout import FULL_STATE_FILES, SHARD_FOLDERS, has_state_files
from hftrainer.compat import libraries
from hftrainer.errors import CheckpointNotFound, InvalidArgument, InvalidSetup
from hftrainer.releases.followed import installed_release

logger = logging.getLogger(__name__)

#: Maximum size of a file of a plain module's weights; libraries' `save_pretrained` has its own limit.
MAX_SHARD_SIZE = "5GB"
_ADAPTERS = (layout.ADAPTER_SAFE_WEIGHTS_NAME, layout.ADAPTER_WEIGHTS_NAME)
#: DeepSpeed's files that name the folder with the newest states.
_LATEST, _UNIVERSAL = "latest", "latest_universal"
#: File name of a process's shard of parameters or optimizer states: the rank, and the suffix shared by all ranks.
_SHARD_NAME = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_(\w+\.pt)$")
_MODEL_STATES = "model_states.pt"


def save_weights(model: Any, folder: str, state_dict: dict[str, Any] | None = None, *, safe: bool = True) -> None:
    """Write `model` to `folder`, with `save_pretrained` or as a state dict.

    Args:
        model: a model of transformers or PEFT, or a plain module; tied weights are written once. None for a plain
            module whose `state_dict` is passed.
        folder: an existing folder.
        state_dict: the weights to write instead of the model's current ones.
        safe: write safetensors; otherwise `torch.save` files with the names of v4.
    """
    if libraries.is_transformers_model(model) or libraries.is_peft(model):
        with _saving_alone(model):
            _save_pretrained(model, folder, state_dict, safe)
        return
    logger.info("The model has no save_pretrained: saving its state dict.")
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    if safe:
        save_torch_state_dict(weights, folder, max_shard_size=MAX_SHARD_SIZE)
    else:
        torch.save(weights, os.path.join(folder, layout.WEIGHTS_NAME))


def make_meta_copy(model: Any) -> Any:
    """A picklable copy of a transformers model with tensors on 'meta'; otherwise None.

    With this copy, `save_weights` can write a `state_dict` in another process.

    Raises:
        TypeError: if the model's class has its own `save_pretrained`, which may depend on this process.
    """
    if not libraries.is_transformers_model(model):
        return None
    if not type(model).save_pretrained.__module__.startswith("transformers."):
        raise TypeError(f"{type(model).__name__} has its own save_pretrained")
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {
        id(tensor): torch.nn.Parameter(tensor.to("meta"), tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else tensor.to("meta")
        for tensor in tensors
    }
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _saving_alone(model: Any) -> Iterator[None]:
    """Let one process save a model's gathered weights, for which transformers would wait for the others.

    The bar of `save_pretrained`, which would print a line for each checkpoint, is hidden.
    """
    transformers_logging = importlib.import_module("transformers.utils.logging")
    config: Any = getattr(model, "config", None)
    with contextlib.ExitStack() as stack:
        if getattr(config, "distributed_config", None) is not None:
            stack.enter_context(temporary_attributes(config, distributed_config=None))
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
        transformers_logging.disable_progress_bar()
        yield


def save_configs(model: Any, folder: str) -> None:
    """Write the configs that `save_weights` would write, for weights in other files."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if callable(getattr(config, "save_pretrained", None)):
            config.save_pretrained(folder)


def _save_pretrained(model: Any, folder: str, state_dict: dict[str, Any] | None, safe: bool) -> None:
    accepts_format = "safe_serialization" in inspect.signature(model.save_pretrained).parameters
    # As v4 does, always pass the format: a model's own `save_pretrained` may have another default (SpanMarker).
    needs_format = accepts_format and (not safe or installed_release() < (5, 0))
    kwargs = {"safe_serialization": safe} if needs_format else {}
    model.save_pretrained(folder, state_dict=state_dict, **kwargs)
    # transformers v5 writes only safetensors.
    if not (safe or needs_format):
        _rewrite_as_bin(model, folder)


def _rewrite_as_bin(model: torch.nn.Module, folder: str) -> None:
    """Convert the safetensors files in `folder` to .bin files with all names of tied weights."""
    tied_names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        tied_names.setdefault(id(tensor), []).append(name)
    weight_map: dict[str, str] = {}
    safe_files = weights_files(folder, [layout.SAFE_WEIGHTS_NAME], [layout.SAFE_WEIGHTS_INDEX_NAME])
    for path in safe_files or [os.path.join(folder, layout.ADAPTER_SAFE_WEIGHTS_NAME)]:
        weights = {name: tensor.clone() for name, tensor in read_weights(path).items()}
        for name in [name for name in weights if name in tensors]:
            weights.update(dict.fromkeys(tied_names[id(tensors[name])], weights[name]))
        stem = os.path.basename(path).removesuffix(".safetensors")
        file_name = (stem if stem.startswith("adapter") else f"pytorch_{stem}") + ".bin"
        torch.save(weights, os.path.join(folder, file_name))
        weight_map.update(dict.fromkeys(weights, file_name))
        os.remove(path)
    if (index := first_file(folder, layout.SAFE_WEIGHTS_INDEX_NAME)) is not None:
        metadata = _read_index(index)["metadata"]
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        Path(folder, layout.WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        os.remove(index)


def has_weights(folder: str) -> bool:
    """Whether `folder` holds weights in a layout that `load_weights` reads."""
    has_fsdp = bool(layout.find_shard_folder("model", folder)) or has_state_files(FULL_STATE_FILES, "model", folder)
    return has_fsdp or has_deepspeed_shards(folder) or bool(weights_files(folder) or _adapter_folders(folder))


def missing_shard(folder: str) -> str | None:
    """The first missing shard of the weights, by their index or of a process; None if none is missing."""
    places = [path for name in SHARD_FOLDERS.values() if os.path.isdir(path := os.path.join(folder, name))]
    dcp_folder = os.path.join(folder, layout.DCP_FOLDER)
    if any(name.endswith(layout.SHARD_SUFFIX) for name in _list_folder(dcp_folder)):
        places.append(dcp_folder)
    required = [*weights_files(folder), *(os.path.join(place, layout.LIST_OF_SHARDS) for place in places)]
    return next((path for path in required if not os.path.isfile(path)), None) or missing_deepspeed_shard(folder)


class LoadResult(NamedTuple):
    """Missing and unexpected weights of a load, named as in torch's result.

    Attributes:
        missing_keys: weights of the model that the files lack; they are unchanged.
        unexpected_keys: weights in the files that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(model: torch.nn.Module, folder: str) -> LoadResult | None:
    """Load the weights in `folder` into `model`, in place.

    Returns:
        Missing and unexpected weights; None for adapters and shards, where all must match.

    Raises:
        CheckpointNotFound: if there are no weights.
    """
    if layout.find_shard_folder("model", folder) is not None:
        # Imported late, since the module imports torch's FSDP.
        from hftrainer.checkpointing.sharded import load_model_shards

        load_model_shards(model, folder, only_trainable=libraries.is_peft(model))
    elif paths := weights_files(folder):
        expected = model.state_dict(keep_vars=True).keys()
        is_transformers_model = libraries.is_transformers_model(model)
        has_all = not is_transformers_model or all(expected >= read_weights(path).keys() for path in paths)
        return _load_files(model, paths) if has_all else _load_converted(model, folder)
    elif adapters := _adapter_folders(folder):
        _load_adapters(model, adapters)
    elif (full_file := first_file(folder, FULL_STATE_FILES["model"])) is not None:
        return _load_files(model, [full_file])
    elif has_deepspeed_states(folder):
        raise CheckpointNotFound(
            f"{folder} holds weights partitioned by DeepSpeed: resume with deepspeed, or merge them into one file by "
            "running python zero_to_fp32.py . in that folder."
        )
    else:
        raise CheckpointNotFound(
            f"There are no weights in {folder}: expected {layout.SAFE_WEIGHTS_NAME}, {layout.WEIGHTS_NAME}, an index "
            "of shards, or adapters."
        )
    return None


def first_file(folder: str, *candidates: str) -> str | None:
    """The path of the first candidate that exists in a folder; None if none does."""
    paths = (os.path.join(folder, candidate) for candidate in candidates)
    return next((path for path in paths if os.path.isfile(path)), None)


def weights_files(
    folder: str,
    files: Sequence[str] = (layout.SAFE_WEIGHTS_NAME, layout.WEIGHTS_NAME),
    indices: Sequence[str] = (layout.SAFE_WEIGHTS_INDEX_NAME, layout.WEIGHTS_INDEX_NAME),
) -> list[str]:
    """The file with the weights, or the shards that an index lists; empty without either."""
    if (file := first_file(folder, *files)) is not None:
        return [file]
    if (index := first_file(folder, *indices)) is None:
        return []
    with name_file_in_errors(index):
        return list_shards(index)


def plain_files(folder: str) -> list[str]:
    """The files with all weights, or all adapters; empty if the weights are in shards."""
    return weights_files(folder, (layout.SAFE_WEIGHTS_NAME, layout.WEIGHTS_NAME, *_ADAPTERS, FULL_STATE_FILES["model"]))


def list_shards(index: str) -> list[str]:
    """The paths of the shards that an index lists, in PyTorch's and TensorFlow's format.

    Raises:
        InvalidArgument: if a shard is not in the folder of the index.
    """
    shards = sorted(set(_read_index(index)["weight_map"].values()))
    if invalid_shards := [shard for shard in shards if os.path.basename(shard) != shard]:
        raise InvalidArgument(f"{index} names {invalid_shards[0]!r}, which is not in its folder.")
    return [os.path.join(os.path.dirname(index), shard) for shard in shards]


def _read_index(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _adapter_folders(folder: str) -> dict[str | None, str]:
    """Folders with adapter weights, by adapter name; the key None stands for `folder` itself."""
    folders: dict[str | None, str] = {}
    for name in (None, *sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())):
        path = folder if name is None else os.path.join(folder, name)
        if first_file(path, *_ADAPTERS):
            folders[name] = path
    return folders


def _load_converted(model: Any, folder: str) -> LoadResult:
    """Load weights that transformers has saved under other names than the model's.

    Since v5 `save_pretrained` writes some architectures (such as ViT) with the names of older releases, and only
    `from_pretrained` can convert them back.
    """
    converted_model, info = type(model).from_pretrained(folder, config=model.config, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    # The model keeps its values of missing weights. The converted model has random ones.
    weights = {name: value for name, value in converted_model.state_dict().items() if name not in missing}
    model.load_state_dict(weights, strict=False)
    return LoadResult(missing, sorted(info["unexpected_keys"]))


def _load_files(model: torch.nn.Module, paths: list[str]) -> LoadResult:
    """Load the files one by one, so that memory holds only one shard."""
    expected = model.state_dict(keep_vars=True)
    loaded_names: set[str] = set()
    for path in paths:
        weights = read_weights(path)
        model.load_state_dict(weights, strict=False)
        loaded_names |= weights.keys()
        # Free the memory before the next shard is read.
        del weights
    loaded_ids = {id(expected[name]) for name in loaded_names & expected.keys()}
    missing = [name for name, tensor in expected.items() if name not in loaded_names and id(tensor) not in loaded_ids]
    if loaded_names and expected and not loaded_names & expected.keys():
        folder = os.path.dirname(paths[0])
        place = f"is in {folder} (it has {min(loaded_names)}, ...): this is another model's checkpoint"
        raise InvalidSetup(f"None of the model's {len(expected)} weights {place}.")
    return LoadResult(missing, sorted(loaded_names - expected.keys()))


def _load_adapters(model: Any, adapters: dict[str | None, str]) -> None:
    if not libraries.is_peft(model):
        raise CheckpointNotFound(
            f"{next(iter(adapters.values()))} holds only adapters, but the model is not a PEFT model: wrap it with "
            "peft.get_peft_model before resuming."
        )
    active = model.active_adapters[0]
    unnamed = active if len(adapters) == 1 else "default"
    for name, path in adapters.items():
        adapter = unnamed if name is None else name
        # For an unreadable file, this raises a clearer error than PEFT.
        read_weights(str(first_file(path, *_ADAPTERS)))
        # Known adapters keep trainability and precision. A new one is frozen.
        is_known = adapter in model.peft_config
        model.load_adapter(path, adapter, is_trainable=is_known, autocast_adapter_dtype=not is_known)


# ---- Shards in DeepSpeed's files, read without DeepSpeed -------------------------------------------------------------


def has_deepspeed_states(folder: str, *, universal: bool = False) -> bool:
    """Whether a checkpoint holds DeepSpeed states."""
    return os.path.isfile(os.path.join(folder, _UNIVERSAL if universal else _LATEST))


def read_deepspeed_tag(folder: str, *, universal: bool = False) -> str:
    """The folder of the newest states in a checkpoint; '' if `latest` does not exist.

    Raises:
        DamagedCheckpoint: if the name is not that of a folder in the checkpoint.
    """
    path = os.path.join(folder, _UNIVERSAL if universal else _LATEST)
    if not os.path.isfile(path):
        return ""
    with name_file_in_errors(path), open(path, encoding="utf-8") as file:
        return check_file_name(file.read().strip())


def write_deepspeed_tag(folder: str, tag: str) -> None:
    """Write the file `latest`, which names the folder of the newest states, as DeepSpeed does."""
    Path(folder, _LATEST).write_text(tag, encoding="utf-8")


def has_deepspeed_shards(folder: str) -> bool:
    """Whether a checkpoint holds model states in a folder that a `latest` file names."""
    tags = (read_deepspeed_tag(folder, universal=universal) for universal in (False, True))
    return any(name.endswith(_MODEL_STATES) for tag in tags if tag for name in _list_folder(os.path.join(folder, tag)))


def missing_deepspeed_shard(folder: str) -> str | None:
    """The first missing file of DeepSpeed's states; None if the states are complete or absent."""
    if not (tag := read_deepspeed_tag(folder)):
        return None
    states = os.path.join(folder, tag)
    if not (file_names := _list_folder(states)):
        return None
    if not any(name.endswith(_MODEL_STATES) for name in file_names):
        return os.path.join(states, f"mp_rank_00_{_MODEL_STATES}")
    # Expect every kind of shard that any rank has written from each rank up to the highest.
    matches = [*filter(None, map(_SHARD_NAME.match, file_names))]
    kinds = {(match.string[: match.start(1)], match[2]) for match in matches}
    last_rank = max((int(match[1]) for match in matches), default=-1)
    expected = (f"{prefix}{rank}_{suffix}" for rank in range(last_rank + 1) for prefix, suffix in sorted(kinds))
    return next((os.path.join(states, name) for name in expected if name not in file_names), None)


def _list_folder(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
