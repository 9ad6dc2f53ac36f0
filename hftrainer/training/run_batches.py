"""`RunBatches`: the micro-batches of a run, from the one that a resumed run reads first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hftrainer.compat import overrides
from hftrainer.data.accumulation import MicroBatchIterator
from hftrainer.data.epoch_reader import EpochReader, ResumePoint

if TYPE_CHECKING:
    from hftrainer.components.components import Components
    from hftrainer.training.events import TrainingEvents


class RunBatches(MicroBatchIterator):
    """Reads the micro-batches of a run, and restores the random states where a resumed run continues.

    Args:
        components: the parts of the Trainer.
        events: the events of the run.
        train_dataloader: the loader of the training data.
    """

    def __init__(self, components: Components, events: TrainingEvents, train_dataloader: Any) -> None:
        super().__init__(events.schedule, events.position)
        self.components, self.events = components, events
        self.trainer, self.run = components.trainer, components.run
        self.reader = EpochReader(train_dataloader)
        self._data_state = None if events.progress is None else events.progress.data
        self._has_restored_rng = False

    # ---- Accumulation ------------------------------------------------------------------------------------------

    def planned_accumulation_steps(self) -> int:
        """The value of Lightning's `GradientAccumulationScheduler` for the epoch, or else of the argument."""
        steps: int = self.components.engine.accumulation_steps_of(self.events.epoch)
        return steps

    def accumulation_steps(self) -> int:
        """A callback's value, or else the argument's current value."""
        argument = self.trainer.args.gradient_accumulation_steps
        self.components.model_setup.check_accumulation(argument)
        steps: int = self.components.engine.accumulation_steps_of(self.events.epoch, argument)
        return steps

    def get_window(self, iterator: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
        """What `Trainer.get_batch_samples` returns."""
        self.events.is_between_steps = False
        read, device = self.trainer.get_batch_samples, self.run.loss_since_log.device
        samples, num_items = overrides.call_with_accepted(read, iterator, num_batches, device=device)
        self.run.accumulation_steps = len(samples)
        return samples, num_items

    def should_skip(self, start: int) -> bool:
        """Whether `on_divergence` skips the window."""
        return self.events.divergence.should_skip(start)

    def is_interrupted(self) -> bool:
        """Whether a control flag that all ranks know ends the epoch or the training."""
        control = self.trainer.control
        return self.events.control_sync.can_stop and (control.should_epoch_stop or control.should_training_stop)

    # ---- Resume ------------------------------------------------------------------------------------------------

    @property
    def resumes_epoch(self) -> bool:
        """Whether the current epoch is the one in which the run resumes."""
        return self.events.resume_folder is not None and self.events.epoch == self.events.first_epoch

    def open_epoch(self) -> Iterator[Any]:
        """The batches of the epoch; in the one in which the run resumes, the remaining ones."""
        if not self.resumes_epoch:
            return self.reader.open_epoch(self.events.epoch)
        point = ResumePoint(self.events.position, self._restore_rng_once, self._data_state)
        return self.reader.open_epoch(self.events.epoch, point)

    def on_first_window(self) -> None:
        """Restore the random states of a checkpoint without reading state."""
        if self.resumes_epoch and self.events.position and self._data_state is None:
            self._restore_rng_states()

    def _restore_rng_once(self) -> None:
        if not self._has_restored_rng:
            self._restore_rng_states()

    def restore_rng_before_reading(self) -> None:
        """Restore the random states of the checkpoint before any data is read."""
        self._restore_rng_states()
        self._has_restored_rng = True

    def _restore_rng_states(self) -> None:
        self.trainer._load_rng_state(self.events.resume_folder)
        if self._data_state is not None:
            self.reader.restore_generators(self._data_state)
