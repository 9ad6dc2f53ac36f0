"""The process group of torch: how ranks meet, their group for CPU memory, how they leave, and what is lost."""

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


#: Messages of gloo's plain RuntimeErrors when another process has exited or is late.
_OF_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Application timeout")
#: Seconds in which the ranks that have lost others say so.
_ROLL_CALL = 3.0


def is_of_communication(error: BaseException) -> bool:
    """Whether a collective operation failed because of another process."""
    if isinstance(error, (RanksLost, getattr(torch.distributed, "DistError", ()))):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)


class Awaiting:
    """Context of a collective operation: names what it waited for, and the ranks that were lost, if it fails.

    It is entered at each step, and so is not a generator.

    Args:
        what: completes "while it waited for ...".
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Replace an error of communication.

        Raises:
            RanksLost: in its place.
        """
        if error is not None and is_of_communication(error) and not isinstance(error, RanksLost):
            raise RanksLost(loss_message(self._what)) from error


def loss_message(what: str) -> str:
    """Which ranks this one has lost, found by a roll call among those that are left, and what to do."""
    lost = _lost_ranks()
    names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}" if lost else "other ranks"
    return (
        f"Rank {distributed.get_rank()} has lost {names} while it waited for {what}: a process has ended, or did not "
        "answer within ddp_timeout; see its own messages. train(resume_from_checkpoint=True) resumes from the last "
        "checkpoint."
    )


def _lost_ranks() -> list[int]:
    """The ranks that do not answer a roll call in the store through which all have met; rank 0 if that is lost."""
    own = distributed.get_rank()
    missing = set(range(distributed.get_world_size())) - {own}
    reached = threading.Event()

    def call() -> None:
        with contextlib.suppress(distributed.DistError):  # the store is gone
            store = distributed.distributed_c10d._get_default_store()
            store.set(f"hftrainer/present/{own}", "1")
            store.check([f"hftrainer/present/{own}"])  # waits for an answer, which `set` does not
            reached.set()
            deadline = time.monotonic() + _ROLL_CALL
            while missing and time.monotonic() < deadline:
                missing.difference_update([rank for rank in missing if store.check([f"hftrainer/present/{rank}"])])
                time.sleep(0.05)

    # The process with the store may hang and never answer: the thread is left behind then.
    thread = threading.Thread(target=call, name="roll-call", daemon=True)
    thread.start()
    thread.join(_ROLL_CALL + 1)
    return sorted(missing) if reached.is_set() else [0]
