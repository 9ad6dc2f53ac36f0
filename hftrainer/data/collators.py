"""Collators: make a batch from a list of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hftrainer.errors import InvalidSetup


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack the values of equal keys, without padding.

    Args:
        features: the samples, mappings or objects with attributes; all have the keys of the first. `label` (a number)
            or `label_ids` (a sequence) becomes `labels`; other strings and None values are dropped.
        return_tensors: 'pt' for torch tensors, 'np' for arrays.

    Returns:
        A tensor of shape `(batch, ...)` for each key.
    """
    samples = [feature if isinstance(feature, (dict, Mapping)) else vars(feature) for feature in features]
    first = samples[0]
    batch: dict[str, Any] = {}
    if first.get("label") is not None:
        batch["labels"] = _labels([sample["label"] for sample in samples], first["label"])
    elif first.get("label_ids") is not None:
        values = [sample["label_ids"] for sample in samples]
        batch["labels"] = _labels(values, values[0][0])
    for key, value in first.items():
        if key not in ("label", "label_ids") and value is not None and not isinstance(value, str):
            batch[key] = _stacked(key, [sample[key] for sample in samples])
    if return_tensors == "np":
        return {key: value.numpy() for key, value in batch.items()}
    return batch


def _labels(values: list[Any], sample: Any) -> torch.Tensor:
    """Int64 labels if `sample` is an integer, else float32; tensors with dimensions are stacked."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return torch.stack(values)
    number = sample.item() if isinstance(sample, torch.Tensor) else sample
    return torch.tensor(values, dtype=torch.long if isinstance(number, (int, np.integer)) else torch.float)


def _stacked(key: str, values: list[Any]) -> torch.Tensor:
    try:
        return _stack(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidSetup(
            f"The values of {key!r} do not fit into one tensor ({error}): pass processing_class=tokenizer to pad them, "
            "or a data_collator that does."
        ) from error


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


@dataclass
class DataCollatorWithPadding:
    """Pads the samples of a batch to one length with the tokenizer's `pad`.

    Args:
        tokenizer: a tokenizer or sequence feature extractor of transformers.
        padding: True or 'longest' for the longest sample of the batch, 'max_length', or False.
        max_length: length in tokens for 'max_length'.
        pad_to_multiple_of: round the length up to a multiple of this, in tokens.
        return_tensors: 'pt' or 'np'.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """Pad and stack; `label` and `label_ids` are renamed `labels`."""
        batch = _pad_quietly(
            self.tokenizer,
            features,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=self.return_tensors,
        )
        for key in ("label", "label_ids"):
            if key in batch:
                batch["labels"] = batch.pop(key)
        return batch


def _pad_quietly(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`tokenizer.pad`, without fast tokenizers' advice to pad while encoding: samples are already encoded here."""
    warnings = getattr(tokenizer, "deprecation_warnings", {})
    before = warnings.get("Asking-to-pad-a-fast-tokenizer", False)
    warnings["Asking-to-pad-a-fast-tokenizer"] = True
    try:
        return tokenizer.pad(*args, **kwargs)
    finally:
        warnings["Asking-to-pad-a-fast-tokenizer"] = before
