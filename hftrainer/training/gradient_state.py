"""`accelerator.gradient_state`, as in accelerate: whether gradients are synchronized, and a loader's position."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: The defaults of accelerate's plugin for accumulation.
_ASSUMED = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}


class GradientState:
    """Has the attributes of accelerate's `GradientState`, for the prepared loaders.

    Args:
        loaders: the prepared loaders that still exist.
        processes: number of processes with their own batches.
        accumulation: the config's `gradient_accumulation_kwargs`.

    Attributes:
        plugin_kwargs: the values of accelerate's accumulation plugin that differ from its defaults. `num_steps` is 1:
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
        """Set whether this micro-batch ends an optimizer step; scripts' copies of transformers' loop call this."""
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches that accelerate accumulates: one."""
        return self.plugin_kwargs["num_steps"]

    @property
    def adjust_scheduler(self) -> bool:
        """The plugin's flag for adjusting schedules. Its default, True, is not in `plugin_kwargs`. Not used here."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether accelerate would step at the end of a loader. Has no effect here."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> Any:
        """Of the loaders being iterated, the one that began last; None when there is none."""
        loaders = self._loaders if self._shown is None else self._shown
        active = (loader for loader in loaders if loader.position.iteration)
        return max(active, key=lambda loader: loader.position.iteration, default=None)

    @contextlib.contextmanager
    def only(self, loader: Any) -> Iterator[None]:
        """Let only `loader` be the active one in the block: evaluations run while the training loader is open."""
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
        """Whether the active loader has yielded its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.position.is_last

    @property
    def remainder(self) -> int:
        """Samples in the last batches of all processes, 0 when they are full; -1 when unknown."""
        loader = self.active_dataloader
        size = None if loader is None else loader.samples_per_batch
        try:
            return -1 if size is None else len(loader.dataset) % (size * self._processes)
        except TypeError:  # a dataset without a length
            return -1
