"""Batches with a token budget, from length buckets or by packing, and their collators."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hftrainer.data.samplers import EpochSampler
from hftrainer.errors import InvalidArgument, UnsupportedArgument

#: Maximum padding in an epoch, as a share of all tokens, and maximum number of buckets, which has priority.
_MAX_PADDING, _MAX_BUCKETS = 0.05, 64
#: Maximum number of candidate boundaries. The search takes quadratic time and memory.
_MAX_CANDIDATES = 512


def choose_boundaries(lengths: np.ndarray) -> list[int]:
    """The maximum length of each bucket, for the fewest with at most 5 % padding (up to 64)."""
    distinct, counts = np.unique(lengths, return_counts=True)
    candidates = np.unique(np.linspace(0, len(distinct) - 1, min(len(distinct), _MAX_CANDIDATES)).round().astype(int))
    ends, samples = distinct[candidates], np.concatenate([[0], counts.cumsum()[candidates]])
    tokens = int(lengths.sum())
    # padded[i, j]: tokens, including padding, of a bucket with the samples after candidate i - 1 up to candidate j.
    padded_tokens = ((samples[None, 1:] - samples[:-1, None]) * ends[None, :]).astype(float)
    padded_tokens[np.tril_indices(len(ends), -1)] = np.inf
    fewest_tokens, previous = padded_tokens[0], list[np.ndarray]()
    while tokens < (1 - _MAX_PADDING) * fewest_tokens[-1] and len(previous) + 1 < _MAX_BUCKETS:
        totals = np.concatenate([[np.inf], fewest_tokens[:-1]])[:, None] + padded_tokens
        previous.append(totals.argmin(axis=0))
        fewest_tokens = totals.min(axis=0)
    end_indices, last = [len(ends) - 1], len(ends) - 1
    for starts in reversed(previous):
        last = int(starts[last]) - 1
        end_indices.append(last)
    return [int(ends[index]) for index in reversed(end_indices)]


class TokenBatchSampler(EpochSampler, Sampler[list[int]]):
    """Yields batches of samples of similar lengths, with at most `budget` tokens including padding.

    Each epoch shuffles the samples of a bucket and the order of the batches. The number of batches does not change.

    Args:
        lengths: length of each sample, in tokens.
        budget: maximum number of tokens in a batch.
        seed: the order of epoch `e` comes from a generator seeded with `seed + e`.
        drop_last: drop the incomplete batch of a bucket.
        complete: complete the incomplete batch with samples of its bucket, so that a bucket has one shape.

    Raises:
        InvalidArgument: when a sample is longer than the budget.
    """

    has_exact_length = True
    drop_last: bool

    def __init__(
        self, lengths: Sequence[int], budget: int, seed: int, *, drop_last: bool = False, complete: bool = False
    ) -> None:
        self.lengths, self.budget, self.seed = np.asarray(lengths), budget, seed
        self.drop_last, self.complete = drop_last, complete
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > budget:
            raise InvalidArgument(
                f"tokens_per_batch={budget}: sample {longest} has {self.lengths[longest]} tokens. Raise "
                "tokens_per_batch, truncate the samples, or remove the long samples."
            )
        self._plan_batches()

    def _plan_batches(self) -> None:
        self.boundaries = choose_boundaries(self.lengths)
        bucket_of = np.searchsorted(self.boundaries, self.lengths)
        self.buckets = [np.flatnonzero(bucket_of == bucket) for bucket in range(len(self.boundaries))]
        self.sizes = [
            min(self.budget // max(boundary, 1), len(bucket))
            for boundary, bucket in zip(self.boundaries, self.buckets, strict=True)
        ]

    def __len__(self) -> int:
        pairs = zip(self.buckets, self.sizes, strict=True)
        return sum(len(bucket) // size if self.drop_last else -(-len(bucket) // size) for bucket, size in pairs)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = self._draw_batches(generator)
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]

    def _draw_batches(self, generator: torch.Generator) -> list[list[int]]:
        batches = []
        for bucket, size in zip(self.buckets, self.sizes, strict=True):
            order = bucket[torch.randperm(len(bucket), generator=generator).numpy()].tolist()
            remainder = len(order) % size
            if remainder and self.drop_last:
                order = order[:-remainder]
            elif remainder and self.complete:
                order += order[: size - remainder]
            batches += [order[start : start + size] for start in range(0, len(order), size)]
        return batches


class PackedBatchSampler(TokenBatchSampler):
    """Yields batches of samples of any lengths, with at most `budget` tokens without padding.

    Each sample goes to the batch with the fewest tokens, longest first. The number of batches depends only on the
    lengths, so it is computed once. An epoch varies the order of the samples, unless a batch overflows.
    """

    def _plan_batches(self) -> None:
        sort_keys, too_few = self.lengths.astype(float), 0
        self.count = max(1, -(-int(self.lengths.sum()) // self.budget))
        while self._pack_batches(sort_keys) is None:
            too_few, self.count = self.count, min(self.count + max(1, self.count // 64), len(self.lengths))
            # Samples are so long that hardly two fit together.
            if too_few > len(self.lengths) // 2:
                self.count = len(self.lengths)
        # The smallest count that is enough is above `too_few`, and at most `self.count`: search by halves.
        while self.count - too_few > max(1, self.count // 1000):
            enough, self.count = self.count, (too_few + self.count) // 2
            if self._pack_batches(sort_keys) is None:
                too_few, self.count = self.count, enough

    def __len__(self) -> int:
        return self.count

    def _draw_batches(self, generator: torch.Generator) -> list[list[int]]:
        factors = torch.rand(len(self.lengths), generator=generator, dtype=torch.float64).numpy()
        batches = self._pack_batches(self.lengths * (0.5 + factors))
        # A smaller variation only reorders samples of equal length.
        if batches is None:
            batches = self._pack_batches(self.lengths + factors / 2)
        assert batches is not None
        return batches

    def _pack_batches(self, sort_keys: np.ndarray) -> list[list[int]] | None:
        """The batches, filled with samples by descending `sort_keys`; None if a batch overflows."""
        batches: list[list[int]] = [[] for _ in range(self.count)]
        fill_levels = [(0, index) for index in range(self.count)]
        for sample in np.argsort(-sort_keys, kind="stable").tolist():
            tokens, index = fill_levels[0]
            if (tokens := tokens + int(self.lengths[sample])) > self.budget:
                return None
            batches[index].append(sample)
            heapq.heapreplace(fill_levels, (tokens, index))
        return batches


class BucketCollator:
    """Pads each batch to its bucket's boundary, so that `torch.compile` sees one shape per bucket.

    Args:
        collator: the script's collator, copied for another `pad_to_multiple_of`.
        boundaries: the maximum length of each bucket.
        name: the key in a sample whose value is padded.

    Raises:
        UnsupportedArgument: when the collator has no `pad_to_multiple_of`.
    """

    def __init__(self, collator: Any, boundaries: list[int], name: str) -> None:
        if not hasattr(collator, "pad_to_multiple_of"):
            raise UnsupportedArgument(
                f"tokens_per_batch with torch_compile=True pads each batch to one of {len(boundaries)} lengths with "
                f"the collator's pad_to_multiple_of, which {type(collator).__name__} does not have: use a collator "
                "such as DataCollatorWithPadding, add that attribute to yours, or remove torch_compile."
            )
        self.collator, self.boundaries, self.name = collator, boundaries, name

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples into a padded batch."""
        longest = max(len(sample[self.name]) for sample in samples)
        collator = copy.copy(self.collator)
        if longest > self.boundaries[-1]:
            raise InvalidArgument(
                f"tokens_per_batch: a sample has {longest} tokens, more than any in the column of lengths: correct the "
                "column."
            )
        collator.pad_to_multiple_of = next(boundary for boundary in self.boundaries if boundary >= longest)
        return collator(samples)


class FlatCollator:
    """Flattens a batch into one row without padding, with the collator of transformers.

    Args:
        collator: a `DataCollatorWithFlattening`.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples into a flattened batch."""
        first = samples[0]
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise InvalidArgument("flatten_batches=True needs samples with 'input_ids': remove it for other data.")
        for sample in samples:
            if "labels" in first and len(sample["labels"]) != len(sample["input_ids"]):
                raise InvalidArgument(
                    f"flatten_batches=True needs a label for each token, but a sample has {len(sample['labels'])} "
                    f"labels and {len(sample['input_ids'])} tokens."
                )
        return self.collator([_remove_padding(sample) if "attention_mask" in sample else sample for sample in samples])


def _remove_padding(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample without the tokens that its attention mask hides."""
    indices = [index for index, is_visible in enumerate(sample["attention_mask"]) if is_visible]
    if len(indices) == len(sample["input_ids"]):
        return dict(sample)
    return {name: [sample[name][index] for index in indices] for name in ("input_ids", "labels") if name in sample}
