"""Settings that follow from the arguments, and arguments that change after a Trainer was made."""

from __future__ import annotations

import logging

from hftrainer.arguments import accelerate_state, legacy
from hftrainer.arguments.changes import take_changes
from hftrainer.compat import peers
from hftrainer.compat.overrides import is_overridden, refuse_rewritten
from hftrainer.training.context import Room
from hftrainer.training_args import TrainingArguments


class Settings(Room):
    """Follows the arguments: when a Trainer is made, for each trial, and before each run."""

    def set_log_level(self) -> None:
        """Set the log level of the arguments; 'passive' changes nothing."""
        args = self.trainer.args
        if (args.log_level if args.should_log else args.log_level_replica) != "passive":
            level = args.get_process_log_level()
            followed = peers.set_verbosity(
                level
            )  # our logger then follows transformers' level, which a script may change
            logging.getLogger("hftrainer").setLevel(logging.NOTSET if followed else level)

    def follow_arguments(self) -> None:
        """Set everything that follows from the arguments, which a hyperparameter trial changes."""
        trainer = self.trainer
        self.run.accumulation = trainer.args.gradient_accumulation_steps
        self.run.train_batch_size = trainer.args.train_batch_size
        trainer.neftune_noise_alpha = trainer.args.neftune_noise_alpha
        trainer._eval_dataloaders = {}
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Set what follows from arguments that may change between two runs."""
        args, context = self.trainer.args, self.context
        context.past_index = legacy.value(args, "past_index")
        context.averages_tokens = args.average_tokens_across_devices and args.world_size > 1

    def take_changes_in(self, args: TrainingArguments) -> None:
        """Use the values of `args`, which may be another object than the Trainer's arguments."""
        own_loader = is_overridden(self.trainer, "get_train_dataloader")
        take_changes(self.context.engine, args, self.context.policy, own_loader=own_loader)

    def take_changes(self) -> None:
        """Apply to the next run the arguments that the script has changed since the Trainer was made."""
        trainer, context = self.trainer, self.context
        refuse_rewritten(trainer)
        if not context.policy.reads_batch_size_once:
            self.run.train_batch_size = trainer.args.train_batch_size
        self.take_changes_in(trainer.args)
        accelerate_state.follow(trainer.args, trainer.accelerator)  # another Trainer may have been made since
        self._follow_changes()
        if trainer.args.push_to_hub:  # it may have been set since
            trainer.accelerator.processes.from_main(lambda: trainer.init_hf_repo() if context.uploads is None else None)
