"""Stops a run on all ranks, after a signal to any of them or a flag of one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hftrainer.base.messages import is_terminal, tell
from hftrainer.base.part import Part, temporary_attributes
from hftrainer.parallel.processes import Processes

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

#: Users often let SLURM send SIGUSR1 before the time limit (`--signal=USR1@90`).
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: Whether there is a launcher → seconds in which a second signal counts as a copy of the first: `timeout` sends one
#: to its process and to the process's group, and launchers forward a Ctrl-C that all processes of a terminal receive.
_DUPLICATE_WINDOW = {False: 0.5, True: 3.0}
#: Python's default handlers. Any other handler is the script's, so we leave it alone.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
#: Control flags that all ranks set when one of them does.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class EvaluationAborted(BaseException):
    """Raised to abort an evaluation after a stop signal."""


class SignalListener:
    """Records stop signals inside the block of `handle_signals`.

    A second signal ends the process at once, unless it follows so soon that it must be a copy of the first.

    Args:
        should_save: whether a signal triggers a checkpoint; if False, signals are not handled.
        describe: says what the run has saved, for a second signal.
        has_launcher: whether a launcher may forward signals, which takes longer.

    Attributes:
        signal_number: the number of the received signal, or None.
        signal_name: its name, such as 'Ctrl-C' or 'SIGTERM', or an empty string.
        is_forced: whether a second signal has stopped the run before its save.
        can_abort_evaluation: whether the evaluation in progress may be aborted.
    """

    def __init__(self, should_save: bool, describe: Callable[[], str] = str, *, has_launcher: bool = False) -> None:
        self._should_save = should_save
        self._describe = describe
        self._duplicate_window = _DUPLICATE_WINDOW[has_launcher]
        self._signal_time = 0.0
        self.signal_number: int | None = None
        self.signal_name = ""
        self.is_forced = self.can_abort_evaluation = False
        self._default_handlers: dict[int, Any] = {}
        self._process_id = 0

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Record signals in the block, but only in the main thread: Python forbids handlers in others."""
        if not self._should_save or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.signal_number, self.signal_name, self.is_forced = None, "", False
        self._process_id = os.getpid()
        self._default_handlers = {
            number: handler for number in SIGNALS if (handler := signal.getsignal(number)) in _DEFAULTS
        }
        for number in self._default_handlers:
            signal.signal(number, self._handle_signal)
        try:
            yield
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._default_handlers.items():
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, handler)

    @contextlib.contextmanager
    def abort_evaluation_on_signal(self) -> Iterator[None]:
        """Abort evaluations in the block when a signal arrives."""
        with temporary_attributes(self, can_abort_evaluation=True):
            try:
                yield
            except EvaluationAborted:
                tell("The evaluation was aborted.")

    def abort_if_signalled(self) -> None:
        """Abort the evaluation if a signal has arrived. Called after each batch.

        Raises:
            EvaluationAborted: when a signal has arrived and the evaluation may be aborted.
        """
        if self.signal_number is not None and self.can_abort_evaluation:
            raise EvaluationAborted

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        # A forked process, such as a loader's worker, ends at once, except on Ctrl-C: the step still needs its data.
        if os.getpid() != self._process_id:
            if signal_number != signal.SIGINT:
                signal.signal(signal_number, signal.SIG_DFL)
                os.kill(os.getpid(), signal_number)
            return
        if self.signal_number is None:
            self.signal_number = signal_number
            self._signal_time = time.monotonic()
            is_ctrl_c = signal_number == signal.SIGINT
            self.signal_name = "Ctrl-C" if is_ctrl_c else signal.Signals(signal_number).name
            again = "press it again" if is_ctrl_c else "send it again"
            if self._duplicate_window > 1:
                again += f" {self._duplicate_window:.0f} s later"
            if is_ctrl_c and is_terminal(sys.stderr):
                # Erase the progress bar with the "^C" behind it; the bar is drawn again below the message.
                sys.stderr.write("\r\x1b[K")
            # Not a warning, which `watch` would show after a resume too.
            tell(f"{self.signal_name}: saving after this step, then stopping; {again} to stop at once.")
            return
        if time.monotonic() - self._signal_time < self._duplicate_window:
            return
        self._restore_handlers()
        self.is_forced = True
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if text := self._describe():
            tell(text)
        os.kill(os.getpid(), signal_number)

    def end_script(self) -> NoReturn:
        """End the script as the signal would: by KeyboardInterrupt or with status 128 + signal number.

        Raises:
            KeyboardInterrupt: for Ctrl-C.
            SystemExit: for other signals.
        """
        assert self.signal_number is not None
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.signal_number)


class FlagSync(Part):
    """Synchronizes the control flags and signals of all ranks at the end of each optimizer step.

    After each step, ranks all-reduce their flags. A rank without set flags reads the result only after the next step;
    a rank with set flags waits for it. If every rank has set flags, all act on them at once, as in
    `transformers.Trainer`; otherwise all act after the next step.

    Args:
        parts: the parts of the Trainer.
        save: writes a checkpoint of this step, unless it exists.

    Attributes:
        is_distributed: whether there is more than one rank.
    """

    def __init__(self, parts: TrainerParts, save: Callable[[], None]) -> None:
        super().__init__(parts)
        self.engine = parts.engine
        self.is_distributed = self.trainer.args.world_size > 1
        self._save = save
        self._signal = 0
        self._has_stop_flag = False
        #: The last step's all-reduce, until its result is applied.
        self._pending_all_reduce: Callable[[], list[int]] | None = None

    def begin_epoch(self) -> None:
        """Clear the flag that stops an epoch."""
        self._has_stop_flag = False

    def sync_after_step(self) -> None:
        """Synchronize after an optimizer step; does nothing in one process.

        A rank with set flags waits for the result. The others read it one step later.
        """
        if not self.is_distributed:
            return
        flags = self._collect_flags()
        self._pending_all_reduce = self._start_all_reduce(flags)
        if not any(flags):
            return
        has_idle_rank, *common_flags = self._pending_all_reduce()
        if has_idle_rank:
            self._apply_flags([0] * len(common_flags))
        else:
            self._pending_all_reduce = None
            self._apply_flags(common_flags)

    def sync_now(self) -> None:
        """Synchronize immediately. For use after epochs and long operations, when ranks wait for each other anyway."""
        if not self.is_distributed:
            return
        wait_for_flags = self._start_all_reduce(self._collect_flags())
        self._pending_all_reduce = None
        self._apply_flags(wait_for_flags()[1:])

    def _collect_flags(self) -> list[int]:
        """The signal, control flags and Lightning's flag of this rank, merged with the pending ones of all ranks."""
        control_flags = [int(getattr(self.trainer.control, name)) for name in _FLAGS]
        rank_flags = [self.run.signal_listener.signal_number or 0, *control_flags, int(self.engine.should_stop)]
        pending_flags = [0] * len(rank_flags) if self._pending_all_reduce is None else self._pending_all_reduce()[1:]
        return [max(flags) for flags in zip(rank_flags, pending_flags, strict=True)]

    def _start_all_reduce(self, flags: list[int]) -> Callable[[], list[int]]:
        """Start the all-reduce of flags. Its first number is 1 if some rank has set no flag."""
        processes: Processes = self.engine.plan.processes
        return processes.start_max_over_ranks([int(not any(flags)), *flags])

    def _apply_flags(self, flags: list[int]) -> None:
        control = self.trainer.control
        self._signal, *control_flags, should_stop = flags
        for name, flag in zip(_FLAGS, control_flags, strict=True):
            setattr(control, name, bool(flag))
        self.engine.should_stop = bool(should_stop)
        self._has_stop_flag = control.should_training_stop or control.should_epoch_stop

    @property
    def flags_are_agreed(self) -> bool:
        """Whether stop flags may take effect: distributed ranks must have agreed on them."""
        return self._has_stop_flag or not self.is_distributed

    @property
    def ends_training(self) -> bool:
        """Whether `should_training_stop` takes effect."""
        return self.trainer.control.should_training_stop and self.flags_are_agreed

    @property
    def ends_epoch(self) -> bool:
        """Whether `should_epoch_stop` or `should_training_stop` takes effect."""
        control = self.trainer.control
        return (control.should_epoch_stop or control.should_training_stop) and self.flags_are_agreed

    def abort_evaluation_on_signal(self) -> contextlib.AbstractContextManager[Any]:
        """Abort evaluations when a signal arrives, except in distributed runs, where other ranks would wait."""
        listener = self.run.signal_listener
        return contextlib.nullcontext() if self.is_distributed else listener.abort_evaluation_on_signal()

    def stop_if_signalled(self) -> None:
        """Save and stop, if a signal has arrived."""
        listener = self.run.signal_listener
        if self.is_distributed:
            if not self._signal:
                return
            listener.signal_number = self._signal
        if listener.signal_number is None:
            return
        self._save()
        if listener.signal_number == signal.SIGTERM and self.trainer.args.enable_jit_checkpoint:
            # As in transformers, train() then returns normally.
            self.trainer.control.should_training_stop = True
            listener.signal_number = None
            self._signal = 0
            return
        listener.end_script()
