"""Optimizers that step each parameter during backward, as soon as its gradient is ready, and free the gradient."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class LayerWiseDummyOptimizer(Optimizer):
    """Represents one optimizer per parameter; its own `step` does nothing.

    Its learning rate is copied to all of them, so a scheduler sets theirs through it.

    Args:
        optimizer_dict: the optimizer of each parameter.
        lr: the learning rate.
        kwargs: the keywords of the optimizers.
    """

    def __init__(
        self, optimizer_dict: dict[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **kwargs: Any
    ) -> None:
        self.optimizer_dict = optimizer_dict or {}
        # torch needs a parameter; it is random, as in transformers, so that later random draws are the same.
        super().__init__([torch.randn(1, 1)], {"lr": lr})
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._step_one)
            for parameter in self.optimizer_dict
            if parameter.requires_grad
        ]

    def remove_hooks(self) -> None:
        """Stop stepping: another optimizer takes over."""
        for hook in self._hooks:
            hook.remove()

    def _step_one(self, parameter: nn.Parameter) -> None:
        optimizer = self.optimizer_dict[parameter]
        for group in optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: each gradient is cleared right after its step."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing: every parameter has already stepped."""

    def state_dict(self) -> dict[str, Any]:
        """The state, including that of each parameter's optimizer in the order of the parameters."""
        return {**super().state_dict(), "layers": [own.state_dict() for own in self.optimizer_dict.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; states written by transformers lack those of the parameters' optimizers."""
        layers = state_dict.get("layers")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "layers"})
        if layers is None:
            logger.warning("The checkpoint lacks the states of the layer-wise optimizers: their moments start at zero.")
            return
        for own, state in zip(self.optimizer_dict.values(), layers, strict=True):
            own.load_state_dict(state)
