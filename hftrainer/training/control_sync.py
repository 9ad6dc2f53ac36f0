"""Synchronizes requests on one rank (from a callback, a signal, or Lightning) to all ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hftrainer.training.context import Room, TrainerContext

#: Flags of the control that all ranks set when one does.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")


class ControlSync(Room):
    """Synchronizes the control flags and signals of all ranks at the end of each optimizer step.

    Most steps request nothing. Ranks then vote without waiting for each other, and read the votes at the end of the
    next step. A rank with a request waits for the votes: if all ranks have requests, they act on all of them at once,
    as in `transformers.Trainer`. Else all act on them at the end of the next step, when all know of them.

    Attributes:
        several: whether there is more than one rank.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self.several = self.trainer.args.world_size > 1
        self._signal = 0
        self._stop = False
        self._votes: Callable[[], list[int]] | None = None  # of the last step, if they are not acted on yet

    def begin_epoch(self) -> None:
        """Clear the flag that stops an epoch."""
        self._stop = False

    def end_step(self) -> None:
        """Synchronize after an optimizer step; does nothing in one process."""
        if not self.several:
            return
        requests = self._requests()
        self._votes = self._vote(requests)
        if not any(requests):
            return
        one_has_none, *agreed = self._votes()
        if one_has_none:
            self._act_on([0] * len(agreed))
        else:
            self._votes = None
            self._act_on(agreed)

    def sync_control_flags(self) -> None:
        """Set on all ranks what one rank requests, where all ranks wait anyway: after long operations and epochs."""
        if not self.several:
            return
        votes, self._votes = self._vote(self._requests()), None
        self._act_on(votes()[1:])

    def _requests(self) -> list[int]:
        """The signal and the flags of this rank, and those of all ranks that the last step has left."""
        flags = [getattr(self.trainer.control, name) for name in _FLAGS]
        own = [self.run.interruption.received or 0, *map(int, flags), int(self.context.engine.stops)]
        left = [0] * len(own) if self._votes is None else self._votes()[1:]
        return [max(each) for each in zip(own, left, strict=True)]

    def _vote(self, requests: list[int]) -> Callable[[], list[int]]:
        """Begin to exchange requests; whether some rank has none comes first."""
        return self.context.engine.plan.processes.begin_highest(
            [int(not any(requests)), *requests], timedelta(seconds=self.context.engine.plan.timeout)
        )

    def _act_on(self, requests: list[int]) -> None:
        control = self.trainer.control
        self._signal, *flags, stops = requests
        for name, flag in zip(_FLAGS, flags, strict=True):
            setattr(control, name, bool(flag))
        self.context.engine.stops = bool(stops)
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
