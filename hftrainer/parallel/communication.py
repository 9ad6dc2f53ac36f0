"""Errors of communication between processes, which differ by torch's backend: recognizes them, and names lost ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType

import torch
from torch import distributed

from hftrainer.errors import RanksLost

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
