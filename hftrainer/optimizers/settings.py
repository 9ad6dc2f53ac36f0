"""Settings of an optimizer that follow the arguments and not a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from hftrainer.optimization import follows_metric

logger = logging.getLogger(__name__)

#: Settings of an optimizer's parameter groups that arguments decide; with a schedule `lr` follows from `initial_lr`.
_OF_ARGUMENTS = ("initial_lr", "weight_decay", "betas", "eps")


@contextlib.contextmanager
def keeping_settings(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Load the states of a checkpoint in the block, but not the settings that came from its run's arguments.

    A trial that goes on from another one's checkpoint has arguments of its own. The learning rate becomes what it would
    be at this step of the schedule; one that follows a metric keeps its rate, which is said.
    """
    own = [{name: group[name] for name in _OF_ARGUMENTS if name in group} for group in optimizer.param_groups]
    rate = optimizer.param_groups[0]["lr"]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=False):
        loaded = group.get("initial_lr")
        group |= settings
        if loaded:
            group["lr"] *= group["initial_lr"] / loaded
    if follows_metric(scheduler) and (kept := optimizer.param_groups[0]["lr"]) != rate:
        logger.warning(
            "%s goes on with the checkpoint's learning rate, %g, not with %g.", type(scheduler).__name__, kept, rate
        )
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
