"""`Component`: the base of the parts of a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hftrainer.assembly.components import Components


class Component:
    """A part of a Trainer. It looks up other parts in `components` at each use, since a trial replaces some."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.trainer = components.trainer
        self.run = components.run
