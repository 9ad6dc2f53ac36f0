"""Being told to stop: a signal becomes a checkpoint and an exit at the end of the optimizer step."""

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

#: SIGUSR1 is what SLURM is asked to send before the time is up (`--signal=USR1@90`).
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: Within which a launcher sends a signal on.
_SECONDS_OF_ECHO = 3.0
#: Handlers that are nobody's choice; any other is the script's own, and stays.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class EvaluationAbandoned(BaseException):
    """Leaves an evaluation that would outlast the time there is to stop."""


class Interruption:
    """Notices the signals that ask to stop, while it listens.

    The first signal is remembered. The second ends the process at once, as it would have without us; not so soon after
    the first that a launcher may have sent on to its processes what they got themselves, as with Ctrl-C.

    Args:
        saves: whether a signal is to become a checkpoint; if not, signals are left as they are.
        launched: whether a launcher sends signals on.

    Attributes:
        received: the number of the signal that came, or None.
        may_abandon: whether an evaluation in progress is one that may be left.
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
        """Listen in the block. Python lets only the main thread do it; in others nothing changes."""
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
        """Leave the evaluations in the block when a signal comes."""
        self.may_abandon = True
        try:
            yield
        except EvaluationAbandoned:
            logger.warning("The evaluation was left.")
        finally:
            self.may_abandon = False

    def check(self) -> None:
        """Called after each batch of an evaluation.

        Raises:
            EvaluationAbandoned: when it is to be left.
        """
        if self.received is not None and self.may_abandon:
            raise EvaluationAbandoned

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that was forked off, as the loaders' workers are
            if number != signal.SIGINT:  # with Ctrl-C they go on, so that the step can be finished
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s: saving after this optimizer step, then stopping. Once more stops at once.", name)
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
