"""What the tests have found out about each optimizer and schedule; printed at the end of a test run."""

from hftrainer.optimization import SCHEDULES
from hftrainer.trainer_optimizer import OPTIMIZERS

STATUS: dict[str, str] = {}
NAMES = {"optimizer": list(OPTIMIZERS), "schedule": [kind.value for kind in SCHEDULES]}


def lines() -> list[str]:
    return [f"{kind:<10} {name:<30} {STATUS.get(name, 'not run')}" for kind, names in NAMES.items() for name in names]
