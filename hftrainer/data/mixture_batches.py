"""Plans the batches of a mixture, and logs what each of its sources contributes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.compat import libraries
from hftrainer.data import mixture
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import innermost, seed_of_order
from hftrainer.errors import InvalidArgument, UnsupportedArgument, suggest

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)

_MIXTURES = (mixture.MixtureDataset, mixture.MixtureStream)


def collect_settings(parts: TrainerParts) -> list[Any] | None:
    """The settings that determine the sample order of a mixture; None without a mixture."""
    args = parts.trainer.args
    if args.mixture_column is None and not isinstance(mixture.as_mixture(parts.trainer.train_dataset), _MIXTURES):
        return None
    weights = args.mixture_weights
    weights = getattr(weights, "__qualname__", type(weights).__name__) if callable(weights) else weights
    return [weights, args.mixture_temperature, args.mixture_column]


def make_batch_sampler(parts: TrainerParts, sources: Mapping[str, Sequence[int]]) -> mixture.MixtureBatchSampler:
    """A batch sampler for map-style data.

    Args:
        parts: the parts of the Trainer.
        sources: source → the indices of its samples.

    Raises:
        UnsupportedArgument: for an order within the sources that is neither random nor sequential.
    """
    plan = _make_plan(parts, {name: len(indices) for name, indices in sources.items()})
    return mixture.MixtureBatchSampler(sources, plan, parts.run.train_batch_size, _find_order_seed(parts, plan))


def plan_stream(parts: TrainerParts, stream: mixture.MixtureStream) -> mixture.MixtureStream:
    """The stream in the order of its plan. Only one worker may read it: each of several would read all sources."""
    plan = _make_plan(parts, dict.fromkeys(stream.sources))
    if (workers := parts.trainer.args.dataloader_num_workers) > 1:
        logger.warning(
            "dataloader_num_workers=%d is reduced to 1: only one worker can read the streams of a mixture.", workers
        )
    return stream.copy_with_plan(plan, parts.run.train_batch_size, _find_order_seed(parts, plan))


def _find_order_seed(parts: TrainerParts, plan: mixture.MixturePlan) -> int | None:
    """The seed for the order within the sources; None keeps the order of each source."""
    order = parts.trainer.args.train_sampling_strategy
    if order not in ("random", "sequential") or getattr(parts.trainer.args, "sortish_sampler", False):
        raise UnsupportedArgument(
            f"train_sampling_strategy={str(order)!r}: a mixture reads each source in random order, or with "
            "'sequential' in the order of its samples. Remove it, or sort each source yourself and use 'sequential'."
        )
    return None if order == "sequential" else plan.seed


def _make_plan(parts: TrainerParts, sizes: Mapping[str, int | None]) -> mixture.MixturePlan:
    trainer, args = parts.trainer, parts.trainer.args
    if parts.loader_factory.read_config().split_batches:
        raise UnsupportedArgument(
            "accelerator_config['split_batches']=True: each batch of a mixture is for one process. Remove it, and set "
            "per_device_train_batch_size to the batch size of one process."
        )
    if args.tokens_per_batch is not None:
        raise UnsupportedArgument(
            f"tokens_per_batch={args.tokens_per_batch}: each micro-batch of a mixture has per_device_train_batch_size "
            "samples. Remove one of the two arguments."
        )
    shares = mixture.make_shares(args.mixture_weights, args.mixture_temperature, sizes)
    micro_batches = args.gradient_accumulation_steps * trainer.accelerator.processes.data_world_size
    return mixture.MixturePlan(shares, len(sizes), micro_batches, seed_of_order(args))


def check_column(column: str, dataset: Any) -> None:
    """Raise `InvalidArgument` unless a dataset has the column that names each sample's source."""
    if isinstance(dataset, _MIXTURES):
        raise InvalidArgument(
            f"mixture_column={column!r} is for one dataset, but train_dataset is a dict: use only one of them."
        )
    if not libraries.is_map_style_dataset(dataset):
        raise InvalidArgument(
            f"mixture_column={column!r}: train_dataset is of type {type(dataset).__name__}, but only a "
            "datasets.Dataset has columns. Pass a dict {source: dataset} as train_dataset instead."
        )
    if column not in dataset.column_names:
        columns = dataset.column_names
        raise InvalidArgument(
            f"mixture_column={column!r}: train_dataset has the columns {', '.join(columns)}{suggest(column, columns)}."
        )


@dataclass(eq=False, repr=False)
class SourceLog:
    """Sums the loss, the samples and the tokens of each source.

    Args:
        parts: the parts of the Trainer.
        names: the sources.
        plan: selects the source of each micro-batch.
        steps_in_epoch: optimizer steps of an epoch.
        sizes: samples of each source; None for a stream, which counts its passes.
        stream: the stream that this process reads, if any.
    """

    parts: TrainerParts
    names: list[str]
    plan: mixture.MixturePlan
    steps_in_epoch: int
    sizes: list[int] | None
    stream: mixture.MixtureStream | None

    def __post_init__(self) -> None:
        #: An optimizer step, and the sources of its micro-batches.
        self._step_sources: tuple[int, list[int]] = -1, []
        #: The loss of each source since the last log line, on the device; its samples and tokens, on the CPU.
        self._losses = torch.zeros(len(self.names), device=self.parts.trainer.args.device)
        self._counts = torch.zeros(len(self.names), 2, dtype=torch.float64)
        #: Whether the sums cover all steps since the last log line.
        self._is_complete = True
        if (progress := self.parts.run.resumed_progress) is not None:
            self._restore_sums(progress.sources)

    def state_dict(self) -> dict[str, list[float]]:
        """The sums, by source: loss, samples and tokens."""
        rows = zip(self.names, self._losses.tolist(), self._counts.tolist(), strict=True)
        return {name: [loss, *counts] for name, loss, counts in rows}

    def _restore_sums(self, saved: dict[str, list[float]]) -> None:
        self._is_complete = set(saved) == set(self.names)
        for index, name in enumerate(self.names):
            loss, *counts = saved.get(name, (0.0, 0.0, 0.0))
            self._losses[index] = loss
            self._counts[index] = torch.tensor(counts, dtype=torch.float64)

    def add(self, epoch: int, index: int, loss: torch.Tensor, samples: int, tokens: int) -> None:
        """Add a micro-batch, the `index`-th of this process in its epoch."""
        processes = self.parts.trainer.accelerator.processes
        number = index * processes.data_world_size + processes.data_rank
        step_in_epoch, index_in_step = divmod(number, self.plan.micro_batches)
        if (step := epoch * self.steps_in_epoch + step_in_epoch) != self._step_sources[0]:
            self.plan = self.plan.from_step(step)
            self._step_sources = step, [source for source, _ in self.plan.next_step()]
        source = self._step_sources[1][index_in_step]
        self._losses[source] += loss.detach()
        self._counts[source, 0] += samples
        self._counts[source, 1] += tokens

    def pop(self, steps: int) -> dict[str, float]:
        """The entries of a log line, over all processes. Resets the sums.

        `loss` is the sum of `loss/<source>`, in the order of the sources.

        Args:
            steps: optimizer steps since the last log line.
        """
        processes, policy = self.parts.trainer.accelerator.processes, self.parts.policy
        local_sums = torch.cat([self._losses.cpu().double()[:, None], self._counts], dim=1)
        rows = torch.stack(processes.gather_objects([local_sums], one_per_tp_group=True)).sum(dim=0).tolist()
        is_complete, self._is_complete = self._is_complete, True
        self._losses.zero_()
        self._counts.zero_()
        logs: dict[str, float] = {}
        if is_complete:
            losses = [policy.logged_loss(row[0] / processes.data_world_size / steps) for row in rows]
            logs = {"loss": sum(losses)} | {f"loss/{name}": loss for name, loss in zip(self.names, losses, strict=True)}
        for column, unit in ((1, "samples"), (2, "tokens")):
            if any(row[column] for row in rows):
                logs |= {f"{unit}/{name}": round(row[column]) for name, row in zip(self.names, rows, strict=True)}
        return logs | {f"epoch/{name}": passes for name, passes in zip(self.names, self._count_passes(), strict=False)}

    def _count_passes(self) -> list[float]:
        """The passes over each source; empty if another process reads the stream."""
        if self.sizes is None:
            passes = [] if self.stream is None else list(self.stream.passes.values())
            return [float(number) for number in passes] if any(passes) else []
        size, drawn = self.parts.run.train_batch_size, self.plan.drawn.tolist()
        return [batches * size / samples for batches, samples in zip(drawn, self.sizes, strict=True)]


def make_source_log(parts: TrainerParts, loader: Any) -> SourceLog | None:
    """The log of the sources; None if the loader does not read a mixture."""
    if not isinstance(loader, PreparedDataLoader):
        return None
    batches = innermost(loader.batch_sampler)
    if isinstance(batches, mixture.MixtureBatchSampler):
        sizes = list(map(len, batches.sources.values()))
        return SourceLog(parts, list(batches.sources), batches.plan.from_step(0), batches.steps, sizes, None)
    stream = loader.source
    if not isinstance(stream, mixture.MixtureStream) or stream.plan is None:
        return None
    return SourceLog(parts, list(stream.sources), stream.plan.from_step(0), 0, None, stream)
