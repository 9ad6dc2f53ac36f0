"""The process group of torch: how ranks meet, their group for CPU memory, and how they leave."""

from __future__ import annotations

import atexit
import functools
import gc
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed

from hftrainer.errors import RanksLost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
#: Seconds after its timeout in which torch may say itself that ranks have not met.
_GRACE = 5.0
#: Seconds in which the threads of a group that is still referenced free what they have finished with.
_LATE = 0.1


def begun(work: Callable[[], T]) -> Future[T]:
    """Call `work` in a daemon thread, for which Python does not wait when it is interrupted."""
    job: Future[T] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, name="awaited-work", daemon=True).start()
    return job


def met(meet: Callable[[], T], timeout: timedelta, lost: str) -> T:
    """The result of `meet`, in which ranks connect to each other.

    Gloo waits without end for a rank that hangs after it has told its address, so it is left waiting in a thread.

    Args:
        meet: called once.
        timeout: timeout of its parts.
        lost: the message if they do not meet.

    Raises:
        RanksLost: if ranks have not met.
    """
    try:
        return begun(meet).result(timeout.total_seconds() + _GRACE)
    except (distributed.DistError, futures.TimeoutError) as error:
        raise RanksLost(lost) from error


@functools.cache
def cpu_group(timeout: timedelta) -> Any:
    """A process group for tensors in CPU memory; None means the default group."""
    backends = distributed.get_backend()
    if "gloo" in backends:
        return None
    lost = f"The ranks have not met in CPU memory within ddp_timeout={timeout.total_seconds():g} s."
    return met(lambda: distributed.new_group(backend="gloo", timeout=timeout), timeout, lost)


@functools.cache
def device_mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The device mesh of these dimensions: made once, since its process groups stay until the ranks disconnect."""
    from torch.distributed.device_mesh import init_device_mesh  # not needed without sharding

    return init_device_mesh(kind, shape, mesh_dim_names=names)


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
        device_mesh.cache_clear()
        gc.collect()
        distributed.destroy_process_group()
        time.sleep(_LATE)  # without Python's lock
