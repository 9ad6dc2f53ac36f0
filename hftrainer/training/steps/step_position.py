"""Where a run is: its micro-batch, and how far its optimizer step is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch


class _Phase(enum.IntEnum):
    #: No data is read, and no random number drawn, for the next step.
    NOT_BEGUN = 0
    #: Micro-batches are read.
    BEGUN = 1
    #: The optimizer steps, so that weights may have changed.
    STEPPING = 2
    #: The optimizer has stepped, but `global_step` does not count the step yet.
    UNCOUNTED = 3


class StepProgress:
    """How far the current optimizer step is. The methods are its changes, in the order of a step."""

    def __init__(self) -> None:
        self._phase = self._phase_before_reading = _Phase.NOT_BEGUN

    def begin_reading(self) -> None:
        """Micro-batches are about to be read."""
        # It has begun already if the end of a stream left it without all of its micro-batches.
        self._phase_before_reading, self._phase = self._phase, _Phase.BEGUN

    def find_no_data(self) -> None:
        """A stream had ended, so that `begin_reading` began nothing."""
        self._phase = self._phase_before_reading

    def begin_update(self) -> None:
        """The optimizer is about to step."""
        self._phase = _Phase.STEPPING

    def end_update(self) -> None:
        """The optimizer has stepped."""
        self._phase = _Phase.UNCOUNTED

    def finish(self) -> None:
        """The step is counted, or its micro-batches are skipped."""
        self._phase = _Phase.NOT_BEGUN

    @property
    def has_begun(self) -> bool:
        """Whether data is read, or random numbers drawn, for a step that is not counted."""
        return self._phase != _Phase.NOT_BEGUN

    @property
    def may_have_changed_weights(self) -> bool:
        """Whether the optimizer steps or has stepped, but the step is not counted."""
        return self._phase >= _Phase.STEPPING

    @property
    def is_uncounted(self) -> bool:
        """Whether the optimizer has stepped, but the step is not counted."""
        return self._phase == _Phase.UNCOUNTED


@dataclass(slots=True)
class MicroBatchPosition:
    """The position of a micro-batch in its epoch and in its window, the micro-batches of one optimizer step.

    Attributes:
        index: index of the micro-batch in the epoch; -1 before the first.
        window_start: index of the window's first micro-batch.
        window_size: micro-batches in the window; the last of an epoch may have fewer. 0 before the first.
        num_items: items over which the loss of the window is averaged; None when not needed.
        is_first: whether this is the window's first micro-batch.
        is_last: whether the optimizer steps after this micro-batch.
    """

    index: int = -1
    window_start: int = 0
    window_size: int = 0
    num_items: torch.Tensor | int | None = None
    is_first: bool = False
    is_last: bool = True


class Window(NamedTuple):
    """The micro-batches of an optimizer step.

    Attributes:
        epoch: the epoch, counted from 0.
        start: index of the first micro-batch in the epoch.
        size: number of micro-batches.
    """

    epoch: int
    start: int
    size: int
