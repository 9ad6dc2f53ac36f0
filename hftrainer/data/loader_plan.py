"""How the data reaches each process: what its loader reads, and the collective operations it needs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.compat import peers
from hftrainer.data.samplers import SeedableRandomSampler, SkippingBatchSampler
from hftrainer.data.sharding import (
    DataCollectives,
    EvenBatchSampler,
    ShardedBatchSampler,
    ShardedStream,
    ShardSpec,
    check_split,
)
from hftrainer.errors import InvalidArgument

logger = logging.getLogger(__name__)


@dataclass
class LoaderPlan:
    """How the loader of one process differs from the script's loader.

    Attributes:
        dataset: the dataset that it reads.
        settings: `DataLoader` keywords for sampling.
        shards: this process's batches of a distributed evaluation.
        messenger: collective operations of distributed training.
        round_size: batches that the main process reads at once for all; None when each process reads its own.
        generator: draws the sample order, the same in all processes.
        counts_per_rank: each process knows only its own number of batches.
        splits: whether each batch of the script's loader is split among the processes.
    """

    dataset: Any
    settings: dict[str, Any]
    shards: ShardedBatchSampler | None = None
    messenger: DataCollectives | None = None
    round_size: int | None = None
    generator: torch.Generator | None = None
    counts_per_rank: bool = False
    splits: bool = False

    def in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches until any process has no more."""
        if not self.counts_per_rank:
            yield from batches
            return
        assert self.messenger is not None
        nothing: Any = object()
        while True:
            batch = next(batches, nothing)
            if self.messenger.highest([batch is nothing])[0]:
                break
            yield batch
        if batch is not nothing:
            logger.warning(
                "The epoch ends with the shortest shard of the stream; this process drops the rest of its shard. "
                "To read all samples, give each process the same number of them."
            )

    @property
    def ends_with_filler(self) -> bool:
        """Whether this process's last batch is a filler that only keeps collective operations in step."""
        return self.shards is not None and self.shards.ends_with_filler

    def synchronize(self) -> None:
        """Broadcast the main process's generator state, so that all processes draw the same order."""
        if self.generator is not None and self.messenger is not None:
            self.generator.set_state(self.messenger.from_main(self.generator.get_state))


def deliver(
    loader: DataLoader, config: AcceleratorConfig, share: ShardSpec, messenger: DataCollectives | None, seed: int | None
) -> LoaderPlan:
    """Plan the loader of one process; the arguments are those of `PreparedDataLoader.from_loader`."""
    messenger = messenger if share.processes > 1 else None
    is_stream = isinstance(loader.dataset, IterableDataset)
    if messenger is not None and config.split_batches:
        check_split(_batch_size(loader), share.processes)
    dispatched = is_stream if config.dispatch_batches is None else config.dispatch_batches
    if messenger is not None and dispatched:
        delivery = _plan_of_all(loader, config, seed)
        delivery.settings["generator"] = None  # as in accelerate, which draws seeds from torch's global generator
        delivery.round_size = 1 if config.split_batches else share.processes
        delivery.splits = config.split_batches
    elif messenger is not None and is_stream:
        delivery = _plan_of_stream(loader, config, share)
    elif messenger is not None:
        delivery = _plan_of_batches(loader, config, share, seed)
        delivery.splits = config.split_batches
    elif share.processes > 1 and not is_stream:
        shards = ShardedBatchSampler(_batches(loader, seed), share)
        delivery = LoaderPlan(loader.dataset, _sampling(loader, shards), shards)
    else:
        delivery = _plan_of_all(loader, config, seed)
    delivery.messenger = messenger
    return delivery


def _plan_of_all(loader: DataLoader, config: AcceleratorConfig, seed: int | None) -> LoaderPlan:
    """The plan of a process that reads all of the data."""
    if isinstance(loader.dataset, IterableDataset):
        return LoaderPlan(loader.dataset, {"batch_size": loader.batch_size, "drop_last": loader.drop_last})
    return LoaderPlan(loader.dataset, _sampling(loader, _batches(loader, seed, seedable=config.use_seedable_sampler)))


def _plan_of_batches(loader: DataLoader, config: AcceleratorConfig, share: ShardSpec, seed: int | None) -> LoaderPlan:
    """The batches of one process in training."""
    batches, generator = _batches(loader, seed, seedable=config.use_seedable_sampler), None
    if not config.use_seedable_sampler:
        batches, generator = _with_generator(batches)
    even = EvenBatchSampler(batches, share, split=config.split_batches, even=config.even_batches)
    return LoaderPlan(loader.dataset, _sampling(loader, even), generator=generator)


def _plan_of_stream(loader: DataLoader, config: AcceleratorConfig, share: ShardSpec) -> LoaderPlan:
    """The samples of one process in training: its own shards, or its part of each round."""
    size, dataset = loader.batch_size, None
    if size is None:
        raise InvalidArgument(
            "accelerator_config['dispatch_batches']=False shards the samples of a stream, but this loader has no "
            "batch_size: set one, or remove dispatch_batches."
        )
    if config.split_batches:
        size //= share.processes
    else:
        dataset = peers.shard_of(loader.dataset, share.rank, share.processes)
    generator = None
    if dataset is None:
        dataset = ShardedStream(loader.dataset, share, size, loader.drop_last)
        drawn_from = getattr(loader.dataset, "generator", None)
        generator = drawn_from if isinstance(drawn_from, torch.Generator) else None
    return LoaderPlan(
        dataset, {"batch_size": size, "drop_last": loader.drop_last}, generator=generator, counts_per_rank=True
    )


def _sampling(loader: DataLoader, batches: Any) -> dict[str, Any]:
    if loader.batch_sampler is None:  # the dataset returns a whole batch for each item of the sampler
        return {"batch_size": None, "sampler": batches}
    return {"batch_sampler": SkippingBatchSampler(batches)}


def _batches(loader: DataLoader, seed: int | None, *, seedable: bool = True) -> Any:
    """The sampler of whole batches, with a random order made seedable. The user's own object is not changed."""
    if loader.batch_sampler is None:
        return loader.sampler
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    if not seedable or not isinstance(sampler, RandomSampler):
        return loader.batch_sampler
    return _with_sampler(
        loader.batch_sampler,
        SeedableRandomSampler(
            sampler.data_source,
            seed if seed is not None else torch.initial_seed(),
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
        ),
    )


def _with_generator(batches: Any) -> tuple[Any, torch.Generator | None]:
    """The batch sampler and its sampler's generator, made if absent; None if the sampler cannot have one."""
    sampler: Any = getattr(batches, "sampler", None)
    if not hasattr(sampler, "generator"):
        return batches, None
    if sampler.generator is None:
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        batches = _with_sampler(batches, sampler)
    return batches, sampler.generator


def _with_sampler(batches: Any, sampler: Any) -> Any:
    replaced = copy.copy(batches)
    replaced.sampler = sampler
    return replaced


def _batch_size(loader: DataLoader) -> int | None:
    return loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
