"""Elastic runs: splits an epoch into the same global batches for any number of processes.

A global batch is the samples of an optimizer step. If an epoch has only complete global batches, the samples read after
each step are the first in the epoch's order, however they are divided into micro-batches and among ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.compat import libraries
from hftrainer.data import samplers
from hftrainer.data.mixture import MixtureBatchSampler
from hftrainer.data.randomness import cpu_rng_state, seed_cpu, set_cpu_rng_state
from hftrainer.errors import InvalidArgument, UnsupportedArgument

logger = logging.getLogger(__name__)


class GlobalBatchSampler(samplers.EpochSampler, Sampler[int]):
    """A sampler of complete global batches, in the same order on all ranks of any run.

    Args:
        sampler: yields the order. It is drawn when an epoch starts, with generators seeded by `seed` and the epoch.
        size: samples in a global batch.
        drop_last: drop an incomplete global batch, rather than completing it with the epoch's first samples.
        seed: the seed of epoch 0.
    """

    def __init__(self, sampler: Any, size: int, drop_last: bool, seed: int) -> None:
        self.sampler, self.size, self.drop_last, self.seed = sampler, size, drop_last, seed

    def __iter__(self) -> Iterator[int]:
        states = cpu_rng_state()
        seed_cpu(self.seed + self.epoch)
        try:
            order = list(self.sampler)
        finally:
            set_cpu_rng_state(states)
        return chain.from_iterable(samplers.complete_groups(order, self.size, self.drop_last))

    def __len__(self) -> int:
        return samplers.count_complete_samples(len(self.sampler), self.size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        super().set_epoch(epoch)
        samplers.set_epoch(self.sampler, epoch)


class GlobalBatchStream(samplers.StreamWrapper):
    """A stream of complete global batches.

    Args:
        dataset: the stream. Its state, if it has one, is the position.
        size: samples in a global batch.
        drop_last: drop an incomplete global batch, rather than completing it with the epoch's first samples.
    """

    def __init__(self, dataset: Any, size: int, drop_last: bool) -> None:
        super().__init__(libraries.unsplit_stream(dataset))
        self.size, self.drop_last = size, drop_last
        self._epoch_start_stream: Any = None

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration begin within the epoch. Keep its first samples for an incomplete end."""
        self._epoch_start_stream = libraries.copy_stream(self.dataset)
        self.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self.seed_generator()
        start_stream, self._epoch_start_stream = self._epoch_start_stream, None
        samplers.set_epoch(start_stream, self.epoch)
        return chain.from_iterable(samplers.complete_groups(self.dataset, self.size, self.drop_last, start_stream))

    def __len__(self) -> int:
        return samplers.count_complete_samples(len(self.dataset), self.size, self.drop_last)


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


def make_global_batch_loader(loader: DataLoader[Any], global_batch: int) -> DataLoader[Any]:
    """A loader of the same stream, with complete global batches and at most one worker."""
    dataset = GlobalBatchStream(loader.dataset, global_batch, loader.drop_last)
    settings = samplers.settings_of(loader) | {"num_workers": min(loader.num_workers, 1)}
    if loader.num_workers > 1:
        logger.warning(
            "elastic=True: one worker reads the stream, not dataloader_num_workers=%d, which would divide it.",
            loader.num_workers,
        )
    return DataLoader(dataset, loader.batch_size, drop_last=loader.drop_last, **settings)


def make_global_batch_sampler(batches: Any, global_batch: int, seed: int | None) -> Any:
    """A batch sampler over the samples of `batches`, with complete global batches."""
    # A mixture's global batches are always complete, and their order depends only on the seed.
    if isinstance(batches, MixtureBatchSampler):
        return batches
    seed = torch.initial_seed() if seed is None else seed
    sampler = GlobalBatchSampler(batches.sampler, global_batch, batches.drop_last, seed)
    return BatchSampler(sampler, batches.batch_size, drop_last=False)


def accumulation_steps(global_batch: int, batch_size: int, processes: int) -> int:
    """Micro-batches per optimizer step that keep the global batch.

    Args:
        global_batch: samples of an optimizer step, over all processes.
        batch_size: samples of a micro-batch of one process.
        processes: number of processes that read different samples.

    Raises:
        InvalidArgument: if no such number exists; the error lists the possible batch sizes and numbers of processes.
    """
    steps, remainder = divmod(global_batch, batch_size * processes)
    if steps and not remainder:
        return steps
    options = []
    if global_batch % processes == 0:
        sizes = _factors(global_batch // processes)
        options.append(f"per_device_train_batch_size of {_join_numbers(sizes)}")
    if global_batch % batch_size == 0:
        numbers = _factors(global_batch // batch_size)
        options.append("1 process" if numbers == [1] else f"{_join_numbers(numbers)} processes")
    raise InvalidArgument(
        f"elastic=True: a step of this run has {global_batch} samples, which {processes} x "
        f"per_device_train_batch_size={batch_size} does not divide. Use {', or '.join(options) or 'other numbers'}."
    )


def _factors(number: int) -> list[int]:
    return [factor for factor in range(1, number + 1) if number % factor == 0]


def _join_numbers(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
