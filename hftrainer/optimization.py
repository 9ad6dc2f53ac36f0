"""Learning-rate schedules, as multiples of the peak rate over optimizer steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.trainer_utils import SchedulerType


def _warming_up(step: int, num_warmup_steps: int) -> float:
    return step / max(1, num_warmup_steps)


def _decay_progress(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    """The peak rate throughout. `last_epoch` is the optimizer steps already done, less one."""
    return LambdaLR(optimizer, lambda step: 1, last_epoch)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Rise linearly from 0 over `num_warmup_steps` optimizer steps, then stay."""

    def factor(step: int) -> float:
        return _warming_up(step, num_warmup_steps) if step < num_warmup_steps else 1.0

    return LambdaLR(optimizer, factor, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly over `num_warmup_steps`, then fall linearly to 0 at `num_training_steps`."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warming_up(step, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly, then follow `num_cycles` waves of a cosine; the default half wave falls to 0."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warming_up(step, num_warmup_steps)
        progress = _decay_progress(step, num_warmup_steps, num_training_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))

    return LambdaLR(optimizer, factor, last_epoch)


SCHEDULES: dict[SchedulerType, Callable[..., LambdaLR]] = {
    SchedulerType.LINEAR: get_linear_schedule_with_warmup,
    SchedulerType.COSINE: get_cosine_schedule_with_warmup,
    SchedulerType.CONSTANT: get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP: get_constant_schedule_with_warmup,
}


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LambdaLR:
    """The schedule called `name`, around `optimizer`.

    Args:
        name: one of `SchedulerType`.
        optimizer: its learning rates are the peak.
        num_warmup_steps: optimizer steps of warm-up.
        num_training_steps: optimizer steps of the whole run.
        scheduler_specific_kwargs: further keywords of the schedule.

    Raises:
        InvalidArgument: an unknown name, a keyword that the schedule lacks, or a step count that it needs.
        UnsupportedArgument: a schedule that this release does not have.
    """
    kind = SchedulerType(name)
    if kind not in SCHEDULES:
        raise UnsupportedArgument(
            f"lr_scheduler_type={kind.value!r} is not supported yet: use one of "
            f"{', '.join(known.value for known in SCHEDULES)}, or pass optimizers=(optimizer, scheduler)."
        )
    schedule = SCHEDULES[kind]
    parameters = inspect.signature(schedule).parameters
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    needed = {key: value for key, value in steps.items() if key in parameters}
    for key, value in needed.items():
        if value is None:
            raise InvalidArgument(f"The schedule {kind.value!r} needs {key}.")
    extra = scheduler_specific_kwargs or {}
    allowed = sorted(parameters.keys() - steps.keys() - {"optimizer"})
    if wrong := sorted(extra.keys() - set(allowed)):
        raise InvalidArgument(f"lr_scheduler_kwargs of {kind.value!r}: {wrong} unknown, it takes {allowed}.")
    return schedule(optimizer, **needed, **extra)
