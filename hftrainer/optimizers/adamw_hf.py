"""The AdamW of transformers until v4.57: `optim="adamw_hf"`, the default until v4.30."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, in the order of operations of the first BERT code.

    Unlike in torch's AdamW, epsilon is added before the bias correction, and the decay comes after the step.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: decay of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        correct_bias: whether to apply bias correction to the moments; the first BERT code did not.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step; `closure` recomputes the loss.

        Raises:
            RuntimeError: for sparse gradients.
        """
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("AdamW does not support sparse gradients: use SparseAdam.")
                _update_parameter(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update_parameter(
    parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1.0 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    step_size = group["lr"]
    if group["correct_bias"]:
        step_size = step_size * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
    parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-step_size)
    if group["weight_decay"] > 0.0:
        parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
