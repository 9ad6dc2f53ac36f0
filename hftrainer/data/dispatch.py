"""`dispatch_batches` of accelerate: the main process reads all batches and scatters them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hftrainer.errors import InvalidArgument


@dataclass(frozen=True)
class DataCollectives:
    """Collective operations for data.

    Attributes:
        from_main: calls a function in the main process and broadcasts its result.
        scatter: calls a function in the main process and scatters its list, one item for each rank.
        highest: the element-wise maximum of a list of numbers over all ranks.
    """

    from_main: Callable[[Callable[[], Any]], Any]
    scatter: Callable[[Callable[[], list[Any]]], Any]
    highest: Callable[[list[int]], list[int]]


def rounds(batches: Iterator[Any], count: int, drop_last: bool) -> Iterator[list[Any]]:
    """Batches in groups of `count`; the last may have fewer, unless it is dropped. Does not read beyond a group."""
    while len(taken := list(islice(batches, count))) == count:
        yield taken
    if taken and not drop_last:
        yield taken


def parts(groups: Iterable[list[Any]], processes: int, drop_last: bool) -> Iterator[list[Any]]:
    """Concatenates each group of batches and splits its rows into equal parts, one for each process.

    Missing rows are taken from the first group; with `drop_last`, surplus rows are dropped instead.

    Raises:
        InvalidArgument: for batches that cannot be concatenated.
    """
    first: Any = None
    for group in groups:
        whole = _joined(group)
        first = _rows(whole, 0, processes) if first is None else first
        size, left = divmod(_count(whole), processes)
        if left and not drop_last:
            whole, size = _joined([whole, first]), size + 1
        yield [_rows(whole, rank * size, (rank + 1) * size) for rank in range(processes)]


_INSTEAD = "set accelerator_config={'dispatch_batches': False}, so that each process reads its own batches."


def _joined(batches: list[Any]) -> Any:
    try:
        return _combined(torch.cat, batches)
    except RuntimeError as error:
        raise InvalidArgument(
            f"The main process cannot concatenate batches of different shapes: {error}. Pad all batches to one "
            f"length, or {_INSTEAD}"
        ) from error


def _rows(batch: Any, start: int, stop: int) -> Any:
    # Cloned, since pickling a slice of a tensor pickles the whole storage.
    return _combined(lambda tensors: tensors[0][start:stop].clone(), [batch])


def _count(batch: Any) -> int:
    """Rows of the first tensor in a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def _combined(function: Callable[[list[torch.Tensor]], torch.Tensor], batches: list[Any]) -> Any:
    """A batch of the same structure as `batches`; `function` gets the tensors of each leaf, one from each batch."""
    head = batches[0]
    if isinstance(head, torch.Tensor):
        return function(batches)
    if isinstance(head, Mapping):
        made = {key: _combined(function, [batch[key] for batch in batches]) for key in head}
        return made if type(head) is dict else type(head)(made)  # type: ignore[call-arg]
    if isinstance(head, (list, tuple)):
        items = [_combined(function, list(column)) for column in zip(*batches, strict=True)]
        return type(head)(*items) if hasattr(head, "_fields") else type(head)(items)
    raise InvalidArgument(f"The main process can scatter tensors, not a {type(head).__name__}: {_INSTEAD}")
