"""Converts batches of `tf.data` to torch tensors, and adds tf.data's methods to other datasets."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrainer.base.nested import nested_apply
from hftrainer.errors import InvalidArgument

logger = logging.getLogger(__name__)

INFINITE, UNKNOWN = -1, -2
#: Label columns: the first that exists, else both columns of `_SPANS`.
_LABELS = ("labels", "label")
_SPANS = ("start_positions", "end_positions")


class RowDataset:
    """A dataset of `datasets` or torch, with the methods of `tf.data.Dataset` that `TFTrainer` calls.

    Each method returns a new dataset, as in tf.data. Each iteration over a shuffled dataset has a new order.

    Args:
        rows: dicts with 'label' or 'labels' (or 'start_positions' and 'end_positions'), or pairs
            (features, labels). A sequence, or an iterable that can be iterated again.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._repeats = False
        self._seed: int | None = None
        self._size: int | None = None
        self._drops_remainder = False
        self._iteration_count = 0

    def _copy_with_settings(self, **settings: Any) -> RowDataset:
        dataset = copy.copy(self)
        vars(dataset).update({f"_{name}": value for name, value in settings.items()}, _iteration_count=0)
        return dataset

    def cardinality(self) -> int:
        """Number of rows, or `UNKNOWN`."""
        return len(self.rows) if hasattr(self.rows, "__len__") else UNKNOWN

    def repeat(self) -> RowDataset:
        """Repeat the rows infinitely."""
        return self._copy_with_settings(repeats=True)

    def shuffle(self, buffer_size: int, seed: int | None = None) -> RowDataset:
        """Shuffle all rows in each pass; `buffer_size` is ignored."""
        return self._copy_with_settings(seed=0 if seed is None else seed)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> RowDataset:
        """Group the rows into batches of NumPy arrays."""
        return self._copy_with_settings(size=batch_size, drops_remainder=drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        self._iteration_count += 1
        return self._iterate(self._iteration_count)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        pairs = map(as_pair, self._iterate_rows(iteration))
        if self._size is None:
            yield from pairs
            return
        while batch := list(itertools.islice(pairs, self._size)):
            if len(batch) < self._size and self._drops_remainder:
                return
            yield _stack([features for features, _ in batch]), _stack([labels for _, labels in batch])

    def _iterate_rows(self, iteration: int) -> Iterator[Any]:
        # torch's IterableDataset has a __getitem__ too, which raises.
        rows: Any = self.rows if hasattr(self.rows, "__len__") and hasattr(self.rows, "__getitem__") else None
        for repetition in itertools.count():
            if self._seed is None:
                yield from self.rows if rows is None else (rows[index] for index in range(len(rows)))
            else:
                sequence = list(self.rows) if rows is None else rows
                order = np.random.default_rng((self._seed, iteration, repetition)).permutation(len(sequence))
                yield from (sequence[int(index)] for index in order)
            if not self._repeats:
                return


def as_pair(row: Any) -> tuple[Any, Any]:
    """The features and the labels of a row or batch.

    Raises:
        InvalidArgument: if it is neither a pair nor a dict with labels.
    """
    if isinstance(row, Mapping):
        for name in _LABELS:
            if name in row:
                return {key: value for key, value in row.items() if key != name}, row[name]
        if all(name in row for name in _SPANS):
            features = {key: value for key, value in row.items() if key not in _SPANS}
            return features, {name: row[name] for name in _SPANS}
        raise InvalidArgument(
            f"The dataset yields a dict without labels ({', '.join(map(str, row))}): TFTrainer accepts pairs "
            "(features, labels), or dicts with 'labels', 'label', or 'start_positions' and 'end_positions'."
        )
    if not isinstance(row, (tuple, list)) or len(row) != 2 or not isinstance(row[0], Mapping):
        kind = f"{len(row)} values" if isinstance(row, (tuple, list)) else type(row).__name__
        raise InvalidArgument(
            f"The dataset yields {kind}: TFTrainer accepts pairs (features, labels), where features is a dict by names."
        )
    return row[0], row[1]


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _stack([value[name] for value in values]) for name in values[0]}
    arrays = [np.asarray(value) for value in values]
    # Python floats become float32, as in torch.
    if arrays[0].dtype == np.float64 and not hasattr(values[0], "dtype"):
        arrays = [array.astype(np.float32) for array in arrays]
    if len({array.shape for array in arrays}) > 1:
        shapes = ", ".join(sorted({str(array.shape) for array in arrays}))
        raise InvalidArgument(f"The rows of a batch have the shapes {shapes}: pad them to one length in the dataset.")
    return np.stack(arrays)


def as_pipeline(dataset: Any) -> Any:
    """The dataset itself if it is a `tf.data` dataset, else a `RowDataset`.

    Raises:
        InvalidArgument: for any other object.
    """
    if hasattr(dataset, "cardinality") and hasattr(dataset, "batch"):
        return dataset
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise InvalidArgument(
            f"{type(dataset).__name__} is not a dataset: pass a tf.data.Dataset, or a dataset of datasets or torch."
        )
    return RowDataset(dataset)


def count_rows(dataset: Any, *, may_be_infinite: bool = False) -> int:
    """Number of rows. Reads the pipeline once if its length is unknown.

    Returns:
        The number, or `INFINITE`.

    Raises:
        InvalidArgument: for an empty dataset, and for an infinite one unless `may_be_infinite`.
    """
    count = int(dataset.cardinality())
    if count == INFINITE and not may_be_infinite:
        raise InvalidArgument("The dataset is infinite: use dataset.take(n), or for training set max_steps.")
    if count == UNKNOWN:
        count = sum(1 for _ in arrays(dataset))
        logger.info("The dataset has no known length. It has %d examples.", count)
    if count == 0:
        raise InvalidArgument("The dataset is empty: it has no example.")
    return count


def arrays(dataset: Any) -> Iterator[Any]:
    """Iterate over a pipeline, with its tensors as NumPy arrays."""
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)


def to_torch(values: Any, part: slice) -> Any:
    """Convert arrays to tensors. Integers become int64.

    Args:
        values: arrays of shape `(rows, ...)` in nested dicts.
        part: the rows to select.

    Raises:
        InvalidArgument: for strings and for ragged tensors.
    """
    if isinstance(values, Mapping):
        return {name: to_torch(value, part) for name, value in values.items()}
    if hasattr(values, "row_splits"):
        raise InvalidArgument("The dataset yields ragged tensors: pad them to one length, for example by to_tensor().")
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        kind = "strings" if array.dtype.kind in "OSU" else str(array.dtype)
        raise InvalidArgument(f"The dataset yields {kind}: torch's tensors hold numbers, so tokenize in the dataset.")
    tensor = torch.from_numpy(np.array(array[part]))
    return tensor.long() if array.dtype.kind in "iu" else tensor


def number_of_rows(values: Any) -> int:
    """Number of rows of arrays or tensors in nested dicts."""
    return number_of_rows(next(iter(values.values()))) if isinstance(values, Mapping) else len(values)


@dataclass(eq=False)
class Batches(IterableDataset[Any]):
    """The micro-batches of one rank, from the batches of a pipeline.

    Each is a dict with `features` and `labels` as tensors, `instances`, the number of labels in the batch other than
    -100, and `is_undivided`, whether all ranks get all rows, because the rows cannot be divided.

    Args:
        pipeline: yields batches of pairs.
        count: batches in a pass.
        rank: the rank of this process.
        processes: number of processes that share each batch.
        micro_batches: number of parts of a process's rows, for accumulation.
        trains: raise for batches with too few rows, instead of passing all rows to all ranks.
    """

    pipeline: Any
    count: int
    rank: int = 0
    processes: int = 1
    micro_batches: int = 1
    trains: bool = False

    def __post_init__(self) -> None:
        self.epoch = self._iteration_count = 0

    def __len__(self) -> int:
        return self.count * self.micro_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._iteration_count, self.epoch):
            # tf.data reshuffles for each iterator, so a resumed run first creates those of earlier epochs.
            iter(self.pipeline)
        self._iteration_count = self.epoch + 1
        for batch in itertools.islice(arrays(self.pipeline), self.count):
            features, labels = as_pair(batch)
            # A dict of labels counts as one, as in TFTrainer, so that its loss is a sum.
            instances = 1 if isinstance(labels, Mapping) else int((np.asarray(labels) != -100).sum())
            for part in self._micro_batch_slices(number_of_rows(labels)):
                yield {
                    "features": to_torch(features, part),
                    "labels": to_torch(labels, part),
                    "instances": instances,
                    "is_undivided": part == slice(None),
                }

    def _micro_batch_slices(self, row_count: int) -> list[slice]:
        """Slices of the rows for the micro-batches of this process."""
        part_count = self.processes * self.micro_batches
        if self.trains and row_count < part_count:
            raise InvalidArgument(
                f"The training dataset yields a batch of {row_count} rows for {part_count} micro-batches: batch it by "
                "args.train_batch_size * args.gradient_accumulation_steps."
            )
        if not self.trains and row_count % part_count:
            return [slice(None)]
        first_part = self.rank * self.micro_batches
        edges = [number * row_count // part_count for number in range(first_part, first_part + self.micro_batches + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(edges)]


def select_rank_rows(outputs: Any, rank: int, processes: int) -> Any:
    """The rows of one rank from the outputs of a complete batch, padded with the last row.

    Args:
        outputs: tensors of shape `(rows, ...)` in nested containers.
        rank: the rank of the process.
        processes: number of processes.
    """

    def select(rows: torch.Tensor) -> torch.Tensor:
        size = -(-len(rows) // processes)
        return rows[torch.arange(rank * size, (rank + 1) * size, device=rows.device).clamp(max=len(rows) - 1)]

    return nested_apply(select, outputs)


class BatchLoader(DataLoader[Any]):
    """A loader that passes the epoch to its `Batches`."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(batches, batch_size=None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.dataset.epoch = epoch  # type: ignore[attr-defined]
