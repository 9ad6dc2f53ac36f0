"""Signals: save a checkpoint and exit at the end of the optimizer step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

#: SIGUSR1 is commonly requested from SLURM before the time limit (`--signal=USR1@90`).
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: Seconds within which a launcher forwards a signal.
_SECONDS_OF_ECHO = 3.0
#: Python's default handlers; any other handler is the script's own, and stays.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class EvaluationAbandoned(BaseException):
    """Aborts an evaluation that would take longer than the time left to stop."""


class Interruption:
    """Records signals that ask to stop, while it listens.

    The first signal is recorded. The second ends the process at once, as without this class. A second signal shortly
    after the first is ignored: with Ctrl-C, a launcher forwards a signal that its processes have got already.

    Args:
        saves: whether a signal saves a checkpoint; if not, signals are not handled.
        launched: whether a launcher forwards signals.

    Attributes:
        received: the number of the received signal, or None.
        may_abandon: whether the evaluation in progress may be aborted.
    """

    def __init__(self, saves: bool, *, launched: bool = False) -> None:
        self._saves = saves
        self._echo = _SECONDS_OF_ECHO if launched else 0.0
        self._received_at = 0.0
        self.received: int | None = None
        self.may_abandon = False
        self._before: dict[int, Any] = {}
        self._process = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen in the block. Python allows it in the main thread only; in other threads this does nothing."""
        if not self._saves or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.received, self._process = None, os.getpid()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: handler for number, handler in self._before.items() if handler in _DEFAULTS}
        for number in self._before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    @contextlib.contextmanager
    def abandoning(self) -> Iterator[None]:
        """Abort evaluations in the block when a signal arrives."""
        self.may_abandon = True
        try:
            yield
        except EvaluationAbandoned:
            logger.warning("The evaluation was aborted.")
        finally:
            self.may_abandon = False

    def check(self) -> None:
        """Called after each batch of an evaluation.

        Raises:
            EvaluationAbandoned: when a signal has arrived and the evaluation may be aborted.
        """
        if self.received is not None and self.may_abandon:
            raise EvaluationAbandoned

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process, such as a loader's worker
            if number != signal.SIGINT:  # with Ctrl-C they continue, so that the step can be completed
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s: saving after this optimizer step, then stopping. A second signal stops at once.", name)
            return
        if time.monotonic() - self._received_at < self._echo:
            return
        self._restore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    def leave(self) -> NoReturn:
        """End the script as the signal would have: by KeyboardInterrupt, or with the status 128 + its number.

        Raises:
            KeyboardInterrupt: for Ctrl-C.
            SystemExit: for other signals.
        """
        assert self.received is not None
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)
