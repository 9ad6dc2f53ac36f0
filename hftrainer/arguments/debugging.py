"""Debugging aids, and switches for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg


@dataclass(kw_only=True)
class DebuggingArguments:
    """Debugging aids, and the three switches that scripts read."""

    # With None in second place both parsers read words, and leave their number to `arg`.
    debug: str | None | list[str] = arg(
        "", "Debugging aids, separated by spaces: 'underflow_overflow'.", bare=True, several=True
    )
    skip_memory_metrics: bool = arg(True, "Leave memory use out of the metrics.")
    do_train: bool = arg(False, "For your script; the Trainer does not read it.")
    do_eval: bool = arg(False, "For your script; True whenever `eval_strategy` is not 'no'.")
    do_predict: bool = arg(False, "For your script; the Trainer does not read it.")
