"""A Trainer's private parts, behind the one attribute `Trainer._hftrainer`.

Subclasses define their own attributes and methods. A name that no release of transformers has is therefore never looked
up on the Trainer: it is here, or in one of the rooms that are attributes of this object.
"""

from __future__ import annotations

from typing import Any

from hftrainer.assembly.construction import TrainerSetup
from hftrainer.evaluation.runner import EvaluationRunner
from hftrainer.plugins import adapter
from hftrainer.reporting.memory import TrainerMemoryTracker
from hftrainer.reporting.tracker_callbacks import TrackerCallback, reporting_callbacks
from hftrainer.training.context import TrainerContext
from hftrainer.training.loader_factory import LoaderFactory
from hftrainer.training.log_save_evaluate import LogSaveEvaluate
from hftrainer.training.model_setup import ModelSetup
from hftrainer.training.optimizers import OptimizerFactory
from hftrainer.training.preparation import Preparation
from hftrainer.training.publisher import Publisher
from hftrainer.training.runner import TrainingRunner
from hftrainer.training.saver import CheckpointSaver
from hftrainer.training.settings import Settings
from hftrainer.training.steps import TrainingSteps
from hftrainer.training.trainer_api import TrainerApi

#: Attributes that belong to a process: another process makes its own.
_OF_THE_PROCESS = ("resolved", "engine", "checkpoint_writer", "strategy", "uploads", "hp_study")

#: Attributes of the Trainer itself that belong to a process.
_OF_THE_TRAINERS_PROCESS = ("accelerator", "gather_function", "_memory_tracker", "deepspeed", "push_in_progress")


class Internals(TrainerContext):
    """The rooms of a Trainer, and what they share.

    Args:
        trainer: the Trainer.
        optimizers: the optimizer and the scheduler that the script has passed, either None.

    Attributes:
        settings: applies the arguments, and changes of them.
        model_setup: sets up the model.
        setup: builds the parts that follow from the arguments.
        loaders: makes data loaders.
        optimizers: makes optimizer and schedule.
        steps: prepares micro-batches and computes their losses.
        saver: writes checkpoints and restores from them.
        runner: runs `train()`.
        log_save_evaluate: logs, saves and evaluates when due.
        evaluation: runs a pass over an evaluation or test set.
        publisher: uploads to the Hub.
    """

    def __init__(self, trainer: TrainerApi, optimizers: tuple[Any, Any]) -> None:
        super().__init__(trainer, optimizers)
        self._log_folder: Any = None
        self.settings = Settings(self)
        self.model_setup = ModelSetup(self)
        self.loaders = LoaderFactory(self)
        self.preparation = Preparation(self, self.loaders)
        self.optimizers = OptimizerFactory(self)
        self.steps = TrainingSteps(self, self.loaders)
        self.saver = CheckpointSaver(self)
        self.log_save_evaluate = LogSaveEvaluate(self, self.saver)
        self.evaluation = EvaluationRunner(self)
        self.publisher = Publisher(self)
        self.runner = TrainingRunner(
            self,
            settings=self.settings,
            model_setup=self.model_setup,
            loaders=self.loaders,
            steps=self.steps,
            saver=self.saver,
        )
        self.setup = TrainerSetup(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(_OF_THE_PROCESS)}

    def state_of_trainer(self) -> dict[str, Any]:
        """The state for a copy of the Trainer, by `copy.deepcopy` or by pickling; `rebuild` makes the rest."""
        return {**vars(self.trainer), **dict.fromkeys(_OF_THE_TRAINERS_PROCESS), "_eval_dataloaders": {}}

    def rebuild(self) -> None:
        """Make a copied Trainer's own engine, accelerator, and uploads."""
        trainer = self.trainer
        trainer._memory_tracker = TrainerMemoryTracker(trainer.args.skip_memory_metrics)
        self.setup.resolve_arguments()
        trainer.create_accelerator_and_postprocess()
        if trainer.args.push_to_hub:
            trainer.accelerator.processes.from_main(trainer.init_hf_repo)

    def loggers(self) -> list[Any]:
        """The Lightning loggers that this process writes to; this opens their runs."""
        trainer = self.trainer
        if trainer.args.process_index:
            return []
        reporting = reporting_callbacks(trainer.callback_handler.callbacks)
        found = [(each, each.loggers(trainer.args, trainer.state, trainer.model)) for each in reporting]
        named = [one for each, loggers in found if isinstance(each, TrackerCallback) for one in loggers]
        return [*named, *(one for each, loggers in found if not isinstance(each, TrackerCallback) for one in loggers)]

    def log_folder(self) -> Any:
        """The folder where trackers write files; the same for all trackers of this Trainer."""
        if self._log_folder is None:
            self._log_folder = adapter().LogFolder(self.trainer.args)
        return self._log_folder
