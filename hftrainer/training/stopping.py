"""Stops a run: on signals to this process, and on requests of any rank, which all ranks follow."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hftrainer.callbacks.progress import close_bars
from hftrainer.compat.messages import tell
from hftrainer.compat.tracebacks import add_note
from hftrainer.parallel.processes import Processes
from hftrainer.reporting import summary

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)

#: Users often let SLURM send SIGUSR1 before the time limit (`--signal=USR1@90`).
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: A second signal within this many seconds counts as the launcher's copy of the first.
_DUPLICATE_WINDOW = 3.0
#: Python's default handlers. We leave any other handler, since it is the script's.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
#: Control flags that all ranks set when one of them does.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class EvaluationAborted(BaseException):
    """Raised to abort an evaluation after a stop signal."""


class SignalListener:
    """Records stop signals inside the block of `handle_signals`.

    A second signal ends the process at once. Under a launcher, a second signal shortly after the first is ignored: on
    Ctrl-C, launchers forward a signal that their processes have already received.

    Args:
        saves: whether a signal triggers a checkpoint; if False, signals are not handled.
        launched: whether a launcher forwards signals.

    Attributes:
        received: the number of the received signal, or None.
        can_abort_evaluation: whether the evaluation in progress may be aborted.
    """

    def __init__(self, saves: bool, *, launched: bool = False) -> None:
        self._saves = saves
        self._duplicate_window = _DUPLICATE_WINDOW if launched else 0.0
        self._received_at = 0.0
        self.received: int | None = None
        self.can_abort_evaluation = False
        self._before: dict[int, Any] = {}
        self._process = 0

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Record signals in the block. Does nothing outside the main thread, where Python forbids handlers."""
        if not self._saves or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.received = None
        self._process = os.getpid()
        self._before = {number: was for number in SIGNALS if (was := signal.getsignal(number)) in _DEFAULTS}
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
    def abort_evaluation_on_signal(self) -> Iterator[None]:
        """Abort evaluations in the block when a signal arrives."""
        self.can_abort_evaluation = True
        try:
            yield
        except EvaluationAborted:
            logger.warning("The evaluation was aborted.")
        finally:
            self.can_abort_evaluation = False

    def check(self) -> None:
        """Abort the evaluation if a signal arrived; called after each batch.

        Raises:
            EvaluationAborted: when a signal has arrived and the evaluation may be aborted.
        """
        if self.received is not None and self.can_abort_evaluation:
            raise EvaluationAborted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process, such as a loader's worker
            if number != signal.SIGINT:  # on Ctrl-C workers continue, so that the step can be completed
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = number
            self._received_at = time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s: saving after this optimizer step, then stopping. A second signal stops at once.", name)
            return
        if time.monotonic() - self._received_at < self._duplicate_window:
            return
        self._restore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    def leave(self, last_words: str = "") -> NoReturn:
        """End the script as the signal would have: by KeyboardInterrupt, or with status 128 plus the signal's number.

        Args:
            last_words: message to print last; for KeyboardInterrupt, below its traceback.

        Raises:
            KeyboardInterrupt: for Ctrl-C.
            SystemExit: for other signals.
        """
        assert self.received is not None
        if self.received == signal.SIGINT:
            interrupt = KeyboardInterrupt()
            if last_words:
                add_note(interrupt, f"[hftrainer] {last_words}")
            raise interrupt
        if last_words:
            tell(last_words)
        raise SystemExit(128 + self.received)


class ControlSync:
    """Synchronizes the control flags and signals of all ranks at the end of each optimizer step.

    After each step, ranks all-reduce their requests. A rank without requests reads the result only after the next step;
    a rank with requests waits for it. If every rank has requests, all act on them at once, as in
    `transformers.Trainer`; otherwise all act after the next step.

    Args:
        components: the parts of the Trainer.
        save: writes a checkpoint of this step, unless it exists.

    Attributes:
        several: whether there is more than one rank.
    """

    def __init__(self, components: Components, save: Callable[[], None]) -> None:
        self.trainer = components.trainer
        self.run = components.run
        self.engine = components.engine
        self.several = self.trainer.args.world_size > 1
        self._save = save
        self._signal = 0
        self._stop = False
        self._pending_all_reduce: Callable[[], list[int]] | None = (
            None  # the last step's all-reduce, until its result is applied
        )

    def begin_epoch(self) -> None:
        """Clear the flag that stops an epoch."""
        self._stop = False

    def end_step(self) -> None:
        """Synchronize after an optimizer step; does nothing in one process."""
        if not self.several:
            return
        requests = self._requests()
        self._pending_all_reduce = self._start_all_reduce(requests)
        if not any(requests):
            return
        one_has_none, *agreed = self._pending_all_reduce()
        if one_has_none:
            self._act_on([0] * len(agreed))
        else:
            self._pending_all_reduce = None
            self._act_on(agreed)

    def sync_control_flags(self) -> None:
        """Synchronize immediately; for use after epochs and long operations, when ranks wait for each other anyway."""
        if not self.several:
            return
        wait_for_votes = self._start_all_reduce(self._requests())
        self._pending_all_reduce = None
        self._act_on(wait_for_votes()[1:])

    def _requests(self) -> list[int]:
        """The signal and flags of this rank, merged with pending ones of all ranks."""
        flags = [getattr(self.trainer.control, name) for name in _FLAGS]
        own = [self.run.signal_listener.received or 0, *map(int, flags), int(self.engine.stops)]
        left = [0] * len(own) if self._pending_all_reduce is None else self._pending_all_reduce()[1:]
        return [max(each) for each in zip(own, left, strict=True)]

    def _start_all_reduce(self, requests: list[int]) -> Callable[[], list[int]]:
        """Start the all-reduce of requests; its first number says whether some rank has none."""
        processes: Processes = self.engine.plan.processes
        return processes.start_max_over_ranks([int(not any(requests)), *requests])

    def _act_on(self, requests: list[int]) -> None:
        control = self.trainer.control
        self._signal, *flags, stops = requests
        for name, flag in zip(_FLAGS, flags, strict=True):
            setattr(control, name, bool(flag))
        self.engine.stops = bool(stops)
        self._stop = control.should_training_stop or control.should_epoch_stop

    @property
    def can_stop(self) -> bool:
        """Whether stop flags may take effect: distributed ranks must have agreed on them."""
        return self._stop or not self.several

    def abort_evaluation_on_signal(self) -> contextlib.AbstractContextManager[Any]:
        """Abort evaluations when a signal arrives, except in distributed runs, where other ranks would wait."""
        return contextlib.nullcontext() if self.several else self.run.signal_listener.abort_evaluation_on_signal()

    def stop_if_signalled(self) -> None:
        """Save and stop, if a signal has arrived."""
        listener = self.run.signal_listener
        if self.several:
            if not self._signal:
                return
            listener.received = self._signal
        if listener.received is None:
            return
        self._save()
        if listener.received == signal.SIGTERM and self.trainer.args.enable_jit_checkpoint:
            # As in transformers, train() then returns normally.
            self.trainer.control.should_training_stop = True
            listener.received = None
            self._signal = 0
            return
        close_bars(self.trainer.callback_handler.callbacks)
        says_it = self.trainer.is_world_process_zero()
        listener.leave(summary.make_resume_hint(self.run.checkpoints_written, is_complete=False) if says_it else "")
