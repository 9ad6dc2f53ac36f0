"""Prints an uncaught error of several ranks once. The ranks agree by the store of their group, or of torchrun."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hftrainer.base.messages import TRACEBACK_VARIABLE, is_terminal
from hftrainer.errors import RanksLost
from hftrainer.parallel.process_group import is_communication_error, start_in_thread

T = TypeVar("T")
#: The key in the store of the error that a rank has printed first.
_FIRST_ERROR = "hftrainer/first-error"
#: Seconds to wait for the store, or for another rank's error in it.
_STORE_TIMEOUT = 3.0


@functools.cache
def show_errors_once() -> None:
    """Let one rank of a machine print the traceback of an uncaught error that others have too."""
    sys.excepthook = functools.partial(_show_error_once, sys.excepthook, os.getpid())


def _show_error_once(show: Callable[..., Any], pid: int, kind: Any, error: BaseException, trace: Any) -> None:
    """Print an error as `show` does, or in a line if another rank has printed it, or the one that led to it."""
    is_lost = is_communication_error(error)
    if not issubclass(kind, Exception):
        show(kind, error, trace)
    elif is_lost and os.environ.get(TRACEBACK_VARIABLE) != "full" and (first := read_first_error(pid)):
        _print_consequence(error, first)
    elif (rank := find_rank_that_prints("".join(traceback.format_exception(kind, error, trace)), pid)) is None:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            show(kind, error, trace)
        _print_as_rank(printed.getvalue())
        if not is_lost:
            _store_first_error(error, pid)
    else:
        _refer_to_rank(rank, error, pid)


def _print_consequence(error: BaseException, first: str) -> None:
    """Print that this rank lost the one with the `first` error, and the notes, which may say what is saved."""
    # The text of any other class is gloo's.
    problem = str(error) if isinstance(error, RanksLost) else "lost the other ranks"
    notes = [note for note in getattr(error, "__notes__", ()) if TRACEBACK_VARIABLE not in note]
    _print_as_rank("\n".join([f"{type(error).__name__}: {problem} ({first})", *notes]))


def _store_first_error(error: BaseException, pid: int) -> None:
    """Store the error, unless there is one. The others read it when they lose this rank, which ends after this."""
    text = f"failed first: {type(error).__name__}: {error}".splitlines()[0]
    _ask_store(lambda store: store.compare_set(_FIRST_ERROR, "", f"rank {_this_rank()} {text}"), pid)


def _refer_to_rank(rank: int, error: BaseException, pid: int) -> None:
    """Print which rank prints the same traceback. Only a file says so, since a terminal shows all ranks."""
    # When this rank ends, a launcher ends the other too: wait until that one has printed its error.
    _ask_store(lambda store: store.wait([_FIRST_ERROR], timedelta(seconds=_STORE_TIMEOUT)), pid)
    if not is_terminal(sys.__stderr__):
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        _print_as_rank(f"{line} (The traceback is the same as that of rank {rank}.)")


def _print_as_rank(text: str) -> None:
    print("\n".join(f"[rank{_this_rank()}]: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def read_first_error(pid: int) -> str | None:
    """The error that a rank has printed first; empty or None if none. `pid` is that of `_ask_store`."""
    return _ask_store(lambda store: store.get(_FIRST_ERROR).decode() if store.check([_FIRST_ERROR]) else "", pid)


def _this_rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))


def _open_store() -> Any:
    """The group's store, or before there is a group that of torchrun; None without either."""
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT))
    # Processes that are started again have the same store.
    return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)


def _ask_store(ask: Callable[[Any], T], pid: int) -> T | None:
    """What `ask` returns for the ranks' store; None without one, or if the store does not answer.

    Args:
        ask: the question.
        pid: the process that is the rank. One that it has forked has a copy of its connection, and must not use it.
    """
    if os.getpid() != pid:
        return None
    # The process with the store may have ended, or hang.
    with contextlib.suppress(RuntimeError, futures.TimeoutError):
        store = _open_store()
        return None if store is None else start_in_thread(lambda: ask(store)).result(_STORE_TIMEOUT)
    return None


def find_rank_that_prints(text: str, pid: int) -> int | None:
    """The rank of this machine that prints the same text; None if this one shall, as the first to ask.

    It shall too if there is no store, or none that answers. `pid` is that of `_ask_store`.
    """
    this_rank = _this_rank()
    claim = f"hftrainer/printed/{socket.gethostname()}/{text}", "", str(this_rank)
    rank = _ask_store(lambda store: int(store.compare_set(*claim)), pid)
    if rank not in (None, this_rank):
        return rank
    if this_rank and os.getpid() == pid and sys.__stderr__ is not None and sys.__stderr__.isatty():
        # End the line in which rank 0 shows its progress.
        sys.__stderr__.write("\n")
    return None
