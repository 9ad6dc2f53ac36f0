"""What to report, when, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import IntervalStrategy
from hftrainer.compat.messages import LEVELS

#: Names of log levels → Python's numbers; 'passive' leaves the level as it is.
LOG_LEVELS = {**LEVELS, "passive": -1}


@dataclass(kw_only=True)
class LoggingArguments:
    """The log lines, the progress bar and the trackers."""

    logging_strategy: IntervalStrategy | str = arg("steps", "When to log: 'no', 'steps' or 'epoch'.")
    logging_steps: float = arg(500, "Optimizer steps between two log lines; below 1 a fraction of all steps.")
    logging_first_step: bool = arg(False, "Also log the first optimizer step.")
    logging_nan_inf_filter: bool = arg(
        True, "Exclude nan and inf losses from the logged mean; gradients are not changed."
    )
    log_on_each_node: bool = arg(True, "With several nodes, log on the main process of each node.")
    log_level: str = arg(
        "passive",
        "Level of the library's messages on the main process; 'passive' changes nothing.",
        choices=LOG_LEVELS,
    )
    log_level_replica: str = arg("warning", "The same for the other processes.", choices=LOG_LEVELS)
    disable_tqdm: bool | None = arg(None, "Print log lines instead of a progress bar; None depends on the log level.")
    include_num_input_tokens_seen: str | bool = arg("no", "Count input tokens: 'no', 'all' or 'non_padding'.")
    report_to: None | str | list[str] = arg("none", "Trackers to write to ('all' before v5.0).")
    run_name: str | None = arg(None, "Name of the run in the trackers.")
    project: str = arg("huggingface", "Name of the project in Trackio.")
    trackio_space_id: str | None = arg(None, "Space that shows the Trackio dashboard.")
    trackio_bucket_id: str | None = arg(None, "Bucket that stores the Trackio data.")
    trackio_static_space_id: str | None | Literal[False] = arg(None, "Static Space for the Trackio dashboard.")


def which_tokens(asked: str | bool) -> str:
    """Which tokens are counted: 'no', 'all' or 'non_padding'; the arguments of older releases hold True or False."""
    return asked if isinstance(asked, str) else "all" if asked else "no"
