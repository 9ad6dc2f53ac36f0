"""Optional arguments of `on_step_end`: the step's loss, inputs and outputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

NAMES = ("loss", "inputs", "outputs")


def asked_for(callbacks: Sequence[Any]) -> frozenset[str]:
    """The names in `NAMES` that are parameters of some callback's `on_step_end`."""
    handlers = [callback.on_step_end for callback in callbacks if callable(getattr(callback, "on_step_end", None))]
    return frozenset(name for handler in handlers for name in inspect.signature(handler).parameters if name in NAMES)


class StepDetails:
    """Keeps what callbacks ask for until the step ends; costs nothing when no callback asks.

    Only callbacks that exist when training begins are considered.
    """

    def __init__(self, asked: frozenset[str]) -> None:
        self.asked = asked
        self._kept: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the outputs of the model's forward passes in training, if a callback asks for them."""
        if "outputs" not in self.asked:
            yield
            return

        def keep(module: nn.Module, _: Any, outputs: Any) -> None:
            if module.training:
                self._kept["outputs"] = outputs

        hook = model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()
            self._kept.clear()

    def add(self, loss: torch.Tensor, inputs: Any) -> None:
        """Add a micro-batch: sum the step's scaled losses, and keep the last inputs."""
        if "loss" in self.asked:
            before = self._kept.get("loss")
            self._kept["loss"] = loss if before is None else before + loss
        if "inputs" in self.asked:
            self._kept["inputs"] = inputs

    def take(self) -> dict[str, Any]:
        """The requested values of the step that ends; then reset."""
        kept, self._kept = self._kept, {}
        return kept
