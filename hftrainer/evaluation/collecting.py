"""Collects an evaluation's rows from all ranks in one copy on the CPU, in linear time."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hftrainer.base.messages import log_once
from hftrainer.base.nested import nested_apply, nested_numpify
from hftrainer.base.tracebacks import describe_type
from hftrainer.parallel.accelerator import EngineAccelerator
from hftrainer.parallel.processes import LEAVES
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

Gather = Callable[[Any], Any]
#: The original methods, to detect a replacement on the class or on the Trainer's accelerator.
_GATHER_FOR_METRICS = EngineAccelerator.gather_for_metrics
_GATHER = EngineAccelerator.gather
#: The value that pads short rows.
_PADDING = -100


# ---- Gathering with the accelerator's methods, which scripts may replace ---------------------------------------------


def make_metrics_gather(accelerator: EngineAccelerator, args: TrainingArguments) -> Gather:
    """The default `gather_function`, which gathers rows from all ranks, without fillers."""
    gather: Callable[..., Any] = accelerator.gather_for_metrics
    return functools.partial(gather, use_gather_object=True) if args.eval_use_gather_object else gather


def make_full_gather(accelerator: EngineAccelerator, args: TrainingArguments) -> Gather:
    """A function that gathers all rows.

    In the mean loss, an incomplete last batch then counts as a full one.
    """
    gather: Gather = accelerator.gather
    if accelerator.processes.tp_size == 1 and not args.eval_use_gather_object:
        return gather
    return functools.partial(accelerator.processes.gather, objects=args.eval_use_gather_object, one_per_tp_group=True)


def can_skip_gathering(trainer: Trainer) -> bool:
    """Whether `gather_function` returns a full batch unchanged: one process, and no replaced method."""
    accelerator = trainer.accelerator
    function: Any = trainer.gather_function
    return (
        getattr(function, "__func__", None) is _GATHER_FOR_METRICS
        and function.__self__ is accelerator
        and getattr(accelerator.gather, "__func__", None) is _GATHER
        and not accelerator.processes.is_distributed
    )


# ---- Selecting and keeping a model's outputs -------------------------------------------------------------------------


def select_predictions(outputs: Any, ignored: Collection[str], *, has_loss: bool) -> Any:
    """A model's outputs without the loss, the ignored keys, and objects such as a cache.

    Args:
        outputs: a mapping, a tuple or list, or one tensor.
        ignored: keys of a mapping to leave out.
        has_loss: whether the outputs hold a loss, first in a tuple or list and under 'loss' in a mapping.

    Returns:
        A tuple of the values of a mapping; otherwise the same kind as `outputs`.
    """
    if isinstance(outputs, (dict, Mapping)):
        excluded = {*ignored, "loss"} if has_loss else {*ignored}
        outputs = tuple(value for key, value in outputs.items() if key not in excluded and _is_data(value, repr(key)))
    else:
        outputs = outputs[1:] if has_loss else outputs
        if type(outputs) in (tuple, list):
            values = (value for index, value in enumerate(outputs, has_loss) if _is_data(value, f"number {index}"))
            outputs = type(outputs)(values)
    return nested_apply(_to_dense, outputs)


def _to_dense(leaf: Any) -> Any:
    """Convert a sparse tensor to a dense one, since NumPy has no sparse arrays."""
    return leaf.to_dense() if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided else leaf


def _is_data(value: Any, name: str) -> bool:
    """Whether all leaves of a value can be concatenated. If not, warn once per name and type."""
    if isinstance(value, LEAVES):
        return True
    unknown_leaves: list[Any] = []

    def check(leaf: Any) -> None:
        if not isinstance(leaf, LEAVES):
            unknown_leaves.append(leaf)

    nested_apply(check, value)
    if unknown_leaves:
        log_once(
            logger,
            f"The model's output {name} contains {describe_type(unknown_leaves[0])}, which is not a tensor and is "
            "left out of the predictions. To leave it out without this warning, add its key to ignore_keys or to the "
            "config's keys_to_ignore_at_inference.",
        )
    return not unknown_leaves


class OutputCollector:
    """Collects the outputs of a pass, batch by batch.

    Args:
        concatenate: whether `arrays()` joins the batches (right-padded with -100) or lists them.
        rows: expected number of samples, 0 if unknown.
        folder: folder for arrays in memory-mapped files; None keeps them in memory.
    """

    def __init__(self, concatenate: bool = True, rows: int = 0, folder: str | None = None) -> None:
        self.concatenate = concatenate
        self.rows = rows
        self.folder = folder
        self._device_batches: list[Any] = []
        self._batches: list[Any] = []
        self._joined_batches: Any = None

    def add(self, outputs: Any) -> None:
        """Keep the outputs of one batch, on their device."""
        self._device_batches.append(outputs)

    def move_to_cpu(self) -> None:
        """Move the added outputs to the CPU, as arrays."""
        for outputs in self._device_batches:
            batch = nested_numpify(outputs)
            if not self.concatenate:
                self._batches.append(batch)
            elif self._joined_batches is None:
                self._joined_batches = nested_apply(self._start_array, batch)
            else:
                _append_batch(self._joined_batches, batch)
        self._device_batches.clear()

    def arrays(self) -> Any:
        """All outputs as arrays of shape `(samples, ...)` or a list of batches; None without outputs."""
        self.move_to_cpu()
        if not self.concatenate:
            return self._batches or None
        return None if self._joined_batches is None else nested_apply(GrowingArray.finish, self._joined_batches)

    def _start_array(self, leaf: Any) -> GrowingArray:
        return GrowingArray(_as_rows(leaf), self.rows, self.folder)


def _as_rows(leaf: Any) -> np.ndarray:
    array = leaf if isinstance(leaf, np.ndarray) and leaf.ndim else np.atleast_1d(leaf)
    if array.dtype.kind == "O":
        raise TypeError(
            f"Evaluation cannot concatenate {describe_type(leaf)}, only tensors: exclude it with ignore_keys, or "
            "set eval_do_concat_batches=False to get a list of batches."
        )
    return array


def _append_batch(arrays: Any, batch: Any) -> None:
    """Append a batch, leaf by leaf.

    Raises:
        TypeError: when the batch's nesting differs from the first batch's.
    """
    containers = (Mapping, list, tuple)
    if isinstance(arrays, GrowingArray) and (isinstance(batch, np.ndarray) or not isinstance(batch, containers)):
        arrays.add(_as_rows(batch))
        return
    if type(arrays) is not type(batch) or len(arrays) != len(batch):
        raise TypeError(
            "Batches of one evaluation must return the same kind of output to be concatenated, got "
            f"{_describe(arrays)} and {_describe(batch)}; eval_do_concat_batches=False returns a list of batches."
        )
    for key in arrays if isinstance(arrays, Mapping) else range(len(arrays)):
        _append_batch(arrays[key], batch[key])


def _describe(output: Any) -> str:
    if isinstance(output, GrowingArray):
        return "a tensor"
    return describe_type(output) + (f" of {len(output)}" if isinstance(output, (Mapping, list, tuple)) else "")


class GrowingArray:
    """One array of shape `(rows, ...)` that grows by the rows of each batch.

    Batches may differ in their second dimension: shorter ones are padded on the right. Space for the expected rows is
    reserved at once, but a page takes memory only when it is written. If rows become longer, the array is copied.

    Args:
        first_rows: the first batch, shape `(batch, ...)`: it fixes all but the first two dimensions.
        rows: expected number of rows; the actual number may differ.
        folder: keep the array in a memory-mapped temporary file there; None keeps it in memory.
    """

    def __init__(self, first_rows: np.ndarray, rows: int = 0, folder: str | None = None) -> None:
        self._folder = folder
        self._row_count = self._width = 0
        self._buffer = self._allocate((max(rows, len(first_rows)), *first_rows.shape[1:]), first_rows.dtype)
        self.add(first_rows)

    def add(self, batch: np.ndarray) -> None:
        """Append the rows of a batch.

        Raises:
            ValueError: when a dimension after the second differs from the first batch's.
        """
        stop = self._row_count + len(batch)
        data = self._buffer
        if batch.shape[1:] != data.shape[1:] or batch.dtype != data.dtype or stop > len(data):
            self._make_space(batch, stop)
        _write_padded(self._buffer[self._row_count : stop], batch)
        self._row_count = stop
        if batch.ndim > 1:
            self._width = max(self._width, batch.shape[1])

    def finish(self) -> np.ndarray:
        """The array of shape `(rows, longest, ...)`."""
        rows = self._buffer[: self._row_count]
        return rows if rows.ndim == 1 else rows[:, : self._width]

    def _make_space(self, batch: np.ndarray, stop: int) -> None:
        """Grow the array by more than the batch needs, so that appending takes linear time."""
        data = self._buffer
        if batch.ndim != data.ndim or batch.shape[2:] != data.shape[2:]:
            expected = ["batch", "length", *map(str, data.shape[2:])][: data.ndim]
            raise ValueError(
                f"Outputs of shape {batch.shape} cannot be appended to shape ({', '.join(expected)}): only the second "
                "dimension is padded. Set eval_do_concat_batches=False to get a list of batches."
            )
        dtype = np.result_type(data.dtype, batch.dtype)
        rows = len(data)
        row_shape = data.shape[1:]
        if stop > rows:
            rows = max(stop, rows + rows // 4)
        if row_shape and batch.shape[1] > row_shape[0]:
            row_shape = (max(batch.shape[1], row_shape[0] + row_shape[0] // 8), *row_shape[1:])
        if dtype != data.dtype or row_shape != data.shape[1:] or (self._folder is not None and rows > len(data)):
            self._buffer = self._allocate((rows, *row_shape), dtype)
            _write_padded(self._buffer[: self._row_count], data[: self._row_count])
        elif rows > len(data):
            # The allocator moves pages without copying them. No view outlives the method that made it.
            data.resize((rows, *row_shape), refcheck=False)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if self._folder is None or 0 in shape:
            return np.empty(shape, dtype)
        # The mapping keeps the file, which has no name, until the array is deleted.
        with tempfile.TemporaryFile(dir=self._folder) as file:
            array: np.ndarray = np.memmap(file, dtype, "w+", shape=shape)
        return array


def _write_padded(rows: np.ndarray, values: np.ndarray) -> None:
    """Write values into the same number of rows, and pad the ends of longer rows."""
    if rows.shape != values.shape:
        # The padding wraps around in unsigned types, as in torch.
        rows[...] = np.asarray(_PADDING).astype(rows.dtype)
    rows[tuple(map(slice, values.shape))] = values
