"""Where a run is: its micro-batch, and how far its optimizer step is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch


class StepPhase(enum.IntEnum):
    """How far the current optimizer step is."""

    #: No data is read, and no random number drawn, for the next step.
    NOT_BEGUN = 0
    #: Micro-batches are read.
    BEGUN = 1
    #: The optimizer steps, so that weights may have changed.
    STEPPING = 2
    #: The optimizer has stepped, but `global_step` does not count the step yet.
    UNCOUNTED = 3


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
