"""Optimizers that step parameters one after the other, each from its own gradient and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class PerParameterOptimizer(Optimizer):
    """Calls `step_one` for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` recomputes the loss."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not take sparse gradients: use SparseAdam.")
                self.step_one(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def step_one(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter, in place.

        Args:
            parameter: the parameter.
            grad: its gradient, of the same shape.
            state: the optimizer's state of it, empty at the first step.
            group: the settings of its group.
        """
        raise TypeError(f"{type(self).__name__} must define step_one")
