"""`accelerator.gradient_state`: where accelerate tells whether gradients are exchanged, and how far a loader is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: What accelerate's plugin for accumulation does unless it is told otherwise.
_ASSUMED = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}


class GradientState:
    """What accelerate's `GradientState` tells, of the loaders that were prepared.

    Args:
        loaders: those that are still there.
        processes: those with batches of their own.
        accumulation: the config's `gradient_accumulation_kwargs`.

    Attributes:
        plugin_kwargs: what accelerate's plugin for accumulation is told and does not assume anyway. `num_steps` is 1:
            the Trainer accumulates, not accelerate.
        sync_gradients: whether this micro-batch ends an optimizer step.
    """

    def __init__(self, loaders: Iterable[Any], processes: int, accumulation: Mapping[str, Any] | None = None) -> None:
        self._loaders = loaders
        self._shown: Iterable[Any] | None = None
        self._processes = processes
        self.sync_gradients = True
        given = {**(accumulation or {}), "num_steps": 1}
        self.plugin_kwargs = {name: value for name, value in given.items() if value != _ASSUMED.get(name)}

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say whether this micro-batch ends an optimizer step; loops that scripts have copied call this."""
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches that accelerate accumulates: one."""
        return self.plugin_kwargs["num_steps"]

    @property
    def adjust_scheduler(self) -> bool:
        """What accelerate says of adjusting a schedule: True is not among `plugin_kwargs`. It changes nothing here."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether accelerate would step at the end of a loader. It changes nothing here."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> Any:
        """The loader whose iteration began last, of those that go on; None when there is none."""
        loaders = self._loaders if self._shown is None else self._shown
        return max((loader for loader in loaders if loader.started), key=lambda each: each.started, default=None)

    @contextlib.contextmanager
    def only(self, loader: Any) -> Iterator[None]:
        """Take no other loader for the active one: a training loader goes on while an evaluation's is read."""
        before, self._shown = self._shown, [known for known in self._loaders if known is loader]
        try:
            yield
        finally:
            self._shown = before

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.at_end

    @property
    def remainder(self) -> int:
        """Samples in the last round of all processes, 0 when it is full; -1 when that is not known."""
        loader = self.active_dataloader
        size = None if loader is None else loader.samples_per_batch
        try:
            return -1 if size is None else len(loader.dataset) % (size * self._processes)
        except TypeError:  # a stream
            return -1
