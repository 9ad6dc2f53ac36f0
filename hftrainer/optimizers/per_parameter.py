"""Optimizers that step parameters one after the other, each from its own gradient and state.

Adafactor (Shazeer and Stern 2018) is Hugging Face's variant: torch's computes different numbers. AdamW is as Hugging
Face had it until v4.57 (`optim="adamw_hf"`, the default until v4.30).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class PerParameterOptimizer(Optimizer):
    """Calls `update_parameter` for each parameter that has a gradient."""

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
                self.update_parameter(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update_parameter(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter, in place.

        Args:
            parameter: the parameter.
            grad: its gradient, of the same shape.
            state: the optimizer's state of it, empty at the first step.
            group: the settings of its group.
        """
        raise TypeError(f"{type(self).__name__} must define update_parameter")


class Adafactor(PerParameterOptimizer):
    """Keeps a row and a column of second moments per matrix, instead of one number per weight.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate; None with `relative_step`.
        eps: added to the squared gradient; and the minimum scale of a parameter.
        clip_threshold: maximum root mean square of an update.
        decay_rate: exponent of the step number in the decay of second moments.
        beta1: decay of the first moment; None for no first moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        scale_parameter: multiply the learning rate by the root mean square of the parameter.
        relative_step: compute the learning rate from the step number, instead of `lr`.
        warmup_init: with `relative_step`, warm up by 1e-6 per step.

    Raises:
        ValueError: for `lr` with `relative_step`, or `warmup_init` without it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError("Adafactor(relative_step=True) computes its learning rate itself: remove lr.")
        if warmup_init and not relative_step:
            raise ValueError("Adafactor(warmup_init=True) needs relative_step=True.")
        super().__init__(
            params,
            {
                "lr": lr,
                "eps": eps,
                "clip_threshold": clip_threshold,
                "decay_rate": decay_rate,
                "beta1": beta1,
                "weight_decay": weight_decay,
                "scale_parameter": scale_parameter,
                "relative_step": relative_step,
                "warmup_init": warmup_init,
            },
        )

    def update_parameter(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        grad = _full(grad)
        if not state:
            _start(state, grad, group)
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
            if name in state:  # a loaded state may have another dtype or device
                state[name] = state[name].to(grad)
        weights = _full(parameter)
        state["step"] += 1
        state["RMS"] = _rms(weights)
        lr = self._get_lr(group, state)
        update = self._second_moment(grad, state, group).mul_(grad)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            weights.add_(weights, alpha=-group["weight_decay"] * lr)
        weights.add_(-update)
        if weights is not parameter:
            parameter.copy_(weights)

    @staticmethod
    def _second_moment(grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """The inverse square root of the second moment; for a matrix, from those of rows and columns."""
        beta2 = 1.0 - math.pow(state["step"], group["decay_rate"])
        square = (grad**2) + group["eps"][0]

        def averaged(name: str, new: torch.Tensor) -> torch.Tensor:
            average: torch.Tensor = state[name]
            return average.mul_(beta2).add_(new, alpha=1.0 - beta2)

        if "exp_avg_sq" in state:
            return averaged("exp_avg_sq", square).rsqrt()
        row = averaged("exp_avg_sq_row", square.mean(dim=-1))
        column = averaged("exp_avg_sq_col", square.mean(dim=-2))
        return (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1) * column.unsqueeze(-2).rsqrt()

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Any:
        rate = group["lr"]
        if group["relative_step"]:
            least = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
            rate = min(least, 1.0 / math.sqrt(state["step"]))
        scale = max(group["eps"][1], state["RMS"]) if group["scale_parameter"] else 1.0
        return scale * rate


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    rms: torch.Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return rms


def _start(state: dict[str, Any], grad: torch.Tensor, group: dict[str, Any]) -> None:
    state["step"] = 0
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(grad)
    if grad.ndim >= 2:
        state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
        state["exp_avg_sq_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
    else:
        state["exp_avg_sq"] = torch.zeros_like(grad)
    state["RMS"] = 0


class AdafactorSchedule(LambdaLR):
    """Reports the learning rates that `Adafactor(relative_step=True)` computes, for the log; changes nothing.

    Args:
        optimizer: an `Adafactor`.
        initial_lr: the rate reported before the first step.
    """

    def __init__(self, optimizer: Adafactor, initial_lr: float = 0.0) -> None:
        for group in optimizer.param_groups:
            group["initial_lr"] = initial_lr
        super().__init__(optimizer, lambda _: initial_lr)
        for group in optimizer.param_groups:
            del group["initial_lr"]

    def get_lr(self) -> list[Any]:
        """The rate of each group's first parameter."""
        optimizer: Any = self.optimizer
        firsts = [(group, group["params"][0]) for group in optimizer.param_groups]
        rates = [optimizer._get_lr(group, optimizer.state[first]) for group, first in firsts if first.grad is not None]
        return rates or self.base_lrs


def get_adafactor_schedule(optimizer: Adafactor, initial_lr: float = 0.0) -> AdafactorSchedule:
    """An `AdafactorSchedule` around `optimizer`."""
    return AdafactorSchedule(optimizer, initial_lr)


class AdamW(PerParameterOptimizer):
    """Adam with decoupled weight decay, in the order of operations of the first BERT code.

    Unlike torch's, epsilon is added before the bias correction, and the decay comes after the step.

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

    def update_parameter(
        self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1.0 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size = size * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
        parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        if group["weight_decay"] > 0.0:
            parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
