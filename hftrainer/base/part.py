"""`Part`, the base class of the parts of a Trainer, in whichever package they are; and values for a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


class Part:
    """A part of a Trainer. One that outlives a trial looks up others in `parts` at each use: a trial replaces some."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.trainer = parts.trainer
        self.run = parts.run


@contextlib.contextmanager
def temporary_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the block, and restore their previous values after it, also after an error."""
    previous_values = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            setattr(owner, name, value)
