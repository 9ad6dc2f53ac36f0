"""Settings of an optimizer that follow the arguments and not a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from hftrainer.optimization import follows_metric

logger = logging.getLogger(__name__)

#: Settings of an optimizer's parameter groups that come from the arguments. A schedule computes `lr` from `initial_lr`.
_GROUP_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")


@contextlib.contextmanager
def kept_settings(optimizer: Any, scheduler: Any) -> Iterator[None]:
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
    if follows_metric(scheduler) and (kept := optimizer.param_groups[0]["lr"]) != rate:
        logger.warning(
            "%s keeps the checkpoint's learning rate %g instead of the trial's %g.",
            type(scheduler).__name__,
            kept,
            rate,
        )
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
