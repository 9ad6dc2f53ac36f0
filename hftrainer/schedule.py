"""How long a training run is: in epochs, optimizer steps, micro-batches and samples."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

from hftrainer.errors import InvalidArgument
from hftrainer.training_args import TrainingArguments


class TrainingSchedule(NamedTuple):
    """The lengths of a run, in the order in which `set_initial_training_values` of v5 returns them.

    Attributes:
        num_train_epochs: passes over the data that the run begins; `sys.maxsize` when only steps end it.
        num_update_steps_per_epoch: optimizer steps in one pass, the first if they differ.
        num_examples: samples in one pass.
        num_train_samples: samples in the whole run.
        total_train_batch_size: samples per optimizer step over all processes.
        steps_in_epoch: micro-batches in one pass of this process.
        max_steps: optimizer steps in the whole run.
    """

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: float
    total_train_batch_size: int
    steps_in_epoch: int
    max_steps: int


#: Epoch → micro-batches per optimizer step in it.
Accumulation = Callable[[int], int]


def place_of(global_step: int, micro_batches: int, accumulation_at: Accumulation) -> tuple[int, int]:
    """Epochs, and micro-batches of the next one, that are done after a number of optimizer steps."""
    for epoch in itertools.count():
        accumulation = accumulation_at(epoch)
        steps = math.ceil(micro_batches / accumulation)
        if global_step < steps:
            return epoch, global_step * accumulation
        global_step -= steps
    raise AssertionError("unreachable")


def _epochs_for(steps: int, micro_batches: int, accumulation_at: Accumulation) -> int:
    """Epochs that a number of optimizer steps needs, the last possibly cut short."""
    epochs, position = place_of(steps, micro_batches, accumulation_at)
    return epochs + (position > 0)


def _steps_in(epochs: float, micro_batches: int, accumulation_at: Accumulation) -> int:
    """Optimizer steps in a number of epochs, the last possibly a part of one."""
    whole = int(epochs)
    steps = sum(math.ceil(micro_batches / accumulation_at(epoch)) for epoch in range(whole))
    return math.ceil(steps + (epochs - whole) * math.ceil(micro_batches / accumulation_at(whole)))


def plan_schedule(
    args: TrainingArguments,
    micro_batches: int | None,
    num_examples: int | None,
    batch_size: int,
    accumulation_at: Accumulation,
    processes: int,
) -> TrainingSchedule:
    """Work out the lengths of a run.

    Args:
        args: the training arguments.
        micro_batches: length of the loader, or None when it has none.
        num_examples: samples behind the loader, when it has a length.
        batch_size: samples in a micro-batch of one process.
        accumulation_at: epoch → micro-batches per optimizer step in it.
        processes: those with batches of their own.

    Raises:
        InvalidArgument: when nothing tells how long training is, or when there is no data.
    """
    accumulation = accumulation_at(0)
    total_batch_size = batch_size * accumulation * processes
    if micro_batches == 0:
        raise InvalidArgument(
            "The training data holds not one batch: the dataset is empty, or smaller than a batch and "
            "dataloader_drop_last is set."
        )
    if micro_batches is None:
        if args.max_steps <= 0:
            raise InvalidArgument(
                "max_steps must be set: the training data has no length, so the number of optimizer steps cannot be "
                "worked out from num_train_epochs."
            )
        samples = args.max_steps * total_batch_size
        micro = args.max_steps * accumulation
        return TrainingSchedule(sys.maxsize, args.max_steps, samples, samples, total_batch_size, micro, args.max_steps)
    assert num_examples is not None
    per_epoch = math.ceil(micro_batches / accumulation)
    if args.max_steps > 0:
        steps, epochs = args.max_steps, _epochs_for(args.max_steps, micro_batches, accumulation_at)
        samples = steps * total_batch_size
    else:
        epochs = math.ceil(args.num_train_epochs)
        steps = _steps_in(args.num_train_epochs, micro_batches, accumulation_at)
        if args.max_steps == 0:  # as in transformers: training stops after the step that finds it is enough
            steps = 0
        samples = num_examples * args.num_train_epochs  # type: ignore[assignment]
    return TrainingSchedule(epochs, per_epoch, num_examples, samples, total_batch_size, micro_batches, steps)
