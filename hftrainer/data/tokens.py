"""Counting the input tokens of a batch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)


@functools.lru_cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def count_tokens(inputs: Mapping[str, Any], main_input: str, how: str, pad_token_id: int | None) -> torch.Tensor | None:
    """Tokens in a batch, shape `()`; None if the batch lacks `main_input`.

    Args:
        inputs: the batch.
        main_input: the key of the token ids, of shape `(batch, length)`.
        how: 'all', or 'non_padding' to exclude padding by the attention mask or the padding token.
        pad_token_id: the padding token, if there is one.
    """
    if main_input not in inputs:
        _warn_once(f"Input tokens are not counted: the batch has no {main_input!r}. Set model.main_input_name.")
        return None
    tokens = inputs[main_input]
    if how == "non_padding" and "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    if how == "non_padding" and pad_token_id is not None:
        return (tokens != pad_token_id).sum()
    if how == "non_padding":
        _warn_once(
            "Could not determine method to count non-padding tokens: there is neither an attention_mask nor a "
            "pad_token_id, so padding is counted too."
        )
    return torch.tensor(tokens.numel(), device=tokens.device)


def number_of_tokens(loader: Iterable[Any], max_steps: int | None) -> int:
    """Input tokens in a loader, or in its first batch times `max_steps`; reads the data."""
    tokens = 0
    for batch in loader:
        count = batch["input_ids"].numel()
        if max_steps is not None:
            return count * max_steps
        tokens += count
    return tokens
