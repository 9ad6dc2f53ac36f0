"""Batches with a budget of tokens, from buckets of similar lengths or by packing, and collators for them."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hftrainer.errors import InvalidArgument, UnsupportedArgument

#: Most padding in an epoch, as a share of all tokens; and most buckets, which come first.
_MOST_PADDING, _MOST_BUCKETS = 0.05, 64
#: Most lengths that are tried as boundaries: the search takes their square.
_MOST_CANDIDATES = 512


def choose_boundaries(lengths: np.ndarray) -> list[int]:
    """The longest length of each bucket: the fewest buckets whose padding is at most 5 %, and at most 64."""
    values, counts = np.unique(lengths, return_counts=True)
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_CANDIDATES)).round().astype(int))
    ends, samples = values[kept], np.concatenate([[0], counts.cumsum()[kept]])
    tokens = int(lengths.sum())
    # padded[i, j]: tokens, with padding, of a bucket with the samples after candidate i - 1 up to candidate j.
    padded = ((samples[None, 1:] - samples[:-1, None]) * ends[None, :]).astype(float)
    padded[np.tril_indices(len(ends), -1)] = np.inf
    best, previous = padded[0], list[np.ndarray]()
    while tokens < (1 - _MOST_PADDING) * best[-1] and len(previous) + 1 < _MOST_BUCKETS:
        totals = np.concatenate([[np.inf], best[:-1]])[:, None] + padded
        previous.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    chosen, last = [len(ends) - 1], len(ends) - 1
    for starts in reversed(previous):
        last = int(starts[last]) - 1
        chosen.append(last)
    return [int(ends[index]) for index in reversed(chosen)]


class TokenBatchSampler(Sampler[list[int]]):
    """Yields whole batches of samples of similar lengths, with at most `budget` tokens, padding included.

    Each epoch shuffles the samples of a bucket and the order of the batches; their number does not change.

    Args:
        lengths: length of each sample, in tokens.
        budget: most tokens in a batch.
        seed: the order of epoch `e` comes from a generator seeded with `seed + e`.
        drop_last: drop the incomplete batch of a bucket.
        complete: complete that batch with samples of its bucket, so that a bucket has one shape.

    Raises:
        InvalidArgument: when a sample is longer than the budget.
    """

    has_exact_length = True
    drop_last: bool

    def __init__(
        self, lengths: Sequence[int], budget: int, seed: int, *, drop_last: bool = False, complete: bool = False
    ) -> None:
        self.lengths, self.budget, self.seed, self.epoch = np.asarray(lengths), budget, seed, 0
        self.drop_last, self.complete = drop_last, complete
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > budget:
            raise InvalidArgument(
                f"tokens_per_batch={budget}: sample {longest} has {self.lengths[longest]} tokens. Raise "
                "tokens_per_batch, truncate the samples, or remove the long ones."
            )
        self._prepare()

    def _prepare(self) -> None:
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
        batches = self._batches(generator)
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]

    def _batches(self, generator: torch.Generator) -> list[list[int]]:
        batches = []
        for bucket, size in zip(self.buckets, self.sizes, strict=True):
            order = bucket[torch.randperm(len(bucket), generator=generator).numpy()].tolist()
            left = len(order) % size
            if left and self.drop_last:
                order = order[:-left]
            elif left and self.complete:
                order += order[: size - left]
            batches += [order[start : start + size] for start in range(0, len(order), size)]
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`."""
        self.epoch = epoch


class PackedBatchSampler(TokenBatchSampler):
    """Yields whole batches of samples of any lengths, whose sum is at most `budget`; for batches without padding.

    Each sample goes to the batch with the fewest tokens, longest first. How full the batches get depends only on the
    lengths, so their number is found once. An epoch varies the order of the samples, unless a batch overflows.
    """

    def _prepare(self) -> None:
        order, too_few = self.lengths.astype(float), 0
        self.count = max(1, -(-int(self.lengths.sum()) // self.budget))
        while self._pack(order) is None:
            too_few, self.count = self.count, min(self.count + max(1, self.count // 64), len(self.lengths))
            if too_few > len(self.lengths) // 2:  # long samples: hardly two fit together
                self.count = len(self.lengths)
        # Between the last failure and this.
        while self.count - too_few > max(1, self.count // 1000):
            enough, self.count = self.count, (too_few + self.count) // 2
            if self._pack(order) is None:
                too_few, self.count = self.count, enough

    def __len__(self) -> int:
        return self.count

    def _batches(self, generator: torch.Generator) -> list[list[int]]:
        factors = torch.rand(len(self.lengths), generator=generator, dtype=torch.float64).numpy()
        varied = self._pack(self.lengths * (0.5 + factors))
        if varied is None:  # samples of one length still change places
            varied = self._pack(self.lengths + factors / 2)
        assert varied is not None
        return varied

    def _pack(self, order: np.ndarray) -> list[list[int]] | None:
        """The batches, if they get the samples in the descending order of `order`; None if one overflows."""
        batches: list[list[int]] = [[] for _ in range(self.count)]
        filled = [(0, index) for index in range(self.count)]
        for sample in np.argsort(-order, kind="stable").tolist():
            tokens, index = filled[0]
            if (tokens := tokens + int(self.lengths[sample])) > self.budget:
                return None
            batches[index].append(sample)
            heapq.heapreplace(filled, (tokens, index))
        return batches


class BucketCollator:
    """Pads each batch to the boundary of its bucket, so that `torch.compile` sees one shape per bucket.

    Args:
        collator: the script's collator; its copy gets another `pad_to_multiple_of`.
        boundaries: the longest length of each bucket.
        name: the key in a sample whose value is padded.

    Raises:
        UnsupportedArgument: when the collator has no `pad_to_multiple_of`.
    """

    def __init__(self, collator: Any, boundaries: list[int], name: str) -> None:
        if not hasattr(collator, "pad_to_multiple_of"):
            raise UnsupportedArgument(
                f"tokens_per_batch with torch_compile=True pads each batch to one of {len(boundaries)} lengths, by "
                f"the collator's pad_to_multiple_of, which {type(collator).__name__} does not have: use a collator "
                "such as DataCollatorWithPadding, give yours that attribute, or remove torch_compile."
            )
        self.collator, self.boundaries, self.name = collator, boundaries, name

    def __call__(self, samples: list[Any]) -> Any:
        """The padded batch."""
        longest = max(len(sample[self.name]) for sample in samples)
        collator = copy.copy(self.collator)
        if longest > self.boundaries[-1]:
            raise InvalidArgument(
                f"tokens_per_batch: a sample has {longest} tokens, more than any in the column of lengths: correct it."
            )
        collator.pad_to_multiple_of = next(each for each in self.boundaries if each >= longest)
        return collator(samples)


class FlatCollator:
    """Flattens the samples of a batch into one row, without padding, by the collator of transformers.

    Args:
        collator: a `DataCollatorWithFlattening`.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        """The flattened batch."""
        first = samples[0]
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise InvalidArgument("flatten_batches=True needs samples with 'input_ids': remove it for other data.")
        for sample in samples:
            if "labels" in first and len(sample["labels"]) != len(sample["input_ids"]):
                raise InvalidArgument(
                    f"flatten_batches=True needs a label for each token; a sample has {len(sample['labels'])} labels "
                    f"and {len(sample['input_ids'])} tokens."
                )
        return self.collator([_without_padding(sample) if "attention_mask" in sample else sample for sample in samples])


def _without_padding(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample without the tokens that its attention mask hides."""
    kept = [index for index, seen in enumerate(sample["attention_mask"]) if seen]
    if len(kept) == len(sample["input_ids"]):
        return dict(sample)
    return {name: [sample[name][index] for index in kept] for name in ("input_ids", "labels") if name in sample}
