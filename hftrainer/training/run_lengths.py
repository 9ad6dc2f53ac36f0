"""The lengths of a run, and where in the data an optimizer step begins."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hftrainer.errors import InvalidArgument
from hftrainer.releases.earlier import EarlierLengths
from hftrainer.training_args import TrainingArguments


class RunLengths(NamedTuple):
    """The lengths of a run, in the order in which `set_initial_training_values` of v5 returns them.

    Attributes:
        num_train_epochs: epochs that the run begins; `sys.maxsize` if only `max_steps` ends it.
        num_update_steps_per_epoch: optimizer steps in an epoch; in the first epoch if epochs differ.
        num_examples: samples in an epoch.
        num_train_samples: samples in the run.
        total_train_batch_size: samples per optimizer step over all processes.
        micro_batches_in_epoch: micro-batches in an epoch of this process.
        max_steps: optimizer steps in the run.
    """

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: float
    total_train_batch_size: int
    micro_batches_in_epoch: int
    max_steps: int


def read_lengths(values: Any, args: TrainingArguments, *, total_train_batch_size: int) -> RunLengths:
    """The lengths that a subclass's `set_initial_training_values` returned, in any release's order.

    Args:
        values: seven values; up to v5.2, the fifth is a bool.
        args: the training arguments.
        total_train_batch_size: samples per optimizer step over all processes.

    Raises:
        InvalidArgument: if the number of values is not seven.
    """
    values = tuple(values)
    if len(values) != len(RunLengths._fields):
        raise InvalidArgument(
            f"set_initial_training_values returned {len(values)} values: it must return "
            f"{', '.join(RunLengths._fields)}."
        )
    if not isinstance(values[4], bool):
        return RunLengths(*values)
    lengths = EarlierLengths(*values)
    micro_batches_in_epoch = lengths.len_dataloader
    if micro_batches_in_epoch is None:
        micro_batches_in_epoch = lengths.max_steps * args.gradient_accumulation_steps
    return RunLengths(*lengths[:4], total_train_batch_size, micro_batches_in_epoch, lengths.max_steps)


#: Epoch → micro-batches per optimizer step in this epoch.
Accumulation = Callable[[int], int]


def position_at_step(
    global_step: int, micro_batches: int, accumulation_steps_of: Accumulation, skips: Iterable[tuple[int, int]] = ()
) -> tuple[int, int]:
    """Finished epochs, and finished micro-batches of the next epoch, after a number of optimizer steps.

    Args:
        global_step: number of optimizer steps.
        micro_batches: length of an epoch.
        accumulation_steps_of: epoch → micro-batches per optimizer step in it.
        skips: epoch and first micro-batch of each window that was skipped, so that it is not a step.
    """
    epoch = 0
    starts = sorted(skips)
    while global_step >= (
        steps := math.ceil(micro_batches / accumulation_steps_of(epoch)) - sum(first == epoch for first, _ in starts)
    ):
        global_step -= steps
        epoch += 1
    finished_micro_batches = global_step * accumulation_steps_of(epoch)
    for skipped_epoch, start in starts:
        if skipped_epoch == epoch and start <= finished_micro_batches:
            finished_micro_batches += accumulation_steps_of(epoch)
    return epoch, finished_micro_batches


def compute_lengths(
    args: TrainingArguments,
    micro_batches: int | None,
    num_examples: int | None,
    total_batch_size: int,
    accumulation_steps_of: Accumulation,
    steps_of_epoch: Callable[[int, int], int],
) -> RunLengths:
    """The lengths of a run, from the arguments and sizes alone.

    Args:
        args: the training arguments.
        micro_batches: length of the loader; None if it has no length.
        num_examples: samples in the loader, if it has a length.
        total_batch_size: samples per optimizer step, over all processes.
        accumulation_steps_of: epoch → micro-batches per optimizer step in it.
        steps_of_epoch: (micro-batches per epoch, micro-batches per optimizer step) → optimizer steps per epoch.

    Raises:
        InvalidArgument: if the arguments do not determine the length of training, or if the data is empty.
    """
    if micro_batches == 0:
        raise InvalidArgument(
            "The training data has no batches: the dataset is empty, or it is smaller than one batch and "
            "dataloader_drop_last is set."
        )
    if micro_batches is None:
        if args.max_steps <= 0:
            raise InvalidArgument(
                "max_steps must be set: the training data has no length, so the number of optimizer steps cannot be "
                "computed from num_train_epochs."
            )
        samples = args.max_steps * total_batch_size
        planned = args.max_steps * accumulation_steps_of(0)
        return RunLengths(sys.maxsize, args.max_steps, samples, samples, total_batch_size, planned, args.max_steps)
    assert num_examples is not None

    def count_steps(epoch: int) -> int:
        return steps_of_epoch(micro_batches, accumulation_steps_of(epoch))

    if args.max_steps > 0:
        epochs = 0
        remaining_steps = args.max_steps
        steps = args.max_steps
        while remaining_steps > 0:
            remaining_steps -= count_steps(epochs)
            epochs += 1
        samples = steps * total_batch_size
    else:
        epochs = math.ceil(args.num_train_epochs)
        full_epochs = int(args.num_train_epochs)
        last_steps = (args.num_train_epochs - full_epochs) * count_steps(full_epochs)
        # With max_steps=0, training stops after the first step, as in transformers.
        steps = 0 if args.max_steps == 0 else math.ceil(sum(map(count_steps, range(full_epochs))) + last_steps)
        samples = num_examples * args.num_train_epochs  # type: ignore[assignment]
    return RunLengths(epochs, count_steps(0), num_examples, samples, total_batch_size, micro_batches, steps)
