"""`MicroBatches`: the micro-batches of a run, which of them is trained on, and how far its optimizer step is."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hftrainer.base.part import Part
from hftrainer.base.signatures import call_with_accepted
from hftrainer.data.epoch_reader import EpochReader, EpochStart

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.training.stopping import FlagSync


class StepPhase(enum.IntEnum):
    """How far the current optimizer step is."""

    #: No data is read, and no random number drawn, for the next step.
    NOT_BEGUN = 0
    #: Micro-batches are read.
    BEGUN = 1
    #: The optimizer steps, so that weights may have changed.
    STEPPING = 2
    #: The optimizer has stepped, but `global_step` does not count the step yet.
    UNCOUNTED = 3

    @property
    def has_begun(self) -> bool:
        """Whether data is read, or random numbers drawn, for a step that is not counted."""
        return self != StepPhase.NOT_BEGUN

    @property
    def may_have_changed_weights(self) -> bool:
        """Whether the optimizer steps or has stepped, but the step is not counted."""
        return self >= StepPhase.STEPPING


@dataclass(slots=True)
class MicroBatchPosition:
    """The position of a micro-batch in its epoch and in its window, the micro-batches of one optimizer step.

    Attributes:
        index: index of the micro-batch in the epoch; -1 before the first.
        window_start: index of the window's first micro-batch.
        window_size: micro-batches in the window; the last of an epoch may have fewer. 0 before the first.
        num_items: items over which the loss of the window is averaged; None when not needed.
        is_first: whether a step begins with this micro-batch.
        is_last: whether the optimizer steps after this micro-batch.

    While the accumulation is constant, `is_first` and `is_last` are the ends of the window.
    """

    index: int = -1
    window_start: int = 0
    window_size: int = 0
    num_items: torch.Tensor | int | None = None
    is_first: bool = False
    is_last: bool = True

    @property
    def is_before_first(self) -> bool:
        """Whether no micro-batch of the epoch has been read."""
        return self.index < 0


class Window(NamedTuple):
    """The micro-batches of an optimizer step.

    Attributes:
        epoch: the epoch, counted from 0.
        start: index of the first micro-batch in the epoch.
        size: number of micro-batches.
    """

    epoch: int
    start: int
    size: int


class MicroBatches(Part):
    """An iterable over an epoch's micro-batches, which sets `position` for each.

    It yields no position with the batch: callbacks that iterate over Lightning's `train_dataloader`, which is this
    object, expect batches alone. Lightning's hooks before `run_micro_batch`, and checkpoints after it, need it too.

    All micro-batches of a window are fetched before the first is used, as in `transformers.Trainer`: the number of
    items in a window must be known before its first loss. Lightning takes a micro-batch when it trains on it, and not
    before, since there is a length.

    Args:
        parts: the parts of the Trainer.
        flag_sync: knows when a control flag ends the epoch.
        loader: the loader of the training data.

    Attributes:
        epoch: the current epoch, counted from 0.
        position: the position of the micro-batch that is trained on, or of a skipped one.
        step_phase: how far the current optimizer step is.
    """

    def __init__(self, parts: TrainerParts, flag_sync: FlagSync, loader: Any) -> None:
        super().__init__(parts)
        self.attempt = attempt = self.run.attempt
        self.epoch = attempt.first_epoch
        self.position = MicroBatchPosition()
        self.step_phase = StepPhase.NOT_BEGUN
        #: Index of the first micro-batch of the next iteration.
        self._first_index = attempt.finished_micro_batches
        self.reader = EpochReader(loader)
        self._flag_sync = flag_sync
        self._data_state = None if self.run.resumed_progress is None else self.run.resumed_progress.data
        self._has_restored_rng = False

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch, before its first micro-batch is read."""
        self.epoch = epoch
        self.position = MicroBatchPosition()

    def __len__(self) -> int:
        """Micro-batches in an epoch. For data without a length, as many as `max_steps` needs."""
        return self.attempt.lengths.micro_batches_in_epoch

    def __iter__(self) -> Iterator[Any]:
        # Do nothing before the first micro-batch is requested: Lightning calls iter() before the epoch begins.
        for start, micro_batches, num_items in self._read_windows():
            for index, micro_batch in enumerate(micro_batches, start):
                # As in transformers, a callback that changes the accumulation moves the end of a step at once, though
                # the window was read with the value before: a step may have no `is_first`, and `num_items` of more.
                size = self._accumulation_steps()
                self.position = MicroBatchPosition(
                    index=index,
                    window_start=start,
                    window_size=len(micro_batches),
                    num_items=num_items,
                    is_first=index % size == 0,
                    is_last=(index + 1) % size == 0 or index + 1 == len(self),
                )
                yield micro_batch
                if self._flag_sync.ends_epoch:
                    return

    def _read_windows(self) -> Iterator[tuple[int, list[Any], Any]]:
        """Yields the windows that the run does not skip: index of the first micro-batch, micro-batches, and items."""
        start = index = self._first_index
        self._first_index = 0
        skipped_samples = self.run.skipped_samples
        iterator = self._open_epoch()
        for num_batches in self._window_sizes(start):
            micro_batches, num_items = self._get_window(iterator, num_batches)
            if index == start:
                self._restore_rng_after_reading()
            if not micro_batches:
                return
            next_index = index + len(micro_batches)
            if skipped_samples is not None and (self.epoch, index) in skipped_samples.windows:
                # It is of a step that diverged, and belongs to none now.
                self.step_phase = StepPhase.NOT_BEGUN
                self.position = MicroBatchPosition(next_index - 1, index, len(micro_batches), num_items)
            else:
                yield index, micro_batches, num_items
            index = next_index

    def _window_sizes(self, start: int) -> Iterator[int]:
        """Yields the number of micro-batches to read for each window, from micro-batch `start` to the epoch's end."""
        total = len(self)
        size = self._accumulation_steps()
        # The epoch keeps its planned number of windows if a callback changes the accumulation.
        last_window = math.ceil(total / self.parts.engine.accumulation_steps_of(self.epoch)) - 1
        for window in range(start // size, last_window + 1):
            yield (total % size or size) if window == last_window else self._accumulation_steps()

    # Lightning resumes within an epoch only if the loader has these two methods.

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch, in micro-batches."""
        return {"position": self.position.index + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at the micro-batch of `state`."""
        self._first_index = state["position"]

    def _accumulation_steps(self) -> int:
        """A callback's value, or else the argument's current value."""
        argument = self.trainer.args.gradient_accumulation_steps
        self.parts.model_setup.check_accumulation(argument)
        return self.parts.engine.accumulation_steps_of(self.epoch, argument)

    def _get_window(self, iterator: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
        """The micro-batches of the next window, and the number of items in them, from `Trainer.get_batch_samples`."""
        # The step has begun already if the end of a stream left it without all of its micro-batches.
        phase_before_reading = self.step_phase
        self.step_phase = StepPhase.BEGUN
        get_samples = self.trainer.get_batch_samples
        device = self.run.attempt.loss_since_log.device
        micro_batches, num_items = call_with_accepted(get_samples, iterator, num_batches, device=device)
        self.run.current_gradient_accumulation_steps = len(micro_batches)
        if not micro_batches:
            # A stream without a length has ended.
            self.step_phase = phase_before_reading
        return micro_batches, num_items

    # ---- Resume ------------------------------------------------------------------------------------------------

    @property
    def resumes_epoch(self) -> bool:
        """Whether the current epoch is the one in which the run resumes."""
        return self.run.resume_folder is not None and self.epoch == self.attempt.first_epoch

    def _open_epoch(self) -> Iterator[Any]:
        """The batches of the epoch; in the one in which the run resumes, the remaining ones."""
        if not self.resumes_epoch:
            return self.reader.open_epoch(self.epoch)
        point = EpochStart(self.attempt.finished_micro_batches, self._restore_rng_while_reading, self._data_state)
        return self.reader.open_epoch(self.epoch, point)

    def _restore_rng_after_reading(self) -> None:
        """After the first window, restore the random states of a checkpoint without reading state."""
        if self.resumes_epoch and self.attempt.finished_micro_batches and self._data_state is None:
            self._restore_rng_states()

    def _restore_rng_while_reading(self) -> None:
        """Restore the random states where the remaining batches begin, unless `restore_rng_before_reading` has."""
        if not self._has_restored_rng:
            self._restore_rng_states()

    def restore_rng_before_reading(self) -> None:
        """Restore the random states of the checkpoint before any data is read."""
        self._restore_rng_states()
        self._has_restored_rng = True

    def _restore_rng_states(self) -> None:
        self.trainer._load_rng_state(self.run.resume_folder)
        if self._data_state is not None:
            self.reader.restore_generators(self._data_state)
