"""Samplers: orders that follow from a seed, samples of similar length together, and going on behind some batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hftrainer.errors import InvalidArgument

#: Batches that are sorted together, at most; the data is shuffled beyond them.
_BATCHES_SORTED_TOGETHER = 50


def gives_its_length(loader: Any) -> bool:
    """Whether a loader gives as many batches as it says; samplers, batch samplers and loaders of scripts may guess."""
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
    """A random sampler whose order depends on seed and epoch alone, not on what was drawn before.

    Args:
        data_source: the dataset.
        seed: the permutation of epoch `e` comes from a generator seeded `seed + e`.
    """

    seeds_itself = True  # its generator has no state worth keeping

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
    """A batch sampler that passes over its first batches once, so that their samples are never loaded.

    Args:
        batch_sampler: the sampler that gives the indices.
        skipped: batches to pass over at the next iteration.

    Attributes:
        seen: gets the indices of each batch that is given, if it is a list.
    """

    def __init__(self, batch_sampler: Any, skipped: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skipped = skipped
        self.seen: list[list[int]] | None = None
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = iter(self.batch_sampler)
        return self._indices(self._batches)

    def _indices(self, batches: Iterator[Any]) -> Iterator[list[int]]:
        self.catch_up()  # not before the first batch is asked for: a loader draws its seed in between
        for batch in batches:
            if self.seen is not None:
                self.seen.append(list(batch))
            yield batch

    def catch_up(self) -> None:
        """Pass over the batches now, if they have not been."""
        skipped, self.skipped = self.skipped, 0
        for _ in range(skipped):
            next(self._batches, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_batches": None}  # for loading processes that are started anew; they do not iterate

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling in a worker
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


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
