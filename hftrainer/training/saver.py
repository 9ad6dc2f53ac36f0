"""What a Trainer writes into a checkpoint, and when it announces it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hftrainer.arguments.choices import SaveStrategy
from hftrainer.assembly.rooms import Room
from hftrainer.callbacks.state import drop_from_json, export_states
from hftrainer.checkpointing import names, resume
from hftrainer.checkpointing.progress import RunProgress, as_dict, load_progress, position_settings, save_progress
from hftrainer.checkpointing.states import MakeOptimizer
from hftrainer.compat import peers
from hftrainer.compat.overrides import call_with_accepted
from hftrainer.data.random_states import rng_state
from hftrainer.data.schedule import TrainingSchedule

logger = logging.getLogger(__name__)


class CheckpointSaver(Room):
    """Fills checkpoints, announces them, and reads back what `trainer_state.json` does not hold."""

    @contextlib.contextmanager
    def writing_together(self) -> Iterator[None]:
        """Write a checkpoint that all processes have gathered for, and release what they have gathered."""
        try:
            yield
        finally:
            self.own.states.finish(self.trainer.accelerator.processes)

    def write_parts(self, folder: str) -> None:
        """Write this process's part of a sharded model, if checkpoints hold parts, once the folder is there."""
        self.own.states.write_parts(folder, self.trainer.accelerator.processes)

    def states_of_others(self) -> dict[str, Any]:
        """File name → contents, of what the other processes have to say to a checkpoint."""
        trainer = self.trainer
        rank, size = trainer.args.process_index, trainer.args.world_size
        if size == 1:
            return {}
        if trainer.args.save_only_model:
            trainer.accelerator.processes.barrier()  # what overrides of the others have added is there
            return {}
        own = {names.rng_name(rank, size): rng_state()}
        if self.own.loop is not None:
            own[names.progress_name(rank, size)] = as_dict(self.own.loop.current_progress())
        of_all = trainer.accelerator.processes.gather_objects([own])
        return {name: state for other, states in enumerate(of_all) if other != rank for name, state in states.items()}

    def fill(self, of_others: Mapping[str, Any], folder: str) -> None:
        """Write everything that a run needs to go on into `folder`."""
        trainer, own = self.trainer, self.own
        self.write_parts(folder)
        with own.engine.saving(trainer.model) as (_, kept):
            call_with_accepted(trainer.save_model, folder, _internal_call=True)
        if not trainer.args.save_only_model:
            trainer._save_optimizer_and_scheduler(folder)
            trainer._save_scaler(folder)
            trainer._save_rng_state(folder)
            self.save_progress(folder)
            for name, state in of_others.items():
                torch.save(state, os.path.join(folder, name))
            if kept:
                own.checkpoint_writer.save(kept, os.path.join(folder, names.LIGHTNING_CALLBACKS_NAME))
        elif own.states.spread and peers.is_peft(own.run.bare_model):  # which can load no adapters
            self.save_files(None, folder)
        trainer.state.stateful_callbacks = export_states(own.setup.stateful_callbacks())
        self.write_state(folder)

    def write_state(self, folder: str) -> None:
        """Write `trainer_state.json`, with the fields that the followed release knows."""
        path = os.path.join(folder, names.TRAINER_STATE_NAME)
        self.trainer.state.save_to_json(path)
        if not self.own.behaviours.keeps_best_step:  # which such a release could not read
            drop_from_json(path, "best_global_step")

    def load_best_at_end(self) -> None:
        """Load the best model if that is asked for, there is one, and its checkpoint is whole."""
        trainer = self.trainer
        best = trainer.state.best_model_checkpoint
        if not trainer.args.load_best_model_at_end or best is None:
            return
        reason = trainer.accelerator.processes.from_main(lambda: resume.why_not_loaded(best))
        if reason is None:
            trainer._load_best_model()
        else:
            logger.error("The best model cannot be loaded, and the last one is kept: %s.", reason)

    def wait(self) -> None:
        """Wait for a checkpoint in the background; all processes know then alike whether it is there."""
        trainer = self.trainer
        writer, from_main = self.own.checkpoint_writer, trainer.accelerator.processes.from_main
        if not writer.in_background:
            return
        from_main(writer.wait)
        best = trainer.state.best_model_checkpoint
        writer.failed, trainer.state.best_model_checkpoint = from_main(lambda: (writer.failed, best))

    def save_if_needed(self, trial: Any) -> None:
        """Write a checkpoint of this step unless there is one, and wait until it is on the disk."""
        trainer, own = self.trainer, self.own
        self.wait()
        if own.last_saved_step != trainer.state.global_step or own.checkpoint_writer.failed:
            trainer._save_checkpoint(trainer.model_wrapped, trial)
            own.last_saved_step = trainer.state.global_step
            self.announce()
        self.wait()

    def saves_on_interrupt(self) -> bool:
        """Whether a signal or an error saves a checkpoint before the run ends."""
        trainer = self.trainer
        asked = getattr(trainer.args, "save_on_interrupt", True) or trainer.args.enable_jit_checkpoint
        return asked and (trainer.args.save_strategy != SaveStrategy.NO or trainer.args.enable_jit_checkpoint)

    def announce(self) -> None:
        """Announce the checkpoint once it is there, with the state that it holds."""
        trainer = self.trainer
        state = dataclasses.replace(trainer.state) if self.own.checkpoint_writer.in_background else trainer.state

        def announce() -> None:
            due = trainer.control.should_save  # the next one, if this one was written in the background
            trainer.control = trainer.callback_handler.on_save(trainer.args, state, trainer.control)
            trainer.control.should_save |= due

        trainer.control.should_save = False
        self.own.checkpoint_writer.when_done(announce)

    def save_files(self, optimizer: MakeOptimizer | None, output_dir: str) -> None:
        """Write the optimizer's state, unless it is None, and what else one process writes of the states."""
        for name, state in self.own.states.files(optimizer):
            self.own.checkpoint_writer.save(state, os.path.join(output_dir, name))

    def save_progress(self, output_dir: str) -> None:
        """Write what `trainer_state.json` does not tell of how far training is."""
        own = self.own
        if own.loop is not None and own.loop.between_steps:  # else the place follows from the steps alone
            name = names.progress_name(self.trainer.args.process_index, self.trainer.args.world_size)
            save_progress(own.loop.current_progress(), os.path.join(output_dir, name))

    def load_weights(self, model: nn.Module, folder: str) -> None:
        """Load the weights of a checkpoint into the model, sharded or not."""
        self._warn_of(self.own.states.load_weights(model, folder, only_trained=self._has_adapters()))

    def load_best(self, model: nn.Module, folder: str) -> None:
        """Load the weights of the best checkpoint at the end of a run."""
        self._warn_of(self.own.states.load_best(model, folder, only_trained=self._has_adapters()))

    def _has_adapters(self) -> bool:
        return peers.is_peft(self.own.run.bare_model)

    def _warn_of(self, misfits: Any) -> None:
        if misfits is not None:
            self.trainer._issue_warnings_after_load(misfits)

    def load_progress(self, folder: str | None, schedule: TrainingSchedule) -> RunProgress | None:
        """What a checkpoint of ours tells besides the state; changed arguments are warned about."""
        trainer = self.trainer
        if folder is None:
            return None
        progress = load_progress(folder, trainer.args.process_index, trainer.args.world_size)
        if progress is not None:
            processes = trainer.accelerator.processes.data_processes
            config = self.own.resolved.accelerator_config
            now = position_settings(trainer.args, schedule, trainer._train_batch_size, processes, config)
            progress.adapt(now, skips_data=not trainer.args.ignore_data_skip)
        return progress
