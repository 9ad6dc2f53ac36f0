"""Recognizes objects of other libraries, mostly without importing the libraries.

An object of a library can exist only if the library has been imported, so `sys.modules` is enough.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import torch

from hftrainer.errors import MissingPackage


def is_instance(value: Any, module: str, *class_names: str) -> bool:
    """Whether `value` is an instance of a module's class. False while the module is not imported."""
    library = sys.modules.get(module)
    classes = tuple(kind for name in class_names if isinstance(kind := getattr(library, name, None), type))
    return isinstance(value, classes)


# Look in the modules that define the classes: getattr on the transformers package imports them, which takes seconds,
# and torchmetrics' classes can exist before its package is imported.


def is_transformers_model(model: Any) -> bool:
    """Whether `model` is a transformers model."""
    return is_instance(model, "transformers.modeling_utils", "PreTrainedModel")


def is_peft(model: Any) -> bool:
    """Whether `model` is a PEFT model."""
    return is_instance(model, "peft", "PeftModel", "PeftMixedModel")


def library_of(model: Any) -> str | None:
    """The library whose `from_pretrained` loads a model, as model cards name it; None for other modules."""
    return "peft" if is_peft(model) else "transformers" if is_transformers_model(model) else None


def is_torchmetric(value: Any) -> bool:
    """Whether `value` is a torchmetrics metric, or a collection of them."""
    return is_instance(value, "torchmetrics.metric", "Metric") or is_instance(
        value, "torchmetrics.collections", "MetricCollection"
    )


def element_count(parameter: torch.Tensor) -> int:
    """Number of elements of a parameter, including those on other ranks (ZeRO-3)."""
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def num_parameters(model: Any, **options: bool) -> int:
    """`model.num_parameters()`, plus the elements on other ranks (ZeRO-3).

    Args:
        model: a model with that method.
        options: `exclude_embeddings=True`, or no option.
    """
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    excluded_ids = {id(weight) for weight in embeddings} if options.get("exclude_embeddings") else set()
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in excluded_ids]
    partitioned = sum(element_count(parameter) - parameter.numel() for parameter in parameters)
    return int(model.num_parameters(**options) + partitioned)


def normalization_layers() -> list[type]:
    """The normalization layers that models of transformers have registered (until v4.57), and torch's."""
    module = sys.modules.get("transformers.pytorch_utils")
    return list(getattr(module, "ALL_LAYERNORM_LAYERS", [torch.nn.LayerNorm]))


@functools.lru_cache(maxsize=1)
def cache_output_name() -> str:
    """The key under which transformers' models return their cache. v5.24 renamed it."""
    if importlib.util.find_spec("transformers") is None:
        return "cache"
    major, minor = importlib.metadata.version("transformers").split(".")[:2]
    return "cache" if (int(major), int(minor)) >= (5, 24) else "past_key_values"


def is_causal_lm(model: Any) -> bool:
    """Whether `model` has the class name of a causal language model of transformers."""
    return "transformers" in sys.modules and type(model).__name__.removeprefix("FSDP") in causal_lm_names()


@functools.lru_cache(maxsize=1)
def causal_lm_names() -> frozenset[str]:
    """The names of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def is_map_style_dataset(dataset: Any) -> bool:
    """Whether `dataset` is a map-style Dataset of the datasets library."""
    return is_instance(dataset, "datasets", "Dataset")


def is_dataset_or_stream(dataset: Any) -> bool:
    """Whether `dataset` is a map-style dataset or a stream of the datasets library."""
    return is_instance(dataset, "datasets", "Dataset", "IterableDataset")


def loses_shuffle_buffer(dataset: Any) -> bool:
    """Whether a stream of the datasets library has a shuffle buffer, which its state lacks."""
    return is_instance(dataset, "datasets", "IterableDataset") and _is_buffered(dataset._ex_iterable)


def _is_buffered(stream: Any) -> bool:
    sources = [getattr(stream, "ex_iterable", None), *getattr(stream, "ex_iterables", [])]
    return type(stream).__name__ == "BufferShuffledExamplesIterable" or any(
        _is_buffered(source) for source in sources if source is not None
    )


def import_from_transformers(module: str, name: str, feature: str) -> Any:
    """Import a class or function from a module of transformers.

    Args:
        module: its name below `transformers`.
        name: the class or function.
        feature: the feature that needs it, for the message.

    Raises:
        MissingPackage: if transformers is not installed, or the installed release lacks the name.
    """
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        raise MissingPackage(
            f"{feature} needs {name} of transformers, which is missing or too old: pip install --upgrade transformers"
        ) from None


def is_rebalanced(sampler: Any) -> bool:
    """Whether `sampler` yields complete batches, already selected for this rank."""
    return is_instance(sampler, "transformers.trainer_pt_utils", "BatchRebalanceSampler")


def shard_stream(dataset: Any, rank: int, processes: int) -> Any | None:
    """A rank's shards of a datasets stream; None if there are fewer shards than processes."""
    if not is_instance(dataset, "datasets", "IterableDataset") or dataset.num_shards < processes:
        return None
    return dataset.shard(num_shards=processes, index=rank)


def copy_stream(dataset: Any, **changes: Any) -> Any:
    """A shallow copy with changed attributes. After copy.copy(), streams of the datasets library share attributes."""
    copy = object.__new__(type(dataset))
    vars(copy).update(vars(dataset) | changes)
    return copy


def unsplit_stream(dataset: Any) -> Any:
    """The unsplit stream, if `datasets.distributed.split_dataset_by_node` split it; any other dataset unchanged."""
    is_split = is_instance(dataset, "datasets", "IterableDataset") and dataset._distributed is not None
    return copy_stream(dataset, _distributed=None) if is_split else dataset


def can_pad(processing_class: Any) -> bool:
    """Whether `processing_class` can pad batches: a tokenizer, or a feature extractor for sequences."""
    return _is_tokenizer(processing_class) or is_instance(
        processing_class, "transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor"
    )


def has_special_tokens(processing_class: Any) -> bool:
    """Whether `processing_class` has special tokens: a tokenizer or a processor."""
    return _is_tokenizer(processing_class) or is_instance(
        processing_class, "transformers.processing_utils", "ProcessorMixin"
    )


def _is_tokenizer(processing_class: Any) -> bool:
    return is_instance(processing_class, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")


#: Components that wrappers add to the names of parameters.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def bare_name(name: str) -> str:
    """The name of a parameter or module in the user's model, without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap_compiled(model: Any) -> Any:
    """The model that was passed to torch.compile(), or the model itself. Both share their weights."""
    return getattr(model, "_orig_mod", model)


def unwrap_peft(model: Any) -> Any:
    """The model below the wrappers of torch.compile and PEFT, or the model itself."""
    model = unwrap_compiled(model)
    if not is_peft(model):
        return model
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


def initialized_xla_model() -> Any | None:
    """torch_xla's module for devices and generators, or None if its runtime is not initialized."""
    library = sys.modules.get("torch_xla")
    if library is None or not library._XLAC._xla_runtime_is_initialized():
        return None
    from torch_xla.core import xla_model

    return xla_model


def set_verbosity(level: int) -> bool:
    """Set the level of transformers' messages. Returns False if transformers is not loaded."""
    if "transformers" not in sys.modules:
        return False
    from transformers.utils import logging

    logging.set_verbosity(level)
    return True


def has_length(dataset: Any) -> bool:
    """Whether `len(dataset)` returns a number."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):
        return False
