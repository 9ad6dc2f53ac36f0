"""How an evaluation gathers its outputs: by the accelerator's methods, which scripts may replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hftrainer.training.accelerator import EngineAccelerator
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

Gather = Callable[[Any], Any]
#: As the class has them; scripts may replace them, there or on the Trainer's accelerator.
_FOR_METRICS, _GATHER = EngineAccelerator.gather_for_metrics, EngineAccelerator.gather


def for_metrics(accelerator: Any, args: TrainingArguments) -> Gather:
    """The default `gather_function`: gathers rows from all processes, without fillers."""
    gather = accelerator.gather_for_metrics
    return functools.partial(gather, use_gather_object=True) if args.eval_use_gather_object else gather


def changes_nothing(trainer: Trainer) -> bool:
    """Whether `gather_function` returns the rows of a full batch as they are: in one process, unless it is replaced."""
    accelerator: Any = trainer.accelerator
    function: Any = trainer.gather_function
    return (
        getattr(function, "__func__", None) is _FOR_METRICS
        and function.__self__ is accelerator
        and getattr(accelerator.gather, "__func__", None) is _GATHER
        and not accelerator.processes.several
    )


def of_all(accelerator: Any, args: TrainingArguments) -> Gather:
    """Gathers all rows from all processes: an incomplete last batch counts as a full one in the mean loss."""
    if accelerator.processes.tp_size == 1 and not args.eval_use_gather_object:
        return accelerator.gather
    return functools.partial(accelerator.processes.gather, objects=args.eval_use_gather_object, distinct=True)


def padded(accelerator: Any, args: TrainingArguments, rows: Any) -> Any:
    """Rows padded to the longest of all processes; lists of samples are unchanged, as their lengths differ by rank."""
    if args.world_size > 1 and args.eval_use_gather_object:
        return rows
    return accelerator.pad_across_processes(rows, dim=1, pad_index=-100)
