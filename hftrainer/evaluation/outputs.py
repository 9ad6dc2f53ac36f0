"""Keeping the outputs of many batches in one copy, in linear time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from hftrainer.compat.messages import log_once
from hftrainer.evaluation.growing_array import GrowingArray
from hftrainer.trainer_pt_utils import nested_apply, nested_numpify

logger = logging.getLogger(__name__)


def predictions(outputs: Any, ignored: Collection[str], *, has_loss: bool) -> Any:
    """A model's outputs without the loss, the ignored keys, and objects that are no data, such as a cache.

    Args:
        outputs: a mapping, a tuple or list, or one tensor.
        ignored: keys of a mapping to leave out.
        has_loss: whether a loss is first in a tuple or list; in a mapping it is under 'loss'.

    Returns:
        A tuple of the values of a mapping; otherwise the same kind as `outputs`.
    """
    if isinstance(outputs, Mapping):
        left_out = {*ignored, "loss"} if has_loss else {*ignored}
        outputs = tuple(
            value for name, value in outputs.items() if name not in left_out and _is_data(value, repr(name))
        )
    else:
        outputs = outputs[1:] if has_loss else outputs
        if type(outputs) in (tuple, list):
            kept = (value for at, value in enumerate(outputs, has_loss) if _is_data(value, f"number {at}"))
            outputs = type(outputs)(kept)
    return nested_apply(_dense, outputs)


def _dense(leaf: Any) -> Any:
    """A sparse tensor as a dense one: NumPy has no sparse arrays."""
    return leaf.to_dense() if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided else leaf


def _is_data(value: Any, name: str) -> bool:
    """Whether a value has only leaves that can be concatenated; warns once for each name and type."""
    strange: list[Any] = []

    def look(leaf: Any) -> None:
        if not isinstance(leaf, _LEAVES):
            strange.append(leaf)

    nested_apply(look, value)
    if strange:
        log_once(
            logger,
            f"The model's output {name} contains a {type(strange[0]).__name__}, which is not a tensor and is left out "
            "of the predictions. To leave it out without this warning, add its key to ignore_keys or to the config's "
            "keys_to_ignore_at_inference.",
        )
    return not strange


_LEAVES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex)


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
