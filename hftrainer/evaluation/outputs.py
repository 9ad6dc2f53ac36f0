"""Keeping the outputs of many batches, in time linear in their number."""

from __future__ import annotations

from typing import Any

from hftrainer.trainer_pt_utils import nested_concat, nested_numpify


class OutputCollector:
    """The outputs of a pass, batch by batch, concatenated once at the end.

    Args:
        concatenate: whether `arrays()` joins the batches (right-padded with -100) or lists them.
    """

    def __init__(self, concatenate: bool = True) -> None:
        self.concatenate = concatenate
        self._on_device: list[Any] = []
        self._on_host: list[Any] = []

    def add(self, outputs: Any) -> None:
        """Keep the outputs of one batch where they are."""
        self._on_device.append(outputs)

    def to_host(self) -> None:
        """Move what was added to the CPU, as arrays."""
        self._on_host += [nested_numpify(outputs) for outputs in self._on_device]
        self._on_device.clear()

    def arrays(self) -> Any:
        """Everything added, as arrays of shape `(samples, ...)` or as a list of batches; None if nothing was."""
        self.to_host()
        if not self._on_host:
            return None
        return nested_concat(self._on_host) if self.concatenate else self._on_host
