"""The process group of torch: its companion for CPU memory, and how it is left."""

from __future__ import annotations

import atexit
import functools
import gc
import time
from datetime import timedelta
from typing import Any

from torch import distributed

#: Seconds in which the threads of a group that is still referenced free what they have finished with.
_LATE = 0.1


@functools.cache
def cpu_group(timeout: timedelta) -> Any:
    """A process group for tensors in CPU memory; None means the default group."""
    backends = distributed.get_backend()
    return None if "gloo" in backends else distributed.new_group(backend="gloo", timeout=timeout)


@functools.cache
def disconnect_at_exit() -> None:
    """Leave the process group when Python exits, after all that is registered with `atexit` from the first call on."""
    atexit.register(disconnect)


def disconnect() -> None:
    """Leave the group while Python still runs.

    Gloo's threads free tensors late and need Python's lock for it; a process that exits during that time is aborted
    ("terminate called without an active exception"). Destroying the group waits for these threads, but only if nothing
    else holds a reference to the group, as DeepSpeed's engines and a script's wrapped model do to the end.
    """
    if distributed.is_initialized():
        cpu_group.cache_clear()  # another Trainer may join a new group
        gc.collect()
        distributed.destroy_process_group()
        time.sleep(_LATE)  # without Python's lock
