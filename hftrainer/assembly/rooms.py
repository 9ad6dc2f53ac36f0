"""What the rooms behind `Trainer._hftrainer` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hftrainer.assembly.internals import Internals
    from hftrainer.trainer import Trainer


class Room:
    """A part of a Trainer's work, by its subject.

    Args:
        trainer: whose documented methods and attributes it works with.
        own: what that Trainer keeps for itself.
    """

    def __init__(self, trainer: Trainer, own: Internals) -> None:
        self.trainer = trainer
        self.own = own
