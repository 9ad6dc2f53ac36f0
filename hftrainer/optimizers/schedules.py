"""Learning-rate schedules, and the optimizer settings that loading a checkpoint preserves."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hftrainer.arguments.choices import SchedulerType
from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument, UnknownKey, UnsupportedArgument, suggest

logger = logging.getLogger(__name__)


def _add_warmup(
    decay: Callable[[int], float], optimizer: Optimizer, num_warmup_steps: int, last_epoch: int
) -> LambdaLR:
    """A schedule with linear warm-up, then `decay`, a function of the steps since the warm-up."""
    # A partial makes scheduler.pt equal to transformers'; a named function can be pickled.
    return LambdaLR(optimizer, partial(_warmup_factor, decay, num_warmup_steps), last_epoch)


def _warmup_factor(decay: Callable[[int], float], num_warmup_steps: int, step: int) -> float:
    return step / max(1, num_warmup_steps) if step < num_warmup_steps else decay(step - num_warmup_steps)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    """A schedule with a constant rate. `last_epoch` is the number of completed optimizer steps minus one."""
    return LambdaLR(optimizer, _constant, last_epoch)


def _constant(_: int) -> int:
    return 1


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """A schedule with linear warm-up over `num_warmup_steps` optimizer steps, then a constant rate."""
    return _add_warmup(_constant, optimizer, num_warmup_steps, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """A schedule with linear warm-up, then linear decay to 0 at `num_training_steps`."""
    decay = partial(_linear, num_training_steps - num_warmup_steps)
    return _add_warmup(decay, optimizer, num_warmup_steps, last_epoch)


def _linear(steps: int, step: int) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, last_epoch: int = -1
) -> LambdaLR:
    """A schedule with linear warm-up, then `num_cycles` cosine waves; the default half wave decays to 0."""
    decay = partial(_cosine_factor, 0, num_cycles, num_training_steps - num_warmup_steps)
    return _add_warmup(decay, optimizer, num_warmup_steps, last_epoch)


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1, last_epoch: int = -1
) -> LambdaLR:
    """A schedule with linear warm-up, then `num_cycles` half cosine waves, each from the peak."""
    decay = partial(_cosine_with_restarts, float(num_cycles), num_training_steps - num_warmup_steps)
    return _add_warmup(decay, optimizer, num_warmup_steps, last_epoch)


def _cosine_with_restarts(num_cycles: float, steps: int, step: int) -> float:
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
    """A schedule with linear warm-up, then polynomial decay of degree `power` to `lr_end`."""
    peak = optimizer.defaults["lr"]
    if not peak > lr_end:
        raise InvalidArgument(f"lr_scheduler_kwargs: lr_end={lr_end} must be below the learning rate, {peak}.")
    decay = partial(_polynomial, peak, lr_end, power, num_training_steps - num_warmup_steps)
    return _add_warmup(decay, optimizer, num_warmup_steps, last_epoch)


def _polynomial(peak: float, lr_end: float, power: float, steps: int, step: int) -> float:
    if step > steps:
        return lr_end / peak
    factor: float = (1 - step / steps) ** power
    return ((peak - lr_end) * factor + lr_end) / peak


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LambdaLR:
    """A schedule with linear warm-up, then inverse square-root decay; `timescale` defaults to the warm-up steps."""
    scale = timescale if timescale is not None else num_warmup_steps or 10_000
    return _add_warmup(partial(_inverse_sqrt, scale), optimizer, num_warmup_steps, last_epoch)


def _inverse_sqrt(scale: int, step: int) -> float:
    return 1.0 / math.sqrt((step + scale) / scale)


def _min_lr_ratio(optimizer: Optimizer, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The minimum rate as a fraction of the peak, from one of the two arguments."""
    if (min_lr is None) == (min_lr_rate is None):
        raise InvalidArgument("lr_scheduler_kwargs: set either min_lr or min_lr_rate, a fraction of the learning rate.")
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
    """`get_cosine_schedule_with_warmup` with a minimum: `min_lr`, or `min_lr_rate` times the peak."""
    min_lr_ratio = _min_lr_ratio(optimizer, min_lr, min_lr_rate)
    decay = partial(_cosine_factor, min_lr_ratio, num_cycles, num_training_steps - num_warmup_steps)
    return _add_warmup(decay, optimizer, num_warmup_steps, last_epoch)


def _cosine_factor(min_lr_ratio: float, num_cycles: float, steps: int, step: float) -> float:
    wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * (step / max(1, steps))))
    return max(0, wave * (1 - min_lr_ratio) + min_lr_ratio)


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
    """`get_cosine_with_min_lr_schedule_with_warmup` with a different first rate.

    The first rate is `warmup_lr_rate` times the peak, or by default the peak divided by the warm-up steps.
    """
    min_lr_ratio = _min_lr_ratio(optimizer, min_lr, min_lr_rate)
    decay = partial(_cosine_with_warmup, min_lr_ratio, warmup_lr_rate, num_cycles, num_warmup_steps, num_training_steps)
    return LambdaLR(optimizer, decay, last_epoch)


def _cosine_with_warmup(
    min_lr_ratio: float,
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
    steps = num_training_steps - num_warmup_steps
    return _cosine_factor(min_lr_ratio, num_cycles, steps, step - num_warmup_steps + 1.0)


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
    """A schedule with warm-up, a constant rate, and decay to `min_lr_ratio` times the peak.

    Args:
        optimizer: the optimizer, whose learning rates are the peak.
        num_warmup_steps: optimizer steps of the warm-up.
        num_decay_steps: optimizer steps of the decay.
        num_training_steps: optimizer steps of the run, needed without `num_stable_steps`.
        num_stable_steps: optimizer steps between warm-up and decay.
        warmup_type: 'linear', 'cosine' or '1-sqrt'.
        decay_type: 'linear', 'cosine' or '1-sqrt'.
        min_lr_ratio: fraction of the peak at the start and the end.
        num_cycles: number of waves of a cosine decay.
        last_epoch: number of completed optimizer steps minus one.
    """
    if num_training_steps is None and num_stable_steps is None:
        raise InvalidArgument("The schedule 'warmup_stable_decay' needs num_training_steps or num_stable_steps.")
    for name, kind in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if kind not in _RISES:
            raise InvalidArgument(f"lr_scheduler_kwargs: {name}={kind!r}: choose one of {', '.join(_RISES)}.")
    if num_stable_steps is None:
        num_stable_steps = num_training_steps - num_warmup_steps - num_decay_steps  # type: ignore[operator]
    steps = num_warmup_steps, num_stable_steps, num_decay_steps
    return LambdaLR(optimizer, partial(_wsd, steps, warmup_type, decay_type, min_lr_ratio, num_cycles), last_epoch)


def _wsd(
    steps: tuple[int, int, int], warmup_type: str, decay_type: str, min_lr_ratio: float, num_cycles: float, step: int
) -> float:
    """The factor at `step`; `steps` has the lengths of warm-up, constant phase and decay."""
    warmup, stable, decay = steps
    if step < warmup:
        shape = _RISES[warmup_type](step / max(1, warmup))
    elif step < warmup + stable:
        return 1.0
    elif step < warmup + stable + decay:
        shape = _FALLS[decay_type]((step - warmup - stable) / max(1, decay), num_cycles)
    else:
        return min_lr_ratio
    return max(0.0, shape * (1.0 - min_lr_ratio) + min_lr_ratio)


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """Torch's `ReduceLROnPlateau`, which steps after each evaluation."""
    return ReduceLROnPlateau(optimizer, **kwargs)


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> Any:
    """The `GreedyLR` of transformers, which steps after each evaluation."""
    return _greedy_lr()(optimizer, **kwargs)


def _greedy_lr() -> Any:
    return libraries.import_from_transformers("optimization", "GreedyLR", "lr_scheduler_type='greedy'")


def needs_metric(scheduler: Any) -> bool:
    """Whether the scheduler steps on evaluations, with their metric: `ReduceLROnPlateau`, or transformers' GreedyLR."""
    # Every optimizer step asks, of most schedules in vain.
    return not isinstance(scheduler, LambdaLR) and (
        isinstance(scheduler, ReduceLROnPlateau)
        or libraries.is_instance(scheduler, "transformers.optimization", "GreedyLR")
    )


def add_missing_groups(scheduler: Any, optimizer: Optimizer) -> None:
    """Extend a schedule to parameter groups that a callback added, at the callback's rates.

    Raises:
        UnsupportedArgument: for schedules not from `lr_scheduler_type`, since torch needs a rate for each group.
    """
    missing = optimizer.param_groups[len(getattr(scheduler, "base_lrs", optimizer.param_groups)) :]
    if missing and not isinstance(scheduler, LambdaLR):
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise UnsupportedArgument(
                f"{type(scheduler).__name__} was created for another optimizer than the Trainer's: pass both, as "
                "optimizers=(optimizer, scheduler)."
            )
        raise UnsupportedArgument(
            f"{type(scheduler).__name__} does not support the {len(missing)} parameter groups that a callback "
            "added to the optimizer: select the scheduler with lr_scheduler_type."
        )
    for _ in missing:
        index = len(scheduler.base_lrs)
        scheduler.base_lrs.append(1.0)
        # Look up the group by its index at each call, since load_state_dict replaces the groups.
        scheduler.lr_lambdas.append(lambda _, index=index: optimizer.param_groups[index]["lr"])


#: Schedule → function that returns its scheduler. The names of the schedules are in `arguments/choices.py`.
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
    """The schedule with this name for an optimizer.

    Args:
        name: one of `SchedulerType`.
        optimizer: the optimizer, whose learning rates are the peak.
        num_warmup_steps: optimizer steps of the warm-up.
        num_training_steps: optimizer steps of the run.
        scheduler_specific_kwargs: other arguments of the schedule.

    Raises:
        InvalidArgument: for an unknown name or argument, or a missing step count or argument.
    """
    schedule = SCHEDULES[kind := SchedulerType(name)]
    function: Callable[..., Any] = schedule
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        function = ReduceLROnPlateau
    elif kind is SchedulerType.GREEDY:
        function = _greedy_lr()
    parameters = inspect.signature(function).parameters
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    step_counts = {key: value for key, value in steps.items() if key in parameters}
    for key, value in step_counts.items():
        if value is None and parameters[key].default is inspect.Parameter.empty:
            raise InvalidArgument(f"The schedule {kind.value!r} needs {key}.")
    if num_warmup_steps and "num_warmup_steps" not in parameters:
        logger.warning(
            "warmup_steps=%s has no effect: lr_scheduler_type=%r has no warm-up%s.",
            num_warmup_steps,
            kind.value,
            "; 'constant_with_warmup' has" if kind is SchedulerType.CONSTANT else "",
        )
    elif num_warmup_steps and num_training_steps and num_warmup_steps > num_training_steps:
        text = "warmup_steps=%s, but the run has only %s steps: the learning rate does not reach its peak."
        logger.warning(text, num_warmup_steps, num_training_steps)
    kwargs = scheduler_specific_kwargs or {}
    others = {name: parameter for name, parameter in parameters.items() if name not in {*steps, "optimizer", "self"}}
    _check_schedule_kwargs(kind, others, kwargs)
    return schedule(optimizer, **step_counts, **kwargs)


def _check_schedule_kwargs(
    kind: SchedulerType, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]
) -> None:
    names = sorted(parameters)
    if unknown := sorted(kwargs.keys() - set(names)):
        hint = suggest(unknown[0], names, ".")
        raise UnknownKey(f"lr_scheduler_kwargs of {kind.value!r}: unknown {unknown}{hint} Allowed: {names}.")
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in kwargs]:
        raise InvalidArgument(f"lr_scheduler_kwargs of {kind.value!r}: set {', '.join(missing)}.")


#: Settings of an optimizer's parameter groups that come from the arguments. A schedule computes `lr` from `initial_lr`.
_GROUP_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")


@contextlib.contextmanager
def keep_argument_settings(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keep the settings from this trial's arguments while the block loads a checkpoint.

    The checkpoint may belong to a trial with other arguments. The learning rate becomes the schedule's rate at the
    checkpoint's step. A metric-driven schedule keeps the checkpoint's rate, with a warning.
    """
    settings = [{name: group[name] for name in _GROUP_SETTINGS if name in group} for group in optimizer.param_groups]
    rate = optimizer.param_groups[0]["lr"]
    yield
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        loaded_rate = group.get("initial_lr")
        group |= values
        if loaded_rate:
            group["lr"] *= group["initial_lr"] / loaded_rate
    if needs_metric(scheduler) and (checkpoint_rate := optimizer.param_groups[0]["lr"]) != rate:
        text = "%s keeps the checkpoint's learning rate %g instead of the trial's %g."
        logger.warning(text, type(scheduler).__name__, checkpoint_rate, rate)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
