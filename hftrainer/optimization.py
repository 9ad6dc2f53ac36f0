"""Re-exports `hftrainer.optimizers.schedules` under the name of transformers' module."""

from typing import Any

from hftrainer.compat import libraries
from hftrainer.optimizers.schedules import (
    get_constant_schedule as get_constant_schedule,
    get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    get_greedy_schedule as get_greedy_schedule,
    get_inverse_sqrt_schedule as get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup as get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
    get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule,
    get_scheduler as get_scheduler,
    get_wsd_schedule as get_wsd_schedule,
)


def __getattr__(name: str) -> Any:
    """An optimizer or schedule of transformers, imported at first use, since the import takes seconds.

    Raises:
        MissingPackage: if the installed release lacks it.
    """
    if name in ("Adafactor", "AdafactorSchedule", "get_adafactor_schedule", "GreedyLR"):
        return libraries.import_from_transformers("optimization", name, f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
