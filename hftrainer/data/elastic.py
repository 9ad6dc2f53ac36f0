"""Elastic runs: splits an epoch into the same global batches for any number of processes.

A global batch is the samples of an optimizer step. If an epoch has only whole global batches, then after each step the
samples read are the first in the epoch's order, however they are divided into micro-batches and among ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.compat import peers
from hftrainer.data.mixture import MixtureBatchSampler
from hftrainer.data.randomness import random_states, restore_random_states, seed_cpu
from hftrainer.data.samplers import StreamWrapper, set_epoch, settings_of
from hftrainer.errors import InvalidArgument, UnsupportedArgument

logger = logging.getLogger(__name__)


def whole_batches(
    samples: Iterable[Any], size: int, drop_last: bool, first: Iterable[Any] | None = None
) -> Iterator[Any]:
    """Yields the samples of whole groups of `size`.

    Args:
        samples: what is grouped.
        size: samples of a group.
        drop_last: drop an incomplete last group, rather than completing it with the first samples.
        first: the first samples, if `samples` do not begin with them.
    """
    iterator = iter(samples)
    while group := list(islice(iterator, size)):
        first = list(group) if first is None else first
        if len(group) < size:
            if drop_last:
                return
            group += islice(cycle(first), size - len(group))
        yield from group


def whole_count(count: int, size: int, drop_last: bool) -> int:
    """The number of samples that `whole_batches` yields of `count`."""
    return (count // size if drop_last else -(-count // size)) * size


class WholeBatchSampler(Sampler[int]):
    """A sampler whose epoch has whole global batches, in an order that is the same on every rank of any run.

    Args:
        sampler: yields the order, which is drawn at once, with generators seeded by `seed` and the epoch.
        size: samples in a global batch.
        drop_last: drop an incomplete global batch, rather than completing it with the epoch's first samples.
        seed: the seed of epoch 0.
    """

    def __init__(self, sampler: Any, size: int, drop_last: bool, seed: int) -> None:
        self.sampler, self.size, self.drop_last, self.seed = sampler, size, drop_last, seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        before = random_states()
        seed_cpu(self.seed + self.epoch)
        try:
            order = list(self.sampler)
        finally:
            restore_random_states(before)
        return whole_batches(order, self.size, self.drop_last)

    def __len__(self) -> int:
        return whole_count(len(self.sampler), self.size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
        set_epoch(self.sampler, epoch)


class WholeBatchStream(StreamWrapper):
    """A stream of whole global batches.

    Args:
        dataset: the stream, whose own state is the position.
        size: samples in a global batch.
        drop_last: drop an incomplete global batch, rather than completing it with the epoch's first samples.
    """

    def __init__(self, dataset: Any, size: int, drop_last: bool) -> None:
        super().__init__(peers.unsplit_stream(dataset))
        self.size, self.drop_last = size, drop_last
        self._beginning: Any = None

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration begin in the middle of its epoch, whose first samples may be needed at its end."""
        self._beginning = peers.copy_stream(self.dataset)
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self.seed_generator()
        beginning, self._beginning = self._beginning, None
        set_epoch(beginning, self.epoch)
        return whole_batches(self.dataset, self.size, self.drop_last, beginning)

    def __len__(self) -> int:
        return whole_count(len(self.dataset), self.size, self.drop_last)


def check_loader(loader: DataLoader[Any], config: AcceleratorConfig) -> None:
    """Raise UnsupportedArgument if the samples of a training loader cannot be regrouped into global batches."""
    if config.split_batches or not (config.even_batches and config.use_seedable_sampler):
        reason = "split_batches, even_batches and use_seedable_sampler in accelerator_config must have their defaults"
    elif isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is not None:
            return
        reason = "the stream makes the batches: let it yield samples, and set a batch size"
    elif not isinstance(loader.batch_sampler, MixtureBatchSampler) and type(loader.batch_sampler) is not BatchSampler:
        reason = f"{type(loader.batch_sampler).__name__} makes the batches: use a sampler of indices, and a batch size"
    else:
        return
    raise UnsupportedArgument(f"elastic=True: {reason}.")


def make_whole_batch_loader(loader: DataLoader[Any], global_batch: int) -> DataLoader[Any]:
    """A loader of the same stream, whose epoch has whole global batches. One worker at most reads it, in order."""
    dataset = WholeBatchStream(loader.dataset, global_batch, loader.drop_last)
    settings = settings_of(loader) | {"num_workers": min(loader.num_workers, 1)}
    if loader.num_workers > 1:
        logger.warning(
            "elastic=True: one loading process reads the stream, not dataloader_num_workers=%d, which would divide it.",
            loader.num_workers,
        )
    return DataLoader(dataset, loader.batch_size, drop_last=loader.drop_last, **settings)


def make_whole_batch_sampler(batches: Any, global_batch: int, seed: int | None) -> Any:
    """A batch sampler with the samples of `batches`, whose epoch has whole global batches."""
    if isinstance(batches, MixtureBatchSampler):  # it has, and its order follows from the seed alone
        return batches
    seed = torch.initial_seed() if seed is None else seed
    sampler = WholeBatchSampler(batches.sampler, global_batch, batches.drop_last, seed)
    return BatchSampler(sampler, batches.batch_size, drop_last=False)


def accumulation_steps(global_batch: int, batch_size: int, processes: int) -> int:
    """Micro-batches per optimizer step that keep the global batch.

    Args:
        global_batch: samples of an optimizer step, over all processes.
        batch_size: samples of a micro-batch of one process.
        processes: number of processes that read different samples.

    Raises:
        InvalidArgument: if there is no such number; the error lists the possible batch sizes and numbers of processes.
    """
    steps, left = divmod(global_batch, batch_size * processes)
    if steps and not left:
        return steps
    sizes = _divisors(global_batch // processes) if global_batch % processes == 0 else []
    numbers = _divisors(global_batch // batch_size) if global_batch % batch_size == 0 else []
    possible = [f"per_device_train_batch_size of {_listed(sizes)}"] if sizes else []
    possible += [f"{_listed(numbers)} process{'es' * (numbers != [1])}"] if numbers else []
    raise InvalidArgument(
        f"elastic=True: a step of this run has {global_batch} samples, and those of {processes} x "
        f"per_device_train_batch_size={batch_size} do not divide them. Use {', or '.join(possible) or 'other numbers'}."
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
