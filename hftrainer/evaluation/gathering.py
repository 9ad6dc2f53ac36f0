"""How an evaluation gathers what it keeps: by the accelerator's methods, which scripts replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hftrainer.training_args import TrainingArguments

Gather = Callable[[Any], Any]


def for_metrics(accelerator: Any, args: TrainingArguments) -> Gather:
    """Rows of all processes, without those that stand for no sample: what `gather_function` is by default."""
    gather = accelerator.gather_for_metrics
    return functools.partial(gather, use_gather_object=True) if args.eval_use_gather_object else gather


def of_all(accelerator: Any, args: TrainingArguments) -> Gather:
    """Rows of all processes: a last batch that is not full counts as a full one in the mean of the losses."""
    if accelerator.processes.tp_size == 1 and not args.eval_use_gather_object:
        return accelerator.gather
    return functools.partial(accelerator.processes.gather, objects=args.eval_use_gather_object, distinct=True)


def padded(accelerator: Any, args: TrainingArguments, rows: Any) -> Any:
    """Rows as long as the longest of all processes; lists of samples stay, for each process has its own number."""
    if args.world_size > 1 and args.eval_use_gather_object:
        return rows
    return accelerator.pad_across_processes(rows, dim=1, pad_index=-100)
