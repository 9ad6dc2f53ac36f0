"""One array in CPU memory that grows in place, batch by batch: no list of batches, and no copy to join them."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import numpy as np

#: Elements that are moved at a time when rows become longer; at most this many are held twice.
_BLOCK = 1 << 18


class GrowingArray:
    """The rows of many batches as one array of shape `(rows, ...)`.

    Batches may differ in their second dimension: shorter ones are padded on the right. Memory is about one copy of the
    rows at any time. Space for `rows` is reserved at once, but a page takes memory only when it is written.

    Args:
        first: the first batch, shape `(batch, ...)`: it fixes all but the first two dimensions.
        rows: expected number of rows; the actual number may differ.
        folder: keep the array in a memory-mapped temporary file there; None keeps it in memory.
        padding: fill value for shorter rows.
    """

    def __init__(self, first: np.ndarray, rows: int = 0, folder: str | None = None, padding: int = -100) -> None:
        self._file: Any = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives on
        self._padding = padding
        self._dtype = first.dtype
        self._tail = first.shape[2:]
        self._has_width = first.ndim > 1
        self._count = 0
        self._width = self._stride = first.shape[1] if self._has_width else 1
        self._row_shape = first.shape[1:]  # of a batch that needs no padding
        self._elements = self._row_size(self._stride)  # of such a row
        self._flat = np.empty(0, self._dtype)
        self._resize(max(rows, len(first)) * self._row_size(self._stride))
        self.add(first)

    def add(self, batch: np.ndarray) -> None:
        """Append the rows of a batch.

        Raises:
            ValueError: when its shape differs from the first batch's in more than the first two dimensions.
        """
        if batch.shape[1:] != self._row_shape or batch.dtype != self._dtype or not self._append(batch):
            self._add_other(batch)

    def _append(self, batch: np.ndarray) -> bool:
        """Append a batch whose rows are as wide as the array's, as most are; False if there is no room for it."""
        start = self._count * self._elements
        stop = start + batch.size
        if stop > self._flat.size:
            return False
        self._flat[start:stop].reshape(batch.shape)[...] = batch
        self._width = self._stride
        self._count += len(batch)
        return True

    def _add_other(self, batch: np.ndarray) -> None:
        if (batch.ndim > 1) != self._has_width or batch.shape[2:] != self._tail:
            expected = ("batch", *(["length"] if self._has_width else []), *self._tail)
            raise ValueError(
                f"Outputs of shape {batch.shape} cannot be appended to shape ({', '.join(map(str, expected))}): only "
                "the second dimension is padded. Set eval_do_concat_batches=False to get a list of batches."
            )
        if batch.dtype != self._dtype:
            self._promote(np.result_type(self._dtype, batch.dtype))
        width = batch.shape[1] if self._has_width else 1
        if width > self._stride:  # a little more than needed, to keep linear time when batches become ever longer
            self._set_stride(max(width, self._stride + self._stride // 8))
        self._width = max(self._width, width)
        stop = self._count + len(batch)
        if stop * self._row_size(self._stride) > self._flat.size:
            self._resize(max(stop * self._row_size(self._stride), self._flat.size + self._flat.size // 4))
        rows = self._rows(self._count, stop, self._stride)
        rows[:, :width] = batch.reshape(rows.shape[0], width, rows.shape[2])
        rows[:, width:] = self._fill()
        self._count = stop

    def finish(self) -> np.ndarray:
        """The array of shape `(rows, longest, ...)`; no rows may be added afterwards."""
        self._set_stride(self._width)
        self._resize(self._count * self._row_size(self._width))
        shape = (self._count, *([self._width] if self._has_width else []), *self._tail)
        return self._flat[: math.prod(shape)].reshape(shape)

    def _row_size(self, width: int) -> int:
        return width * math.prod(self._tail)

    def _rows(self, start: int, stop: int, width: int) -> np.ndarray:
        size = self._row_size(width)
        return self._flat[start * size : stop * size].reshape(stop - start, width, math.prod(self._tail))

    def _fill(self) -> np.ndarray:
        return np.asarray(self._padding).astype(self._dtype)  # unsigned types wrap around, as in torch

    def _set_stride(self, stride: int) -> None:
        """Change the row length in place: from the last row backwards when rows become longer, else from the first."""
        old, longer = self._stride, stride > self._stride
        if stride == old:
            return
        needed = self._count * self._row_size(stride)
        if needed > self._flat.size:
            self._resize(needed)
        block = max(1, _BLOCK // max(1, self._row_size(max(old, stride))))
        starts = range(0, self._count, block)
        for start in reversed(starts) if longer else starts:
            stop = min(start + block, self._count)
            kept = self._rows(start, stop, old)[:, : min(old, stride)].copy()
            rows = self._rows(start, stop, stride)
            rows[:, : kept.shape[1]] = kept
            rows[:, kept.shape[1] :] = self._fill()
        self._stride = stride
        self._row_shape, self._elements = (stride, *self._tail), self._row_size(stride)

    def _promote(self, dtype: np.dtype) -> None:
        used = self._count * self._row_size(self._stride)
        rows = self._flat[:used].astype(dtype)
        size = self._flat.size
        self._dtype, self._flat = dtype, np.empty(0, dtype)
        self._resize(size)
        self._flat[:used] = rows

    def _resize(self, size: int) -> None:
        """Reserve space for `size` elements and keep the contents: the allocator moves pages, without copying them."""
        if self._file is None:
            if self._flat.size == 0:
                self._flat = np.empty(size, self._dtype)
            else:
                self._flat.resize(size, refcheck=False)  # views do not outlive the method that made them
            return
        self._file.truncate(max(size, 1) * self._dtype.itemsize)
        self._flat = np.memmap(self._file, self._dtype, "r+", shape=(max(size, 1),))
