"""Connects the ranks by torch's process group, leaves it at exit, and names lost ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from hftrainer.errors import RanksLost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
#: Grace period in seconds, so that torch's own timeout error comes first.
_GRACE = 5.0
#: Seconds for gloo's threads to free their tensors, if the group is still referenced.
_THREAD_CLEANUP = 0.1


def start_in_thread(work: Callable[[], T]) -> Future[T]:
    """Call `work` in a daemon thread, so that Ctrl-C does not wait for it."""
    job: Future[T] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, name="awaited-work", daemon=True).start()
    return job


def wait_for_ranks(connect: Callable[[], T], timeout: timedelta, message: str) -> T:
    """Connect the ranks with `connect`, and return its result.

    gloo has no timeout for a rank that hangs after it published its address, so `connect` runs in a thread.

    Args:
        connect: the function that connects; called once.
        timeout: timeout of each step of `connect`.
        message: the error message if ranks do not connect in time.

    Raises:
        RanksLost: if ranks do not connect in time.
    """
    try:
        return start_in_thread(connect).result(timeout.total_seconds() + _GRACE)
    except (distributed.DistError, futures.TimeoutError) as error:
        raise RanksLost(message) from error


@functools.cache
def cpu_group(timeout: timedelta, is_separate: bool = False) -> Any:
    """A process group for tensors in CPU memory; None means the default group.

    Args:
        timeout: timeout of a collective operation.
        is_separate: never use the default group, so that another thread can communicate at the same time.
    """
    if "gloo" in distributed.get_backend() and not is_separate:
        return None
    message = (
        f"The ranks could not create a gloo group for CPU tensors within ddp_timeout={timeout.total_seconds():g} "
        "s. See the logs of the other ranks."
    )
    return wait_for_ranks(lambda: distributed.new_group(backend="gloo", timeout=timeout), timeout, message)


@functools.cache
def device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A device mesh, created once for these dimensions. Its process groups exist until the ranks disconnect."""
    # Only sharding needs this import.
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@functools.cache
def disconnect_at_exit() -> None:
    """Leave the process group at exit. `atexit` functions that are registered later run before it."""
    atexit.register(disconnect)


def disconnect() -> None:
    """Leave the process group before the interpreter shuts down.

    gloo's threads free tensors late, for which they need the GIL. A process that exits during that time is aborted
    ("terminate called without an active exception"). Destroying the group waits for these threads, but only if nothing
    else holds a reference to the group, as DeepSpeed's engines and a script's wrapped model do to the end.
    """
    if distributed.is_initialized():
        # Another Trainer may join a new group.
        cpu_group.cache_clear()
        device_mesh.cache_clear()
        gc.collect()
        distributed.destroy_process_group()
        # While this thread sleeps, gloo's threads can take the GIL.
        time.sleep(_THREAD_CLEANUP)


#: Messages of gloo's plain RuntimeErrors when another process has exited or is late.
_GLOO_ERROR_TEXTS = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Application timeout",
)
#: Seconds that the remaining ranks have to answer the roll call.
_ROLL_CALL = 3.0


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective operation failed because of another process."""
    if isinstance(error, (RanksLost, getattr(torch.distributed, "DistError", ()))):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO_ERROR_TEXTS)


class CollectiveCall:
    """Turns a failed collective operation into a `RanksLost` error.

    The error names the operation and the lost ranks. Each step enters this
    class, so it is not a slower generator.

    Args:
        description: completes "while it waited for ...".
    """

    __slots__ = ("_description",)

    def __init__(self, description: str) -> None:
        self._description = description

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Replace a communication error.

        Raises:
            RanksLost: instead of the communication error.
        """
        if error is not None and is_communication_error(error) and not isinstance(error, RanksLost):
            raise RanksLost(lost_ranks_message(self._description)) from error


def lost_ranks_message(what: str) -> str:
    """The error message about lost ranks, found by a roll call among the remaining ranks."""
    lost = _find_lost_ranks()
    names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}" if lost else "other ranks"
    return (
        f"Rank {distributed.get_rank()} has lost {names} while it waited for {what}: a process has ended, or did not "
        "answer within ddp_timeout; see its own messages. train(resume_from_checkpoint=True) resumes from the last "
        "checkpoint."
    )


def _find_lost_ranks() -> list[int]:
    """The ranks that do not answer a roll call in the group's store; rank 0 if the store is lost."""
    this_rank = distributed.get_rank()
    ranks = set(range(distributed.get_world_size())) - {this_rank}
    store_answered = threading.Event()

    def call_roll() -> None:
        # The process with the store may have ended.
        with contextlib.suppress(distributed.DistError):
            store = distributed.distributed_c10d._get_default_store()
            store.set(f"hftrainer/present/{this_rank}", "1")
            # `check` waits for the store's answer, `set` does not.
            store.check([f"hftrainer/present/{this_rank}"])
            store_answered.set()
            deadline = time.monotonic() + _ROLL_CALL
            while ranks and time.monotonic() < deadline:
                ranks.difference_update([rank for rank in ranks if store.check([f"hftrainer/present/{rank}"])])
                time.sleep(0.05)

    # If the process with the store hangs, the thread never ends: wait for a limited time.
    thread = threading.Thread(target=call_roll, name="roll-call", daemon=True)
    thread.start()
    thread.join(_ROLL_CALL + 1)
    return sorted(ranks) if store_answered.is_set() else [0]
