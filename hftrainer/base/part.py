"""`Part`, the base class of the parts of a Trainer, in whichever package they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


class Part:
    """A part of a Trainer. One that outlives a trial looks up others in `parts` at each use: a trial replaces some."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.trainer = parts.trainer
        self.run = parts.run
