"""What hftrainer says of arguments before anything runs."""

from typing import Any

from hftrainer import TrainingArguments
from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.lightning_plan import make_plan
from hftrainer.arguments.resolved import ResolvedArguments

#: Variables that torchrun sets in the second of two processes.
SECOND = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=localhost MASTER_PORT=29501"


def make(kind: type = TrainingArguments, /, **settings: Any) -> Any:
    return kind(**{"output_dir": "unused", "report_to": "none", **settings})


def plan_of(args: Any = None, /, **settings: Any) -> Any:
    """What is built from arguments, given whole or as settings."""
    return make_plan(ResolvedArguments(args or make(**settings)))


def problems(kind: type = TrainingArguments, /, **settings: Any) -> list[str]:
    """The sentences with which a Trainer refuses these arguments."""
    return check_supported(ResolvedArguments(make(kind, **settings)))


def assert_refused(found: list[str], message: str | None) -> None:
    """One problem has the message; None for no problem at all."""
    assert not found if message is None else any(message in sentence for sentence in found), found
