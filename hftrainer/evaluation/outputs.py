"""Keeping the outputs of many batches in one copy, in linear time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hftrainer.evaluation.growing_array import GrowingArray
from hftrainer.trainer_pt_utils import nested_apply, nested_numpify


class OutputCollector:
    """The outputs of a pass, batch by batch.

    Args:
        concatenate: whether `arrays()` joins the batches (right-padded with -100) or lists them.
        rows: expected number of samples, 0 if unknown.
        folder: folder for arrays in memory-mapped files; None keeps them in memory.
    """

    def __init__(self, concatenate: bool = True, rows: int = 0, folder: str | None = None) -> None:
        self.concatenate = concatenate
        self.rows = rows
        self.folder = folder
        self._on_device: list[Any] = []
        self._batches: list[Any] = []
        self._joined: Any = None

    def add(self, outputs: Any) -> None:
        """Keep the outputs of one batch, on their device."""
        self._on_device.append(outputs)

    def to_host(self) -> None:
        """Move the added outputs to the CPU, as arrays."""
        for outputs in self._on_device:
            batch = nested_numpify(outputs)
            if not self.concatenate:
                self._batches.append(batch)
            elif self._joined is None:
                self._joined = nested_apply(self._start, batch)
            else:
                _extend(self._joined, batch)
        self._on_device.clear()

    def arrays(self) -> Any:
        """All outputs, as arrays of shape `(samples, ...)` or as a list of batches; None if there are none."""
        self.to_host()
        if not self.concatenate:
            return self._batches or None
        return None if self._joined is None else nested_apply(GrowingArray.finish, self._joined)

    def _start(self, leaf: Any) -> GrowingArray:
        return GrowingArray(_as_rows(leaf), self.rows, self.folder)


def _as_rows(leaf: Any) -> np.ndarray:
    array = leaf if isinstance(leaf, np.ndarray) and leaf.ndim else np.atleast_1d(leaf)
    if array.dtype.kind == "O":
        raise TypeError(
            f"Evaluation cannot concatenate a {type(leaf).__name__}, only tensors: exclude it with ignore_keys, or "
            "set eval_do_concat_batches=False to get a list of batches."
        )
    return array


def _extend(joined: Any, batch: Any) -> None:
    """Append a batch, leaf by leaf.

    Raises:
        TypeError: when its nesting differs from the first batch's.
    """
    if isinstance(joined, GrowingArray) and (
        isinstance(batch, np.ndarray) or not isinstance(batch, (Mapping, list, tuple))
    ):
        joined.add(_as_rows(batch))
        return
    if type(joined) is not type(batch) or len(joined) != len(batch):
        raise TypeError(
            "Batches of one evaluation must return the same kind of output to be concatenated, got "
            f"{_described(joined)} and {_described(batch)}; eval_do_concat_batches=False returns a list of batches."
        )
    for key in joined if isinstance(joined, Mapping) else range(len(joined)):
        _extend(joined[key], batch[key])


def _described(data: Any) -> str:
    if isinstance(data, GrowingArray):
        return "a tensor"
    return f"a {type(data).__name__}" + (f" of {len(data)}" if isinstance(data, (Mapping, list, tuple)) else "")
