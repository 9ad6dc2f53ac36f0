"""Learning-rate schedules: factors of the peak rate by optimizer step; and settings kept on resume."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hftrainer.arguments.choices import SchedulerType
from hftrainer.compat import peers
from hftrainer.errors import InvalidArgument, UnknownKey, UnsupportedArgument

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """An optimizer or schedule of transformers, imported at first use, since that takes seconds.

    Raises:
        MissingPackage: when the installed release does not have it.
    """
    if name in ("Adafactor", "AdafactorSchedule", "get_adafactor_schedule", "GreedyLR"):
        return peers.import_from_transformers("optimization", name, f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _warmup_then(
    shape: Callable[[int], float], optimizer: Optimizer, num_warmup_steps: int, last_epoch: int
) -> LambdaLR:
    """Rise linearly, then follow `shape`, a function of the steps since the warm-up."""
    # A partial, so that scheduler.pt matches transformers; of a named function, so that it can be pickled.
    return LambdaLR(optimizer, partial(_warmup_factor, shape, num_warmup_steps), last_epoch)


def _warmup_factor(shape: Callable[[int], float], num_warmup_steps: int, step: int) -> float:
    return step / max(1, num_warmup_steps) if step < num_warmup_steps else shape(step - num_warmup_steps)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    """The peak rate throughout. `last_epoch` is the number of optimizer steps already done, minus one."""
    return LambdaLR(optimizer, _constant, last_epoch)


def _constant(_: int) -> int:
    return 1


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Rise linearly from 0 over `num_warmup_steps` optimizer steps, then stay constant."""
    return _warmup_then(_constant, optimizer, num_warmup_steps, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly over `num_warmup_steps`, then fall linearly to 0 at `num_training_steps`."""
    shape = partial(_linear, num_training_steps - num_warmup_steps)
    return _warmup_then(shape, optimizer, num_warmup_steps, last_epoch)


def _linear(steps: int, step: int) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly, then follow `num_cycles` waves of a cosine; the default half wave falls to 0."""
    shape = partial(_cosine_factor, 0, num_cycles, num_training_steps - num_warmup_steps)
    return _warmup_then(shape, optimizer, num_warmup_steps, last_epoch)


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly, then fall `num_cycles` times along half a cosine, each time from the peak."""
    shape = partial(_cosine_with_restarts, num_cycles, num_training_steps - num_warmup_steps)
    return _warmup_then(shape, optimizer, num_warmup_steps, last_epoch)


def _cosine_with_restarts(num_cycles: int, steps: int, step: int) -> float:
    progress = step / max(1, steps)
    return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """A schedule with linear warmup, then polynomial decay of degree `power` to `lr_end`."""
    peak = optimizer.defaults["lr"]
    if not peak > lr_end:
        raise InvalidArgument(f"lr_scheduler_kwargs: lr_end={lr_end} must be below the learning rate, {peak}.")
    shape = partial(_polynomial, peak, lr_end, power, num_training_steps - num_warmup_steps)
    return _warmup_then(shape, optimizer, num_warmup_steps, last_epoch)


def _polynomial(peak: float, lr_end: float, power: float, steps: int, step: int) -> float:
    if step > steps:
        return lr_end / peak
    fallen: float = (1 - step / steps) ** power
    return ((peak - lr_end) * fallen + lr_end) / peak


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly, then decay with the inverse square root of the step; `timescale` defaults to the warm-up steps."""
    scale = timescale if timescale is not None else num_warmup_steps or 10_000
    return _warmup_then(partial(_inverse_root, scale), optimizer, num_warmup_steps, last_epoch)


def _inverse_root(scale: int, step: int) -> float:
    return 1.0 / math.sqrt((step + scale) / scale)


def _min_lr_ratio(optimizer: Optimizer, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The minimum rate as a share of the peak, from one of the two arguments."""
    if (min_lr is None) == (min_lr_rate is None):
        raise InvalidArgument("lr_scheduler_kwargs: set min_lr, or min_lr_rate as a share of the learning rate.")
    return min_lr / optimizer.defaults["lr"] if min_lr is not None else float(min_lr_rate)  # type: ignore[arg-type]


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LambdaLR:
    """As `get_cosine_schedule_with_warmup`, but down to `min_lr`, or to `min_lr_rate` of the peak."""
    least = _min_lr_ratio(optimizer, min_lr, min_lr_rate)
    shape = partial(_cosine_factor, least, num_cycles, num_training_steps - num_warmup_steps)
    return _warmup_then(shape, optimizer, num_warmup_steps, last_epoch)


def _cosine_factor(least: float, num_cycles: float, steps: int, step: int) -> float:
    return max(0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * (step / max(1, steps)))) * (1 - least) + least)


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> LambdaLR:
    """As `get_cosine_with_min_lr_schedule_with_warmup`, with a different first step.

    Its learning rate is `warmup_lr_rate` times the peak; by default one warm-up step's share.
    """
    least = _min_lr_ratio(optimizer, min_lr, min_lr_rate)
    shape = partial(_from_first_step, least, warmup_lr_rate, num_cycles, num_warmup_steps, num_training_steps)
    return LambdaLR(optimizer, shape, last_epoch)


def _from_first_step(
    least: float,
    warmup_lr_rate: float | None,
    num_cycles: float,
    num_warmup_steps: int,
    num_training_steps: int,
    step: int,
) -> float:
    if step < num_warmup_steps and warmup_lr_rate is None:
        return (step + 1.0) / max(1.0, num_warmup_steps)
    if step < num_warmup_steps:
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)  # type: ignore[operator]
    progress = (step - num_warmup_steps + 1.0) / max(1.0, num_training_steps - num_warmup_steps)
    wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0, wave * (1 - least) + least)


#: Shapes of a rise from 0 to 1, and of a fall from 1 to 0, over `progress`; only the cosine uses `cycles`.
_RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}
_FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda progress, _: 1.0 - progress,
    "cosine": lambda progress, cycles: 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)),
    "1-sqrt": lambda progress, _: 1.0 - math.sqrt(progress),
}


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warm up, stay constant, and decay to `min_lr_ratio` of the peak.

    Args:
        optimizer: its learning rates are the peak.
        num_warmup_steps: optimizer steps of warm-up.
        num_decay_steps: optimizer steps of the decay.
        num_training_steps: optimizer steps in total, if `num_stable_steps` is not given.
        num_stable_steps: optimizer steps between warm-up and decay.
        warmup_type: 'linear', 'cosine' or '1-sqrt'.
        decay_type: 'linear', 'cosine' or '1-sqrt'.
        min_lr_ratio: share of the peak at the start and the end.
        num_cycles: waves of a cosine decay.
        last_epoch: optimizer steps already done, minus one.
    """
    if num_training_steps is None and num_stable_steps is None:
        raise InvalidArgument("The schedule 'warmup_stable_decay' needs num_training_steps or num_stable_steps.")
    for name, kind in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if kind not in _RISES:
            raise InvalidArgument(f"lr_scheduler_kwargs: {name}={kind!r}: choose one of {', '.join(_RISES)}.")
    stable = num_stable_steps
    if stable is None:
        stable = num_training_steps - num_warmup_steps - num_decay_steps  # type: ignore[operator]
    steps = num_warmup_steps, stable, num_decay_steps
    return LambdaLR(optimizer, partial(_wsd, steps, warmup_type, decay_type, min_lr_ratio, num_cycles), last_epoch)


def _wsd(
    steps: tuple[int, int, int], warmup_type: str, decay_type: str, least: float, num_cycles: float, step: int
) -> float:
    """The factor at `step`; `steps` has the lengths of warm-up, stable phase and decay."""
    warmup, stable, decay = steps
    if step < warmup:
        shape = _RISES[warmup_type](step / max(1, warmup))
    elif step < warmup + stable:
        return 1.0
    elif step < warmup + stable + decay:
        shape = _FALLS[decay_type]((step - warmup - stable) / max(1, decay), num_cycles)
    else:
        return least
    return max(0.0, shape * (1.0 - least) + least)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """Torch's `ReduceLROnPlateau`, which steps on evaluations."""
    return ReduceLROnPlateau(optimizer, **kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> Any:
    """The `GreedyLR` of transformers, which steps on evaluations."""
    return _greedy_lr()(optimizer, **kwargs)


def _greedy_lr() -> Any:
    return peers.import_from_transformers("optimization", "GreedyLR", "lr_scheduler_type='greedy'")


def needs_metric(scheduler: Any) -> bool:
    """Whether the scheduler steps on evaluations, with their metric: `ReduceLROnPlateau`, or transformers' GreedyLR."""
    return isinstance(scheduler, ReduceLROnPlateau) or peers.is_instance(
        scheduler, "transformers.optimization", "GreedyLR"
    )


def add_missing_groups(scheduler: Any, optimizer: Optimizer) -> None:
    """Extend a schedule to parameter groups that a callback added, and keep the rates that the callback sets.

    Raises:
        UnsupportedArgument: for schedules other than those of `lr_scheduler_type`: torch needs a rate for each group.
    """
    missing = optimizer.param_groups[len(getattr(scheduler, "base_lrs", optimizer.param_groups)) :]
    if missing and not isinstance(scheduler, LambdaLR):
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise UnsupportedArgument(
                f"{type(scheduler).__name__} was made for another optimizer than the one that trains: pass both, as "
                "optimizers=(optimizer, scheduler)."
            )
        raise UnsupportedArgument(
            f"{type(scheduler).__name__} does not support the {len(missing)} parameter groups that a callback has "
            "added to the optimizer: choose the scheduler with lr_scheduler_type."
        )
    for _ in missing:
        number = len(scheduler.base_lrs)
        scheduler.base_lrs.append(1.0)  # load_state_dict makes new groups, so they are found by index
        scheduler.lr_lambdas.append(lambda _, number=number: optimizer.param_groups[number]["lr"])


SCHEDULES: dict[SchedulerType, Callable[..., LRScheduler]] = {
    SchedulerType.LINEAR: get_linear_schedule_with_warmup,
    SchedulerType.COSINE: get_cosine_schedule_with_warmup,
    SchedulerType.COSINE_WITH_RESTARTS: get_cosine_with_hard_restarts_schedule_with_warmup,
    SchedulerType.POLYNOMIAL: get_polynomial_decay_schedule_with_warmup,
    SchedulerType.CONSTANT: get_constant_schedule,
    SchedulerType.CONSTANT_WITH_WARMUP: get_constant_schedule_with_warmup,
    SchedulerType.INVERSE_SQRT: get_inverse_sqrt_schedule,
    SchedulerType.REDUCE_ON_PLATEAU: get_reduce_on_plateau_schedule,
    SchedulerType.COSINE_WITH_MIN_LR: get_cosine_with_min_lr_schedule_with_warmup,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    SchedulerType.WARMUP_STABLE_DECAY: get_wsd_schedule,
    SchedulerType.GREEDY: get_greedy_schedule,
}


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """The schedule called `name`, around `optimizer`.

    Args:
        name: one of `SchedulerType`.
        optimizer: its learning rates are the peak.
        num_warmup_steps: optimizer steps of warm-up.
        num_training_steps: optimizer steps of the whole run.
        scheduler_specific_kwargs: further keywords of the schedule.

    Raises:
        InvalidArgument: for an unknown name, an unknown keyword, or a missing step count or keyword.
    """
    schedule = SCHEDULES[kind := SchedulerType(name)]
    takes: Callable[..., Any] = schedule
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        takes = ReduceLROnPlateau
    elif kind is SchedulerType.GREEDY:
        takes = _greedy_lr()
    parameters = inspect.signature(takes).parameters
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    needed = {key: value for key, value in steps.items() if key in parameters}
    for key, value in needed.items():
        if value is None and parameters[key].default is inspect.Parameter.empty:
            raise InvalidArgument(f"The schedule {kind.value!r} needs {key}.")
    if num_warmup_steps and "num_warmup_steps" not in parameters:
        logger.warning(
            "warmup_steps=%s has no effect: lr_scheduler_type=%r has no warm-up%s.",
            num_warmup_steps,
            kind.value,
            "; 'constant_with_warmup' has" if kind is SchedulerType.CONSTANT else "",
        )
    extra = scheduler_specific_kwargs or {}
    allowed = sorted(parameters.keys() - steps.keys() - {"optimizer", "self"})
    if wrong := sorted(extra.keys() - set(allowed)):
        raise UnknownKey(f"lr_scheduler_kwargs of {kind.value!r}: {wrong} unknown, it takes {allowed}.")
    required = [name for name in allowed if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in extra]:
        raise InvalidArgument(f"lr_scheduler_kwargs of {kind.value!r}: set {', '.join(missing)}.")
    return schedule(optimizer, **needed, **extra)


#: Settings of an optimizer's parameter groups that come from the arguments. A schedule computes `lr` from `initial_lr`.
_GROUP_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")


@contextlib.contextmanager
def keep_argument_settings(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keep the settings from this trial's arguments while the block loads the states of a checkpoint.

    The checkpoint may be another trial's, whose arguments differ. The learning rate becomes the schedule's rate at the
    checkpoint's step. A schedule that follows a metric keeps the checkpoint's rate, with a warning.
    """
    own = [{name: group[name] for name in _GROUP_SETTINGS if name in group} for group in optimizer.param_groups]
    rate = optimizer.param_groups[0]["lr"]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=False):
        loaded = group.get("initial_lr")
        group |= settings
        if loaded:
            group["lr"] *= group["initial_lr"] / loaded
    if needs_metric(scheduler) and (kept := optimizer.param_groups[0]["lr"]) != rate:
        logger.warning(
            "%s keeps the checkpoint's learning rate %g instead of the trial's %g.",
            type(scheduler).__name__,
            kept,
            rate,
        )
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
