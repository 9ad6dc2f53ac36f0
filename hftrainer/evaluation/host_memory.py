"""The memory of a batch stays with the process for the next batch, in evaluations on the CPU.

glibc returns the top of its heap to the system once twice the largest buffer that was freed so far is free there.
Logits and their log-softmax are just that: each batch would return them, and the next one wait until the system has
cleared the same pages again. That took half of the time with a vocabulary of 32,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

# Parameters of `mallopt`, in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes of the largest buffer on the heap, the most that glibc allows; larger ones are mapped and returned singly.
_ON_HEAP = 32 << 20 if sys.maxsize > 2**32 else 512 << 10
#: By these the user sets the same, and then nothing is changed here.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@contextlib.contextmanager
def kept_between_batches(device: torch.device) -> Iterator[None]:
    """Return no memory from the heap to the system in the block, on the CPU with glibc.

    Afterwards glibc has the thresholds that its own adjustment reaches once a buffer of 32 MB was freed, and no longer
    adjusts them.
    """
    library = _glibc() if device.type == "cpu" else None
    if library is None:
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _ON_HEAP)
    library.mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * _ON_HEAP)


@functools.cache
def _glibc() -> Any:
    """The C library, if it is glibc, and its memory is not set by the user."""
    if sys.platform != "linux" or any(name in os.environ for name in _SETTINGS):
        return None
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
