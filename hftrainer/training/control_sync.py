"""Synchronizes requests on one rank (from a callback, a signal, or Lightning) to all ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from hftrainer.training.context import Room, TrainerContext

#: Flags of the control that all ranks set when one does.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class ControlSync(Room):
    """Synchronizes the control flags and signals of all ranks at the end of each optimizer step.

    Attributes:
        several: whether there is more than one rank.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self.several = self.trainer.args.world_size > 1
        self._signal = 0
        self._stop = False

    def begin_epoch(self) -> None:
        """Clear the flag that stops an epoch."""
        self._stop = False

    def sync_control_flags(self) -> None:
        """Set on all ranks the flags that one rank has; does nothing in one process.

        Called at the end of each optimizer step, and again after long operations.
        """
        if not self.several:
            return
        control = self.trainer.control
        flags = [getattr(control, name) for name in _FLAGS]
        synced = self.context.engine.agree([self.run.interruption.received or 0, *map(int, flags)])
        self._signal = synced[0]
        for name, flag in zip(_FLAGS, synced[1:], strict=True):
            setattr(control, name, bool(flag))
        self._stop = control.should_training_stop or control.should_epoch_stop

    @property
    def may_stop(self) -> bool:
        """Whether all ranks stop: only at the end of an optimizer step, when they are synchronized."""
        return self._stop or not self.several

    def abandoning(self) -> contextlib.AbstractContextManager[Any]:
        """Abort evaluations when a signal arrives; not in distributed runs: other ranks would wait for this one."""
        return contextlib.nullcontext() if self.several else self.run.interruption.abandoning()

    def stop_if_signalled(self, save: Callable[[], None]) -> None:
        """Save and stop, if a signal has arrived.

        Args:
            save: writes a checkpoint of this step, unless there is one.
        """
        interruption = self.run.interruption
        if self.several:
            if not self._signal:
                return
            interruption.received = self._signal
        if interruption.received is None:
            return
        save()
        if interruption.received == signal.SIGTERM and self.trainer.args.enable_jit_checkpoint:
            self.trainer.control.should_training_stop = True  # as in transformers, train() returns normally then
            interruption.received, self._signal = None, 0
        else:
            interruption.leave()
