"""How long a run is, and where it starts."""

from __future__ import annotations

import logging
import sys
from typing import Any

from hftrainer.arguments.choices import IntervalStrategy
from hftrainer.base.messages import count_of, log_facts, tell
from hftrainer.base.part import Part
from hftrainer.base.signatures import max_positional_arguments
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import resume
from hftrainer.compat.libraries import has_length
from hftrainer.errors import UnsupportedArgument
from hftrainer.releases.earlier import EarlierLengths
from hftrainer.reporting import summary
from hftrainer.training.run_lengths import RunLengths, compute_lengths, position_at_step, read_lengths
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class RunPlanner(Part):
    """Decides how many steps and epochs a run has, and the epoch and micro-batch at which it starts.

    It chooses no checkpoint (`CheckpointRestorer` does), and reads of it only the state, not weights or optimizers.
    """

    def plan_lengths(self, args: TrainingArguments, dataloader: Any) -> RunLengths:
        """Compute the lengths of the run with `set_initial_training_values`, whose signature depends on the release."""
        size = self.trainer.get_total_train_batch_size(args)
        argument_count = max_positional_arguments(self.trainer.set_initial_training_values)
        needs_size = not self.parts.policy.returns_steps_in_epoch if argument_count is None else argument_count > 2
        initial_values = self.trainer.set_initial_training_values(args, dataloader, *([size] if needs_size else []))
        return read_lengths(initial_values, args, total_train_batch_size=size)

    def initial_values(self, args: TrainingArguments, loader: Any, size: int | None) -> RunLengths | EarlierLengths:
        """The lengths of a run, from the arguments and the loader; in the form of the followed release."""
        is_sized = has_length(loader)
        # Batches differ in size, so use the mean.
        if is_sized and args.tokens_per_batch is not None and len(loader):
            examples = self.trainer.num_examples(loader) / len(loader)
            size = max(1, round(examples * self.parts.engine.accumulation_steps_of(0)))
        lengths = compute_lengths(
            args,
            len(loader) * self.trainer.get_sp_size() if is_sized else None,
            self.trainer.num_examples(loader) if is_sized else None,
            self.trainer.get_total_train_batch_size(args) if size is None else size,
            self.parts.engine.accumulation_steps_of,
            self.parts.policy.steps_of_epoch,
        )
        if self.parts.policy.returns_steps_in_epoch:
            return lengths
        return EarlierLengths.from_lengths(lengths, epoch_based=args.max_steps < 0, has_length=is_sized)

    def init_state(self, max_steps: int, epochs: int, resume_folder: str | None, trial: Any) -> tuple[int, int]:
        """Make a new state, or load the state in the checkpoint.

        Returns:
            The finished epochs, and the finished micro-batches of the next epoch.

        Raises:
            UnsupportedArgument: when a subclass has its own training loop.
        """
        trainer = self.trainer
        attempt, progress = self.run.attempt, self.run.resumed_progress
        if not hasattr(attempt, "lengths"):
            raise UnsupportedArgument(
                "_inner_training_loop: a copy of transformers' own loop cannot run, since Lightning's loop trains. "
                "To run code before or after it, call super()._inner_training_loop(...); for the rest, override "
                "training_step, get_batch_samples or _maybe_log_save_evaluate."
            )
        trainer.state = TrainerState(stateful_callbacks=self.parts.stateful_callbacks())
        trainer.state.is_hyper_param_search = trial is not None
        trainer.state.train_batch_size = self.run.train_batch_size
        trainer.state.compute_steps(trainer.args, max_steps)
        first_epoch = finished_micro_batches = 0
        if resume_folder is not None:
            trainer.state = resume.load_state(resume_folder, trainer.args, max_steps)
            trainer._load_callback_state()
            position = None if progress is None else progress.resume_position(attempt.lengths.micro_batches_in_epoch)
            first_epoch, finished_micro_batches = position or position_at_step(
                trainer.state.global_step,
                attempt.lengths.micro_batches_in_epoch,
                self.parts.engine.accumulation_steps_of,
                () if self.run.skipped_samples is None else self.run.skipped_samples.windows,
            )
            finished_micro_batches = 0 if trainer.args.ignore_data_skip else finished_micro_batches
        if trainer.args.auto_find_batch_size:
            trainer.state.train_batch_size = self.run.train_batch_size
        trainer.state.init_training_references(trainer, max_steps, epochs, trial)
        return first_epoch, finished_micro_batches

    def steps_between_logs(self, lengths: RunLengths) -> int:
        """Optimizer steps between two logs of Lightning's callbacks: the same as the Trainer's."""
        strategy = self.trainer.args.logging_strategy
        if strategy == IntervalStrategy.EPOCH:
            return lengths.num_update_steps_per_epoch
        return sys.maxsize if strategy == IntervalStrategy.NO else max(1, int(self.trainer.state.logging_steps))

    def log_start(self) -> None:
        """Log the sizes and the start of the run, and warn about batches that XLA compiles separately."""
        lengths, resume_folder = self.run.attempt.lengths, self.run.resume_folder
        args, tokens, steps = self.trainer.args, self.trainer.args.tokens_per_batch, lengths.max_steps
        size_label = "Batch size of a device" if tokens is None else "Most tokens in a batch of a device"
        sizes = {
            "Number of examples": lengths.num_examples,
            "Epochs": lengths.num_train_epochs,
            "Optimizer steps per epoch": lengths.num_update_steps_per_epoch,
            size_label: tokens or self.run.train_batch_size,
            "Batch size of an optimizer step, over all devices": lengths.total_train_batch_size,
            "Gradient accumulation steps": self.parts.engine.accumulation_steps_of(0),
            "Optimizer steps": steps,
            "Trainable parameters": self.trainer.get_num_trainable_parameters(),
        }
        # Scripts search for the words "Running training" of transformers.
        log_facts(logger, "Running training begins.", sizes)
        if args.num_train_epochs < 0 and args.max_steps <= 0:
            logger.warning("num_train_epochs=%s trains no step: use more than 0.", args.num_train_epochs)
        if resume_folder is not None:
            self._log_resume()
        # In a search, each trial would repeat it.
        if self.trainer.is_world_process_zero() and self.trainer.state.global_step < steps and self.run.trial is None:
            if args.fp16 and args.device.type == "cpu":
                logger.warning("fp16=True on a CPU computes in float16; transformers trains in float32 there.")
            if resume_folder is None:
                resume.warn_about_earlier_run(args)
            # Without any, the first batch raises an error, unless a callback unfreezes some until then.
            if parameters := sizes["Trainable parameters"]:
                self._tell_start(lengths, parameters)
        # XLA compiles the step for each shape of a batch, which takes minutes for a large model.
        if args.device.type == "xla" and not args.dataloader_drop_last:
            self._warn_about_ragged_batches(lengths)

    def _log_resume(self) -> None:
        args, attempt = self.trainer.args, self.run.attempt
        facts = {"Optimizer steps done": self.trainer.state.global_step, "Epochs done": attempt.first_epoch}
        if not args.ignore_data_skip:
            facts["Batches of the next epoch that are skipped"] = attempt.finished_micro_batches
        log_facts(logger, f"Training resumes from {self.run.resume_folder}.", facts)
        if self.trainer.is_world_process_zero():
            num_train_epochs = args.num_train_epochs if args.max_steps <= 0 else 0
            tell(summary.make_resume_message(str(self.run.resume_folder), self.trainer.state, num_train_epochs))

    def _tell_start(self, lengths: RunLengths, parameters: int) -> None:
        args, tokens, size = self.trainer.args, self.trainer.args.tokens_per_batch, lengths.total_train_batch_size
        batch = count_of(size, "samples") if tokens is None else f"{count_of(tokens, 'tokens')} per device"
        done, total = self.trainer.state.global_step, lengths.max_steps
        steps = f"steps {done + 1:,} to {total:,}, each" if done else count_of(total, "steps")
        model = count_of(parameters, "parameters")
        tell(f"Training {model} on {args.world_size} x {args.device.type}: {steps} of {batch}.")

    def _warn_about_ragged_batches(self, lengths: RunLengths) -> None:
        batch = self.run.train_batch_size * self.trainer.accelerator.processes.data_world_size
        if has_length(self.trainer.train_dataset) and lengths.num_examples % batch:
            text = "%d samples leave a last batch that is smaller than %d: XLA compiles the step for it too. "
            text += "dataloader_drop_last=True drops that batch."
            logger.warning(text, lengths.num_examples, batch)
