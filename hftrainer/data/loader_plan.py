"""Plans what the loader of each process reads, and which collective operations it needs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.base.nested import find_batch_size, nested_apply
from hftrainer.compat import libraries
from hftrainer.data import elastic, samplers
from hftrainer.data.samplers import ShardedBatchSampler, ShardSpec
from hftrainer.errors import InvalidArgument
from hftrainer.parallel.processes import Processes

logger = logging.getLogger(__name__)


@dataclass
class LoaderPlan:
    """How the loader of one process differs from the script's loader.

    Attributes:
        dataset: the dataset that the process reads.
        settings: keyword arguments of `DataLoader` for sampling.
        evaluation_sampler: this process's batches of a distributed evaluation.
        processes: the processes of distributed training, else None.
        round_size: number of batches that the main process reads before it scatters them; None when each process reads
            its own batches.
        generator: draws the sample order, the same in all processes.
        has_own_batch_count: whether each process knows only its own number of batches.
        splits: whether each batch of the script's loader is split among the processes.
    """

    dataset: Any
    settings: dict[str, Any]
    evaluation_sampler: ShardedBatchSampler | None = None
    processes: Processes | None = None
    round_size: int | None = None
    generator: torch.Generator | None = None
    has_own_batch_count: bool = False
    splits: bool = False

    def stop_at_shortest_shard(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches until one of the processes has no more."""
        assert self.processes is not None
        sentinel: Any = object()
        batch = next(batches, sentinel)
        while not self.processes.any_rank(batch is sentinel):
            yield batch
            batch = next(batches, sentinel)
        if batch is not sentinel:
            logger.warning(
                "The epoch ends with the shortest shard of the stream; this process drops the rest of its shard. "
                "To read all samples, make shards of equal length."
            )

    @property
    def ends_with_filler(self) -> bool:
        """Whether this process's last batch is a filler that only keeps collective operations in step."""
        return self.evaluation_sampler is not None and self.evaluation_sampler.ends_with_filler

    def synchronize(self) -> None:
        """Broadcast the main process's generator state, so that all processes draw the same order."""
        if self.generator is not None and self.processes is not None:
            self.generator.set_state(self.processes.broadcast_from_main(self.generator.get_state))


def plan_loader(
    loader: DataLoader[Any],
    config: AcceleratorConfig,
    shard_spec: ShardSpec,
    processes: Processes | None,
    seed: int | None,
    global_batch: int | None,
) -> LoaderPlan:
    """Plan the loader of one process. The arguments are those of `PreparedDataLoader`."""
    trains = processes is not None and shard_spec.processes > 1
    is_stream = isinstance(loader.dataset, IterableDataset)
    if global_batch is not None:
        elastic.check_loader(loader, config)
        loader = elastic.make_global_batch_loader(loader, global_batch) if is_stream else loader
    if trains and config.split_batches:
        samplers.check_split(samples_per_batch(loader), shard_spec.processes)
    dispatches = is_stream if config.dispatch_batches is None else config.dispatch_batches
    if trains and dispatches:
        plan = _plan_unsharded(loader, config, seed, global_batch)
        # As in accelerate, torch's global generator draws the seeds.
        plan.settings["generator"] = None
        plan.round_size, plan.splits = 1 if config.split_batches else shard_spec.processes, config.split_batches
    elif trains and is_stream:
        plan = _plan_stream(loader, config, shard_spec)
    elif trains:
        plan = _plan_batches(loader, config, shard_spec, seed, global_batch)
    elif shard_spec.processes > 1 and not is_stream:
        shards = ShardedBatchSampler(_seedable_batches(loader, seed), shard_spec)
        plan = LoaderPlan(loader.dataset, _sampler_args(loader, shards), shards)
    else:
        plan = _plan_unsharded(loader, config, seed, global_batch)
    plan.settings["num_workers"] = loader.num_workers
    plan.processes = processes if trains else None
    return plan


def _plan_unsharded(
    loader: DataLoader[Any], config: AcceleratorConfig, seed: int | None, global_batch: int | None
) -> LoaderPlan:
    """The plan of a process that reads all of the data."""
    if isinstance(loader.dataset, IterableDataset):
        return LoaderPlan(loader.dataset, {"batch_size": loader.batch_size, "drop_last": loader.drop_last})
    batches = _seedable_batches(loader, seed, seedable=config.use_seedable_sampler)
    batches = batches if global_batch is None else elastic.make_global_batch_sampler(batches, global_batch, seed)
    return LoaderPlan(loader.dataset, _sampler_args(loader, batches))


def _plan_batches(
    loader: DataLoader[Any], config: AcceleratorConfig, shards: ShardSpec, seed: int | None, global_batch: int | None
) -> LoaderPlan:
    """The plan for training data of which each process reads its batches."""
    batches, generator = _seedable_batches(loader, seed, seedable=config.use_seedable_sampler), None
    if not config.use_seedable_sampler:
        batches, generator = _ensure_generator(batches)
    batches = batches if global_batch is None else elastic.make_global_batch_sampler(batches, global_batch, seed)
    even = samplers.EvenBatchSampler(batches, shards, split=config.split_batches, even=config.even_batches)
    return LoaderPlan(loader.dataset, _sampler_args(loader, even), generator=generator, splits=config.split_batches)


def _plan_stream(loader: DataLoader[Any], config: AcceleratorConfig, shard_spec: ShardSpec) -> LoaderPlan:
    """The plan for a training stream: each process reads its shards or a part of each round."""
    size, dataset = loader.batch_size, None
    if size is None:
        raise InvalidArgument(
            "accelerator_config['dispatch_batches']=False shards the samples of a stream, but this loader has no "
            "batch_size: set one, or remove dispatch_batches."
        )
    if config.split_batches:
        size //= shard_spec.processes
    else:
        dataset = libraries.shard_stream(loader.dataset, shard_spec.rank, shard_spec.processes)
    generator = None
    if dataset is None:
        dataset = samplers.ShardedStream(loader.dataset, shard_spec, size, loader.drop_last)
        stream_generator = getattr(loader.dataset, "generator", None)
        generator = stream_generator if isinstance(stream_generator, torch.Generator) else None
    settings = {"batch_size": size, "drop_last": loader.drop_last}
    return LoaderPlan(dataset, settings, generator=generator, has_own_batch_count=True)


def _sampler_args(loader: DataLoader[Any], batches: Any) -> dict[str, Any]:
    # The dataset returns a complete batch for each item of the sampler.
    if loader.batch_sampler is None:
        return {"batch_size": None, "sampler": batches}
    return {"batch_sampler": samplers.SkippingBatchSampler(batches)}


def _seedable_batches(loader: DataLoader[Any], seed: int | None, *, seedable: bool = True) -> Any:
    """The sampler of batches, with a seedable random order. The user's object is not changed."""
    if loader.batch_sampler is None:
        return loader.sampler
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    if not seedable or not isinstance(sampler, RandomSampler):
        return loader.batch_sampler
    return _replace_sampler(
        loader.batch_sampler,
        samplers.SeedableRandomSampler(
            sampler.data_source,
            seed if seed is not None else torch.initial_seed(),
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
        ),
    )


def _ensure_generator(batches: Any) -> tuple[Any, torch.Generator | None]:
    """The batch sampler and its generator, made if absent, or None if impossible."""
    sampler: Any = getattr(batches, "sampler", None)
    if not hasattr(sampler, "generator"):
        return batches, None
    if sampler.generator is None:
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        batches = _replace_sampler(batches, sampler)
    return batches, sampler.generator


def _replace_sampler(batches: Any, sampler: Any) -> Any:
    batch_sampler = copy.copy(batches)
    batch_sampler.sampler = sampler
    return batch_sampler


def samples_per_batch(loader: DataLoader[Any]) -> int | None:
    """Samples in a batch; None if the loader's batch sampler has no batch size."""
    return loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)


# ---- Batches that the main process reads for all ---------------------------------------------------------------------


def group_batches(batches: Iterator[Any], group_size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yields groups of `group_size` batches without reading ahead. An incomplete last group may be dropped."""
    while len(group := list(islice(batches, group_size))) == group_size:
        yield group
    if group and not drop_last:
        yield group


def split_groups(groups: Iterable[list[Any]], processes: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yields each group's rows, concatenated and split into equal parts, one for each process.

    Missing rows are taken from the first group; with `drop_last`, surplus rows are dropped instead.

    Raises:
        InvalidArgument: for batches that cannot be concatenated.
    """
    first_rows: Any = None
    for group in groups:
        batch = _concatenate_batches(group)
        first_rows = _slice_rows(batch, 0, processes) if first_rows is None else first_rows
        size, remainder = divmod(find_batch_size(batch) or 0, processes)
        if remainder and not drop_last:
            batch, size = _concatenate_batches([batch, first_rows]), size + 1
        yield [_slice_rows(batch, rank * size, (rank + 1) * size) for rank in range(processes)]


_ADVICE = "set accelerator_config={'dispatch_batches': False}, so that each process reads its own batches."


def _concatenate_batches(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(batches)
        except RuntimeError as error:
            raise InvalidArgument(
                f"The main process cannot concatenate batches of different shapes: {error}. Pad all batches to one "
                f"length, or {_ADVICE}"
            ) from error
    if isinstance(first, (dict, Mapping)):
        container_class: Any = type(first)
        return container_class({key: _concatenate_batches([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        columns = [_concatenate_batches(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise InvalidArgument(f"The main process can scatter tensors, not values of type {type(first).__name__}: {_ADVICE}")


def _slice_rows(batch: Any, start: int, stop: int) -> Any:
    # Clone the slice, since pickling a slice of a tensor pickles the storage of the complete tensor.
    return nested_apply(lambda tensor: tensor[start:stop].clone(), batch)
