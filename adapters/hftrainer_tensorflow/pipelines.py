"""Batches of `tf.data` as torch tensors, in tf.data's own order; and the same interface for other datasets."""

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

from hftrainer.errors import InvalidArgument
from hftrainer.trainer_pt_utils import nested_apply

logger = logging.getLogger(__name__)

INFINITE, UNKNOWN = -1, -2
#: Label columns: the first that exists, or else both columns of `_SPANS`.
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
        self._begun = 0

    def _copy_with(self, **settings: Any) -> RowDataset:
        made = copy.copy(self)
        vars(made).update({f"_{name}": value for name, value in settings.items()}, _begun=0)
        return made

    def cardinality(self) -> int:
        """Number of rows, or `UNKNOWN`."""
        return len(self.rows) if hasattr(self.rows, "__len__") else UNKNOWN

    def repeat(self) -> RowDataset:
        """Repeat the rows without end."""
        return self._copy_with(repeats=True)

    def shuffle(self, buffer_size: int, seed: int | None = None) -> RowDataset:
        """Shuffle all rows in each pass; `buffer_size` is ignored."""
        return self._copy_with(seed=0 if seed is None else seed)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> RowDataset:
        """Group the rows into batches of NumPy arrays."""
        return self._copy_with(size=batch_size, drops_remainder=drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        self._begun += 1
        return self._iterate(self._begun)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        pairs = map(as_pair, self._ordered(iteration))
        if self._size is None:
            yield from pairs
            return
        while batch := list(itertools.islice(pairs, self._size)):
            if len(batch) < self._size and self._drops_remainder:
                return
            yield _stacked([features for features, _ in batch]), _stacked([labels for _, labels in batch])

    def _ordered(self, iteration: int) -> Iterator[Any]:
        # torch's IterableDataset has a __getitem__ too, which raises.
        rows: Any = self.rows if hasattr(self.rows, "__len__") and hasattr(self.rows, "__getitem__") else None
        for turn in itertools.count():
            if self._seed is None:
                yield from self.rows if rows is None else (rows[index] for index in range(len(rows)))
            else:
                held = list(self.rows) if rows is None else rows
                order = np.random.default_rng((self._seed, iteration, turn)).permutation(len(held))
                yield from (held[int(index)] for index in order)
            if not self._repeats:
                return


def as_pair(row: Any) -> tuple[Any, Any]:
    """The features of a row or batch, and its labels.

    Raises:
        InvalidArgument: when it is neither a pair nor a dict with labels.
    """
    if isinstance(row, Mapping):
        for name in _LABELS:
            if name in row:
                return {key: value for key, value in row.items() if key != name}, row[name]
        if all(name in row for name in _SPANS):
            features = {key: value for key, value in row.items() if key not in _SPANS}
            return features, {name: row[name] for name in _SPANS}
        raise InvalidArgument(
            f"The dataset yields a dict without labels ({', '.join(map(str, row))}): TFTrainer takes pairs (features, "
            "labels), or dicts with 'labels', 'label', or 'start_positions' and 'end_positions'."
        )
    if not isinstance(row, (tuple, list)) or len(row) != 2 or not isinstance(row[0], Mapping):
        kind = f"{len(row)} values" if isinstance(row, (tuple, list)) else type(row).__name__
        raise InvalidArgument(
            f"The dataset yields {kind}: TFTrainer takes pairs (features, labels), features being a dict of names."
        )
    return row[0], row[1]


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
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
        InvalidArgument: for anything that is not a dataset.
    """
    if hasattr(dataset, "cardinality") and hasattr(dataset, "batch"):
        return dataset
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise InvalidArgument(
            f"{type(dataset).__name__} is not a dataset: pass a tf.data.Dataset, or a dataset of datasets or torch."
        )
    return RowDataset(dataset)


def count_rows(dataset: Any, *, may_be_infinite: bool = False) -> int:
    """The number of rows. Reads the pipeline once if its length is unknown.

    Returns:
        The number, or `INFINITE`.

    Raises:
        InvalidArgument: for an empty dataset, and for an infinite one unless it may be.
    """
    count = int(dataset.cardinality())
    if count == INFINITE and not may_be_infinite:
        raise InvalidArgument("The dataset is infinite: use dataset.take(n), or for training set max_steps.")
    if count == UNKNOWN:
        count = sum(1 for _ in arrays(dataset))
        logger.info("The dataset does not say how long it is: %d examples were counted.", count)
    if count == 0:
        raise InvalidArgument("The dataset is empty: it has no example.")
    return count


def arrays(dataset: Any) -> Iterator[Any]:
    """Iterate over a pipeline, with its tensors as NumPy arrays."""
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else iter(dataset)


def to_torch(values: Any, part: slice) -> Any:
    """Convert arrays to tensors; integers become int64.

    Args:
        values: arrays of shape `(rows, ...)` in nested dicts.
        part: the rows to take.

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
    """Rows of a batch: of arrays or tensors in nested dicts."""
    return number_of_rows(next(iter(values.values()))) if isinstance(values, Mapping) else len(values)


@dataclass(eq=False)
class Batches(IterableDataset[Any]):
    """The micro-batches of one rank, from the batches of a pipeline.

    Each is a dict: `features` and `labels` as tensors, `instances`: count of labels in the batch other than -100,
    and `whole`: whether all ranks get all rows, because the rows cannot be divided.

    Args:
        pipeline: yields batches of pairs.
        count: batches in a pass.
        rank: the rank of this process.
        processes: number of processes that share each batch.
        micro_batches: number of parts of a process's rows, for accumulation.
        trains: raise for batches with too few rows, instead of giving all rows to all ranks.
    """

    pipeline: Any
    count: int
    rank: int = 0
    processes: int = 1
    micro_batches: int = 1
    trains: bool = False

    def __post_init__(self) -> None:
        self.epoch = self._begun = 0

    def __len__(self) -> int:
        return self.count * self.micro_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._begun, self.epoch):
            # tf.data reshuffles for each iterator, so a resumed run first creates those of earlier epochs.
            iter(self.pipeline)
        self._begun = self.epoch + 1
        for batch in itertools.islice(arrays(self.pipeline), self.count):
            features, labels = as_pair(batch)
            # A dict of labels counts as one, as in TFTrainer, so that its loss is a sum.
            instances = 1 if isinstance(labels, Mapping) else int((np.asarray(labels) != -100).sum())
            for part in self._parts(number_of_rows(labels)):
                yield {
                    "features": to_torch(features, part),
                    "labels": to_torch(labels, part),
                    "instances": instances,
                    "whole": part == slice(None),
                }

    def _parts(self, rows: int) -> list[slice]:
        """The rows of each micro-batch of this process."""
        parts = self.processes * self.micro_batches
        if self.trains and rows < parts:
            raise InvalidArgument(
                f"The training dataset yields a batch of {rows} rows for {parts} micro-batches: batch it by "
                "args.train_batch_size * args.gradient_accumulation_steps."
            )
        if not self.trains and rows % parts:
            return [slice(None)]
        first = self.rank * self.micro_batches
        edges = [number * rows // parts for number in range(first, first + self.micro_batches + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(edges)]


def select_rank_rows(outputs: Any, rank: int, processes: int) -> Any:
    """The rows of one rank from the outputs of a whole batch, padded with the last row.

    Args:
        outputs: tensors of shape `(rows, ...)` in nested containers.
        rank: the rank of the process.
        processes: number of processes.
    """

    def share(rows: torch.Tensor) -> torch.Tensor:
        size = -(-len(rows) // processes)
        return rows[torch.arange(rank * size, (rank + 1) * size, device=rows.device).clamp(max=len(rows) - 1)]

    return nested_apply(share, outputs)


class BatchLoader(DataLoader[Any]):
    """A loader that passes the epoch to its `Batches`."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(batches, batch_size=None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.dataset.epoch = epoch  # type: ignore[attr-defined]
