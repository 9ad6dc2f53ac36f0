"""GreedyLR (arXiv 2512.14527, since v5.0): raises or lowers the learning rate after evaluations."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


class GreedyLR(ReduceLROnPlateau):
    """Divides the learning rate by `factor` while a metric improves, and multiplies it by `factor` otherwise.

    All durations are in evaluations.

    Args:
        optimizer: the optimizer whose learning rates change.
        mode: 'min' or 'max', the direction in which the metric improves.
        factor: below 1.
        patience: consecutive evaluations, all better or all not, that are tolerated before the rate changes.
        threshold: minimum improvement that counts as better.
        threshold_mode: 'rel' or 'abs': whether the threshold is relative or absolute.
        cooldown: evaluations to wait after the rate was lowered.
        warmup: evaluations to wait after the rate was raised.
        min_lr: the minimum rate, or one for each group.
        max_lr: the maximum rate, or one for each group.
        eps: smaller changes of the rate are not made.
        verbose: print each change.
        smooth: use the mean of the last `window_size` metrics.
        window_size: number of metrics in that mean.
        reset_start: decreases in a row at the minimum rate after which the schedule restarts.

    Raises:
        ValueError: for a factor of 1 or more, unknown modes, or lists of rates of the wrong length.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        if factor >= 1.0:
            raise ValueError(f"GreedyLR: factor={factor} must be below 1.")
        self.optimizer = optimizer
        self.factor, self.patience, self.eps, self.verbose = factor, patience, eps, verbose
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.cooldown, self.warmup = cooldown, warmup
        self.smooth, self.window_size = smooth, window_size
        self.reset_start = self.reset_start_original = reset_start
        self.min_lrs, self.max_lrs = self._of_each_group("min_lr", min_lr), self._of_each_group("max_lr", max_lr)
        self._init_lrs = [group["lr"] for group in optimizer.param_groups]
        self._last_lr = list(self._init_lrs)
        self.last_epoch = 0
        for name, given, allowed in (
            ("mode", mode, ("min", "max")),
            ("threshold_mode", threshold_mode, ("rel", "abs")),
        ):
            if given not in allowed:
                raise ValueError(f"GreedyLR: {name}={given!r}: choose {' or '.join(allowed)}.")
        self._reset_counters()

    def _of_each_group(self, name: str, value: float | list[float]) -> list[float]:
        count = len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * count
        if len(values) != count:
            raise ValueError(f"GreedyLR: {name} has {len(values)} values for {count} groups of parameters.")
        return values

    def _reset_counters(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self._recent: deque[float] = deque()
        self._sum = 0.0

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Record the metric of an evaluation, and change the learning rate if due."""
        current = self._smoothed(float(metrics)) if self.smooth else float(metrics)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter or self.warmup_counter:
            if self.cooldown_counter:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(current)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _smoothed(self, value: float) -> float:
        self._recent.append(value)
        self._sum += value
        if len(self._recent) > self.window_size:
            self._sum -= self._recent.popleft()
        return self._sum / len(self._recent)

    def _count(self, current: float) -> None:
        if self._improves(current):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._raise_lr()
            self.warmup_counter, self.num_good_epochs = self.warmup, 0
        elif self.num_bad_epochs > self.patience:
            self._lower_lr()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def _improves(self, current: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        best: float = sign * self.best
        goal: float = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + self.threshold
        return sign * current > goal

    def _raise_lr(self) -> None:
        for group, most in zip(self.optimizer.param_groups, self.max_lrs, strict=True):
            rate = min(float(group["lr"]) / self.factor, most)
            if rate - float(group["lr"]) > self.eps:
                self._set(group, rate)
        self.reset_start = self.reset_start_original

    def _lower_lr(self) -> None:
        for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            rate = max(float(group["lr"]) * self.factor, least)
            if float(group["lr"]) - rate > self.eps:
                self._set(group, rate)
        if any(group["lr"] > least for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True)):
            return
        self.reset_start -= 1
        if self.reset_start <= 0:
            for group, rate in zip(self.optimizer.param_groups, self._init_lrs, strict=True):
                group["lr"] = rate
            self.reset_start = self.reset_start_original
            self._reset_counters()

    def _set(self, group: dict[str, Any], rate: float) -> None:
        if self.verbose:
            print(f"Evaluation {self.last_epoch}: learning rate {float(group['lr']):.4e} is now {rate:.4e}.")
        group["lr"] = rate

    _SAVED = """
        factor min_lrs max_lrs patience verbose cooldown warmup cooldown_counter warmup_counter mode threshold
        threshold_mode best num_bad_epochs num_good_epochs eps last_epoch smooth window_size reset_start
        reset_start_original _last_lr _init_lrs
    """.split()

    def state_dict(self) -> dict[str, Any]:
        """The state, under transformers' names."""
        state = {name: getattr(self, name) for name in self._SAVED}
        if self.smooth:
            state["_streaming_avg"] = {
                "window_size": self.window_size,
                "values": list(self._recent),
                "sum": self._sum,
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and set its learning rates."""
        for name in self._SAVED:
            if name in state_dict:
                setattr(self, name, state_dict[name])
        if (recent := state_dict.get("_streaming_avg")) is not None:
            self._recent, self._sum = deque(recent["values"]), recent["sum"]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate
