"""The random generators that the data uses: the global ones, and those of samplers and collators."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hftrainer.compat.reading import fitting
from hftrainer.data.random_states import random_states, restore_random_states

logger = logging.getLogger(__name__)

#: Generators of bits, by name.
_BITS = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: Where the states of the data are.
PLACE = "the state of the data in progress.pt"
#: Attributes of loaders, samplers, datasets and collators that hold their parts.
_PARTS = ("batch_sampler", "sampler", "dataset", "collate_fn", "data_collator", "transform")


class RandomSources:
    """The generators that the data may draw from.

    Args:
        parts: name → loader, dataset or collator to search for generators.
    """

    def __init__(self, **parts: Any) -> None:
        self._parts = parts
        self._held: list[tuple[str, Any]] = []
        self.look()

    def look(self) -> None:
        """Search again: some samplers make their generator at first use."""
        self._held = [
            (f"{path}.{name}", value)
            for path, owner in self._owners().items()
            for name, value in vars(owner).items()
            if isinstance(value, _KINDS)
        ]

    def capture(self) -> dict[str, Any]:
        """The states of the global generators and of those found in the parts."""
        return {**random_states(), "held": self.held()}

    def held(self) -> dict[str, Any]:
        """The states of the generators found in the parts, by path."""
        return {path: _state(generator) for path, generator in self._held}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `capture` returned.

        Raises:
            DamagedCheckpoint: if it is something else.
        """
        with fitting(PLACE):
            restore_random_states(dict(states))
            self.restore_held(states["held"])

    def restore_held(self, held: Mapping[str, Any]) -> None:
        """Restore what `held` returned, within `fitting`; makes generators that would be made at first use."""
        owners = self._owners()
        for path, state in held.items():
            owner, _, name = path.rpartition(".")
            if owner not in owners:
                logger.warning("The checkpoint has a random state for %s, which does not exist in this run.", path)
                continue
            generator = getattr(owners[owner], name, None)
            if generator is None:
                generator = _new(state)
                setattr(owners[owner], name, generator)
            _set_state(generator, state)
            if hasattr(owners[owner], f"_{name}_pid"):  # collators discard a generator of another process (v5.24)
                setattr(owners[owner], f"_{name}_pid", os.getpid())
        self.look()

    def _owners(self) -> dict[str, Any]:
        return {path: owner for name, part in self._parts.items() for path, owner in _parts_of(part, name)}


def _parts_of(owner: Any, path: str) -> Iterator[tuple[str, Any]]:
    attributes = getattr(owner, "__dict__", None)
    if attributes is None or getattr(owner, "seeds_itself", False):
        return
    yield path, owner
    for name in _PARTS:
        yield from _parts_of(attributes.get(name), f"{path}.{name}")


def _state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "device": str(generator.device), "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": generator.bit_generator.state}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy legacy", "state": generator.get_state()}
    return {"kind": "python", "state": generator.getstate()}


def _new(state: dict[str, Any]) -> Any:
    if state["kind"] == "torch":
        return torch.Generator(state["device"])
    if state["kind"] == "numpy":
        return np.random.Generator(_BITS[state["state"]["bit_generator"]]())
    return np.random.RandomState() if state["kind"] == "numpy legacy" else random.Random()


def _set_state(generator: Any, state: dict[str, Any]) -> None:
    if state["kind"] == "numpy":
        generator.bit_generator.state = state["state"]
    elif state["kind"] == "python":
        generator.setstate(state["state"])
    else:
        generator.set_state(state["state"])
