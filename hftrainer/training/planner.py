"""The length of a run, and the position at which it starts."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.choices import IntervalStrategy
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import resume
from hftrainer.checkpointing.progress import RunProgress
from hftrainer.compat.messages import log_facts
from hftrainer.compat.overrides import has_length, positional_count
from hftrainer.data.accumulation import TrainingSchedule, plan_schedule, position_at_step, read_schedule
from hftrainer.errors import UnsupportedArgument
from hftrainer.releases.earlier import EarlierSchedule
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)


class Planner:
    """Plans a run from its arguments and its training loader."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.trainer, self.run = components.trainer, components.run

    def plan(self, args: TrainingArguments, dataloader: Any) -> TrainingSchedule:
        """The lengths of the run, by `set_initial_training_values` with the signature of any release."""
        trainer = self.trainer
        size = trainer.get_total_train_batch_size(args)
        count = positional_count(trainer.set_initial_training_values)
        takes_size = not self.components.policy.returns_steps_in_epoch if count is None else count > 2
        values = trainer.set_initial_training_values(args, dataloader, *([size] if takes_size else []))
        return read_schedule(values, args, total_train_batch_size=size)

    def lengths(self, args: TrainingArguments, dataloader: Any, size: int | None) -> TrainingSchedule | EarlierSchedule:
        """See `Trainer.set_initial_training_values`."""
        trainer, sized, policy = self.trainer, has_length(dataloader), self.components.policy
        schedule = plan_schedule(
            args,
            len(dataloader) * trainer.get_sp_size() if sized else None,
            trainer.num_examples(dataloader) if sized else None,
            trainer.get_total_train_batch_size(args) if size is None else size,
            self.components.engine.accumulation_at,
            policy.steps_of_epoch,
        )
        if policy.returns_steps_in_epoch:
            return schedule
        return EarlierSchedule.of(schedule, epoch_based=args.max_steps < 0, sized=sized)

    def _planned(self) -> tuple[TrainingSchedule, RunProgress | None]:
        """The schedule of the run, and the progress of the checkpoint that it resumes from.

        Raises:
            UnsupportedArgument: when a subclass has its own training loop.
        """
        if self.run.schedule is None:
            raise UnsupportedArgument(
                "_inner_training_loop: a copy of transformers' own loop cannot run, since Lightning's loop trains. "
                "Put code for before or after it around super()._inner_training_loop(...), and override "
                "training_step, get_batch_samples or _maybe_log_save_evaluate for the rest."
            )
        return self.run.schedule, self.run.progress

    def init_state(self, max_steps: int, epochs: int, folder: str | None, trial: Any) -> tuple[int, int]:
        """Make a new state, or load the checkpoint's. Returns epochs done, and micro-batches done in the next."""
        trainer, (schedule, progress) = self.trainer, self._planned()
        trainer.state = TrainerState(stateful_callbacks=self.components.stateful_callbacks())
        trainer.state.is_hyper_param_search = trial is not None
        trainer.state.train_batch_size = self.run.train_batch_size
        trainer.state.compute_steps(trainer.args, max_steps)
        first_epoch = position = 0
        if folder is not None:
            trainer.state = resume.load_state(folder, trainer.args)
            trainer._load_callback_state()
            known = None if progress is None else progress.resume_position(schedule.steps_in_epoch)
            first_epoch, position = known or position_at_step(
                trainer.state.global_step, schedule.steps_in_epoch, self.components.engine.accumulation_at
            )
            position = 0 if trainer.args.ignore_data_skip else position
        if trainer.args.auto_find_batch_size:
            trainer.state.train_batch_size = self.run.train_batch_size
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        return first_epoch, position

    def steps_between_logs(self, schedule: TrainingSchedule) -> int:
        """Optimizer steps between two logs of Lightning's callbacks: the same as the Trainer's."""
        trainer = self.trainer
        if trainer.args.logging_strategy == IntervalStrategy.EPOCH:
            return schedule.num_update_steps_per_epoch
        if trainer.args.logging_strategy == IntervalStrategy.NO:
            return sys.maxsize
        return max(1, int(trainer.state.logging_steps))

    def log(self, schedule: TrainingSchedule, position: tuple[int, int] | None) -> None:
        """Log the sizes of the run, and where it resumes; warn of batches that XLA would compile by themselves.

        Args:
            schedule: the lengths of the run.
            position: epochs done and micro-batches done in the next, of a run that resumes from a checkpoint.
        """
        self._log_sizes(schedule)
        if position is not None:
            self._log_position(*position)
        self._warn_of_ragged_batches(schedule)

    def _log_sizes(self, schedule: TrainingSchedule) -> None:
        """Log the sizes of the run."""
        sizes = {
            "Number of examples": schedule.num_examples,
            "Epochs": schedule.num_train_epochs,
            "Optimizer steps per epoch": schedule.num_update_steps_per_epoch,
            "Batch size of a device": self.run.train_batch_size,
            "Batch size of an optimizer step, over all devices": schedule.total_train_batch_size,
            "Gradient accumulation steps": self.components.engine.accumulation_at(0),
            "Optimizer steps": schedule.max_steps,
            "Trainable parameters": self.trainer.get_num_trainable_parameters(),
        }
        log_facts(logger, "Running training begins.", sizes)

    def _log_position(self, epochs: int, micro_batches: int) -> None:
        """Log where a resumed run continues.

        Args:
            epochs: epochs done.
            micro_batches: micro-batches of the next epoch done.
        """
        position = {"Optimizer steps done": self.trainer.state.global_step, "Epochs done": epochs}
        if not self.trainer.args.ignore_data_skip:
            position["Batches of the next epoch that are skipped"] = micro_batches
        log_facts(logger, f"Training resumes from {self.run.resumed_from}.", position)

    def _warn_of_ragged_batches(self, schedule: TrainingSchedule) -> None:
        """Warn on XLA devices, where each batch shape is compiled separately, in minutes for a large model."""
        trainer = self.trainer
        if trainer.args.device.type != "xla" or trainer.args.dataloader_drop_last:
            return
        batch = self.run.train_batch_size * trainer.accelerator.processes.data_processes
        if has_length(trainer.train_dataset) and schedule.num_examples % batch:
            logger.warning(
                "%d samples leave a last batch that is smaller than %d: XLA compiles the step for it too. "
                "dataloader_drop_last=True drops that batch.",
                schedule.num_examples,
                batch,
            )
