"""Samplers: seeded random order, samples grouped by length, and skipping batches when resuming."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hftrainer.errors import InvalidArgument

logger = logging.getLogger(__name__)

#: Maximum number of batches that are sorted together; the data is shuffled beyond them.
_BATCHES_SORTED_TOGETHER = 50


def has_exact_length(loader: Any) -> bool:
    """Whether a loader's length is exact; lengths of a script's samplers, batch samplers and loaders may be guesses."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches: Any = loader.batch_sampler
    while type(batches) is not BatchSampler and hasattr(batches, "batch_sampler"):  # ours, around the script's
        batches = batches.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return type(sampler).__module__.startswith(("torch.", "hftrainer."))


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on seed and epoch, not on earlier draws.

    Args:
        data_source: the dataset.
        seed: the permutation of epoch `e` comes from a generator seeded with `seed + e`.
    """

    seeds_itself = True  # so its generator's state need not be saved

    def __init__(self, data_source: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(data_source, **kwargs)
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of `epoch`."""
        self.epoch = epoch


class SkippingBatchSampler(BatchSampler):
    """A batch sampler that skips its first batches once, so that their samples are never loaded.

    Args:
        batch_sampler: yields the indices.
        skipped: batches to skip in the next iteration.

    Attributes:
        seen: if it is a list, the indices of each yielded batch are appended to it.
    """

    def __init__(self, batch_sampler: Any, skipped: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skipped = skipped
        self.seen: list[list[int]] | None = None
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = iter(self.batch_sampler)
        return self._indices()

    def _indices(self) -> Iterator[list[int]]:
        self.catch_up()  # only when the first batch is requested: a loader draws its seed before that
        for batch in self._batches:
            if self.seen is not None:
                self.seen.append(list(batch))
            yield batch

    def catch_up(self) -> None:
        """Skip the batches now, if not yet done."""
        skipped, self.skipped = self.skipped, 0
        batches = self.batch_sampler
        if skipped and type(batches) is BatchSampler:  # whose iterator has not begun; no batches are made to be skipped
            indices = iter(batches.sampler)
            collections.deque(itertools.islice(indices, skipped * batches.batch_size), maxlen=0)
            self._batches = iter(BatchSampler(indices, batches.batch_size, batches.drop_last))
            return
        for _ in range(skipped):
            next(self._batches, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_batches": None}  # for spawned workers, which do not iterate over it

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class LengthGroupedSampler(Sampler):
    """Random order, roughly sorted by length: little padding, and another order in each epoch.

    The samples are shuffled and cut into groups of up to 50 batches; each group is sorted, longest first. The longest
    sample of all comes first, so that running out of memory shows at once.

    Args:
        batch_size: samples in an optimizer step.
        dataset: the samples; read once for their lengths if `lengths` is None.
        lengths: length of each sample, in tokens.
        model_input_name: the key of a sample whose value's length counts.
        generator: draws the order; None takes torch's global generator.

    Raises:
        InvalidArgument: when the lengths cannot be determined.
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
        self.lengths = count_lengths(dataset, model_input_name or "input_ids") if lengths is None else list(lengths)
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


def count_lengths(dataset: Any, name: str) -> list[int]:
    """The length of each sample's `name`; reads the whole dataset.

    Raises:
        InvalidArgument: when the samples do not have it.
    """
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        has = f"the keys {', '.join(first)}" if isinstance(first, Mapping) else f"type {type(first).__name__}"
        raise InvalidArgument(
            f"The lengths of the samples are not known: they have {has}, but not {name!r}. Add a column with the "
            "lengths, and set length_column_name to its name."
        )
    if len(shape := getattr(first[name], "shape", ())) > 1 or isinstance(next(iter(first[name]), None), (list, tuple)):
        logger.warning(
            "The samples are grouped by the first dimension of %r (shape %s), %d in the first sample. If that is not "
            "their length, add a column with the lengths, and set length_column_name to its name.",
            name,
            tuple(shape) or "nested lists",
            len(first[name]),
        )
    return [len(sample[name]) for sample in dataset]
