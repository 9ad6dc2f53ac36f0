"""Mixtures: training data from several sources, in given proportions.

All samples of a micro-batch are from one source. So the loss of a micro-batch is that of its source, however it is
computed, and a log line can show what each source contributes. Within an optimizer step, the micro-batches of the
sources are in random order.

The order depends only on the seed and the number of the step, so a run resumes exactly on any number of processes.
"""

from __future__ import annotations

import bisect
import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Sampler

from hftrainer.compat.libraries import has_length
from hftrainer.data.samplers import EpochSampler, set_epoch
from hftrainer.errors import InvalidArgument, suggest

#: Optimizer step, counted from 0 → the share of each source, as an array.
Shares = Callable[[int], Any]

#: Keys of a dict that holds the splits of one dataset, rather than sources.
_SPLITS = {"train", "validation", "test"}
#: Columns of samples, which are no sources.
_COLUMNS = {"input_ids", "label", "labels"}


class MixtureDataset(ConcatDataset[Any]):
    """The samples of all sources, concatenated.

    Args:
        sources: name → map-style dataset.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        if empty := [name for name, source in sources.items() if not len(source)]:
            raise InvalidArgument(f"train_dataset[{empty[0]!r}] has no samples.")
        super().__init__(sources.values())
        self.sources = dict(sources)

    def indices(self) -> dict[str, Sequence[int]]:
        """Source → the indices of its samples."""
        ends = self.cumulative_sizes
        return {name: range(end - len(self.sources[name]), end) for name, end in zip(self.sources, ends, strict=True)}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of a micro-batch, which one source may read at once."""
        source_index = bisect.bisect_right(self.cumulative_sizes, indices[0])
        source: Any = self.datasets[source_index]
        end = self.cumulative_sizes[source_index]
        first = end - len(source)
        if not hasattr(source, "__getitems__") or not all(first <= index < end for index in indices):
            return [self[index] for index in indices]
        return source.__getitems__([index - first for index in indices])


class MixtureStream(IterableDataset[Any]):
    """An endless stream of the samples of all sources. A source that ends begins again.

    Args:
        sources: name → stream or map-style dataset.

    Attributes:
        passes: number of passes over each source that this process has begun.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources = dict(sources)
        self.plan: MixturePlan | None = None
        self.batch_size = 1
        self.seed: int | None = None
        self.passes = dict.fromkeys(sources, 0)

    def copy_with_plan(self, plan: MixturePlan, batch_size: int, seed: int | None) -> MixtureStream:
        """A copy with samples in the plan's order, `batch_size` for each micro-batch."""
        stream = copy.copy(self)
        stream.plan, stream.batch_size, stream.seed = plan, batch_size, seed
        stream.passes = dict.fromkeys(self.sources, 0)
        return stream

    def __iter__(self) -> Iterator[Any]:
        assert self.plan is not None
        plan = self.plan.from_step(0)
        self.passes = dict.fromkeys(self.sources, 0)
        readers = [self._read_source(name) for name in self.sources]
        while True:
            for source, _ in plan.next_step():
                yield from islice(readers[source], self.batch_size)

    def _read_source(self, name: str) -> Iterator[Any]:
        source, order = self.sources[name], None
        if not isinstance(source, IterableDataset):
            order = SourceOrder(name, range(len(source)), self.seed)
        for number in count():
            self.passes[name] += 1
            set_epoch(source, number)
            # `self` stands for no sample.
            sample: Any = self
            for sample in source if order is None else map(source.__getitem__, order.indices_of_pass(number).tolist()):
                yield sample
            if sample is self:
                raise InvalidArgument(f"train_dataset[{name!r}] has no samples.")


def as_mixture(dataset: Any) -> Any:
    """A mixture for a dict of datasets. Any other dataset is returned unchanged.

    Raises:
        InvalidArgument: for the splits of one dataset.
    """
    if not isinstance(dataset, Mapping) or not dataset or 0 in dataset:
        return dataset
    if splits := [key for key in map(str, dataset) if key in _SPLITS]:
        example = "train" if "train" in splits else splits[0]
        raise InvalidArgument(
            f"The training dataset is of type {type(dataset).__name__}, with the keys {', '.join(map(str, dataset))}: "
            f"pass one of its sets, such as dataset[{example!r}]. In a mixture, each key names a source to train on."
        )
    if columns := _COLUMNS & set(map(str, dataset)):
        raise InvalidArgument(
            f"The training dataset is of type {type(dataset).__name__}, with the column {min(columns)!r}: pass "
            "datasets.Dataset.from_dict(data), or a list of samples. In a mixture, each key names a source to train on."
        )
    sources = {str(name): source for name, source in dataset.items()}
    for name, source in sources.items():
        is_plain = hasattr(source, "__getitem__") and has_length(source) and not isinstance(source, (str, Mapping))
        if not isinstance(source, IterableDataset) and not is_plain:
            raise InvalidArgument(
                f"train_dataset[{name!r}] is of type {type(source).__name__}: pass a Dataset or a list."
            )
    is_stream = any(isinstance(source, IterableDataset) for source in sources.values())
    return MixtureStream(sources) if is_stream else MixtureDataset(sources)


# ---- Proportions -----------------------------------------------------------------------------------------------------


def make_shares(weights: Any, temperature: float, sizes: Mapping[str, int | None]) -> Shares:
    """The shares of the sources at each optimizer step, in the order of `sizes`.

    Args:
        weights: `mixture_weights`: a dict source → weight, a function of the step that returns such a dict, or None
            for weights by size.
        temperature: `mixture_temperature`; a source of `n` samples has the weight `n ** (1 / temperature)`.
        sizes: source → its samples; None for a stream.

    Raises:
        InvalidArgument: for weights that do not fit the sources.
    """
    if callable(weights):
        return partial(_call_weights, weights, sizes)
    if weights is not None:
        return partial(constant_shares, _read_weights(weights, sizes, "mixture_weights"))
    if unsized := [name for name, size in sizes.items() if size is None]:
        raise InvalidArgument(
            f"mixture_weights is needed: train_dataset[{unsized[0]!r}] is a stream, whose size is not known."
        )
    largest = max(size or 0 for size in sizes.values())
    powers = {name: ((size or 0) / largest) ** (1 / temperature) for name, size in sizes.items()}
    return partial(constant_shares, _read_weights(powers, sizes, "mixture_temperature"))


# Functions of the module, so that workers can unpickle them.


def constant_shares(shares: Any, _: int) -> Any:
    """The same shares at each step."""
    return shares


def _call_weights(weights: Callable[[int], Any], names: Iterable[str], step: int) -> Any:
    return _read_weights(weights(step), names, f"mixture_weights({step})")


def _read_weights(weights: Any, names: Iterable[str], argument: str) -> Any:
    names = list(names)
    if not isinstance(weights, Mapping):
        raise InvalidArgument(f"{argument} is {weights!r}: it must be a dict, source → weight.")
    if unknown_names := [name for name in weights if name not in names]:
        hint = suggest(unknown_names[0], names, f"; sources: {', '.join(map(str, names))}.")
        raise InvalidArgument(f"{argument} has a weight for {unknown_names[0]!r}, which is no source{hint}")
    if missing_names := [name for name in names if name not in weights]:
        raise InvalidArgument(f"{argument} has no weight for {missing_names[0]!r}: add one, or 0 to skip this source.")
    try:
        numbers = [float(weights[name]) for name in names]
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{argument}={dict(weights)}: weights must be numbers.") from error
    total = sum(numbers)
    if not (0 < total < float("inf")) or min(numbers) < 0:
        raise InvalidArgument(f"{argument}={dict(weights)}: weights must be at least 0, and one of them above 0.")
    return np.asarray(numbers) / total


class MixturePlan:
    """Selects the source of each micro-batch.

    After any step, the micro-batches of each source match its share of all of them, to within one.

    Args:
        shares: the share of each source at each step.
        sources: number of sources.
        micro_batches: micro-batches of an optimizer step, over all processes.
        seed: seeds the order within a step.

    Attributes:
        step: the next step.
        drawn: micro-batches of each source in the steps before the next one.
    """

    def __init__(self, shares: Shares, sources: int, micro_batches: int, seed: int) -> None:
        self.shares, self.micro_batches, self.seed = shares, micro_batches, seed
        self.step, self.drawn, self._quotas = 0, np.zeros(sources, dtype=np.int64), np.zeros(sources)

    def from_step(self, step: int) -> MixturePlan:
        """A plan that continues from a step."""
        plan = copy.copy(self)
        plan.drawn, plan._quotas = self.drawn.copy(), self._quotas.copy()
        if step < plan.step:
            plan.step, plan.drawn, plan._quotas = 0, np.zeros_like(plan.drawn), np.zeros_like(plan._quotas)
        while plan.step < step:
            plan._draw_step()
        return plan

    def next_step(self) -> list[tuple[int, int]]:
        """The next step's micro-batches: source, and number of earlier micro-batches of this source."""
        counts = self.drawn.tolist()
        order = np.random.default_rng((self.seed, self.step)).permutation(self._draw_step())
        micro_batches = []
        for source in order.tolist():
            micro_batches.append((source, counts[source]))
            counts[source] += 1
        return micro_batches

    def _draw_step(self) -> list[int]:
        shares = self.shares(self.step)
        self._quotas += shares * self.micro_batches
        # Never draw a source whose share is now 0, even if it lacks a part of a micro-batch.
        deficits = np.where(shares > 0, self._quotas - self.drawn, -np.inf)
        sources = []
        for _ in range(self.micro_batches):
            source = int(deficits.argmax())
            sources.append(source)
            deficits[source] -= 1
            self.drawn[source] += 1
        self.step += 1
        return sources


# ---- Samples ---------------------------------------------------------------------------------------------------------


class SourceOrder:
    """The samples of a source over many passes, each in another random order.

    Args:
        name: the source.
        indices: its samples.
        seed: the seed; None keeps the order of `indices`.
    """

    def __init__(self, name: str, indices: Sequence[int], seed: int | None) -> None:
        self._indices = np.asarray(indices)
        self._seed = None if seed is None else (seed, zlib.crc32(name.encode()))
        self._cached_pass: tuple[int, Any] = -1, None

    def indices_of_pass(self, pass_number: int) -> Any:
        """The sample indices of a pass, counted from 0, as an array."""
        if self._cached_pass[0] != pass_number:
            order = self._indices
            if self._seed is not None:
                order = np.random.default_rng((*self._seed, pass_number)).permutation(order)
            self._cached_pass = pass_number, order
        return self._cached_pass[1]

    def take_indices(self, start: int, size: int) -> list[int]:
        """The sample indices from `start` on, counted over all passes."""
        indices: list[int] = []
        while len(indices) < size:
            number, offset = divmod(start + len(indices), len(self._indices))
            indices += self.indices_of_pass(number)[offset : offset + size - len(indices)].tolist()
        return indices


class MixtureBatchSampler(EpochSampler, Sampler[list[int]]):
    """Yields the micro-batches of all processes. Each epoch has complete optimizer steps.

    Args:
        sources: source → the indices of its samples.
        plan: selects the source of each micro-batch.
        batch_size: samples of a micro-batch.
        seed: seeds the order of the samples; None keeps it.
    """

    has_exact_length = True
    drop_last = False

    def __init__(
        self, sources: Mapping[str, Sequence[int]], plan: MixturePlan, batch_size: int, seed: int | None
    ) -> None:
        self.sources, self.plan, self.batch_size, self.seed = sources, plan, batch_size, seed
        step_samples = batch_size * plan.micro_batches
        self.steps = -(-sum(map(len, sources.values())) // step_samples)

    def __len__(self) -> int:
        return self.steps * self.plan.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        self.plan = plan = self.plan.from_step(self.epoch * self.steps)
        # Iterate with a copy, so that the attribute stays at the epoch's beginning.
        plan = plan.from_step(plan.step)
        orders = [SourceOrder(name, indices, self.seed) for name, indices in self.sources.items()]
        for _ in repeat(None, self.steps):
            for source, offset in plan.next_step():
                yield orders[source].take_indices(offset * self.batch_size, self.batch_size)


def group_by_column(values: Sequence[Any]) -> dict[str, Sequence[int]]:
    """Value → the indices of the samples with this value, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(str(value), []).append(index)
    return dict(groups)
