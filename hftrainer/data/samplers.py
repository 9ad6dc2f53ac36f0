"""Samplers that put samples of similar length into the same batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from hftrainer.errors import InvalidArgument

#: Batches that are sorted together, at most; the data is shuffled beyond them.
_BATCHES_SORTED_TOGETHER = 50


class LengthGroupedSampler(Sampler):
    """Random order, roughly sorted by length: little padding, and still another order in each epoch.

    The samples are shuffled and cut into groups of up to 50 batches; within a group, the longer come first. The
    longest of all is the very first, so that memory runs out at once or not at all.

    Args:
        batch_size: samples in an optimizer step.
        dataset: the samples; read once for their lengths if `lengths` is None.
        lengths: length of each sample, in tokens.
        model_input_name: key of the samples whose length counts.
        generator: draws the order; None takes torch's own.

    Raises:
        InvalidArgument: when the lengths cannot be worked out.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Sequence[int] | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if dataset is None and lengths is None:
            raise InvalidArgument("LengthGroupedSampler needs the dataset or its lengths.")
        self.batch_size = batch_size
        self.lengths = _lengths(dataset, model_input_name or "input_ids") if lengths is None else list(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        lengths = self.lengths
        order = torch.randperm(len(lengths), generator=self.generator).tolist()
        together = self.batch_size * (min(len(lengths) // (self.batch_size * 4), _BATCHES_SORTED_TOGETHER) or 1)
        groups = [
            sorted(order[start : start + together], key=lengths.__getitem__, reverse=True)
            for start in range(0, len(order), together)
        ]
        if groups:
            with_longest = max(range(len(groups)), key=lambda group: lengths[groups[group][0]])
            groups[0][0], groups[with_longest][0] = groups[with_longest][0], groups[0][0]
        return iter([index for group in groups for index in group])


def _lengths(dataset: Any, name: str) -> list[int]:
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        has = f"the keys {', '.join(first)}" if isinstance(first, Mapping) else f"type {type(first).__name__}"
        raise InvalidArgument(
            f"Samples cannot be grouped by length: they have {has}, and no {name!r}. Add a column with the lengths and "
            "name it in length_column_name."
        )
    return [len(sample[name]) for sample in dataset]
