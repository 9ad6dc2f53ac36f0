"""What a Trainer keeps for itself, behind the one attribute `Trainer._hftrainer`.

Subclasses set attributes and define methods for purposes of their own. A name that no release of transformers has is
therefore never looked up on the Trainer: it is here, or in one of the rooms that are reached from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.assembly.construction import TrainerSetup
from hftrainer.checkpointing.states import ModelStates
from hftrainer.compat.overrides import is_overridden
from hftrainer.engine import adapter
from hftrainer.evaluation.runner import EvaluationRunner
from hftrainer.reporting.tracker_callbacks import ReportingCallback, TrackerCallback
from hftrainer.training.interruption import Interruption
from hftrainer.training.loader_factory import LoaderFactory
from hftrainer.training.logged_metrics import LoggedMetrics
from hftrainer.training.runner import TrainingRun
from hftrainer.training.saver import CheckpointSaver

if TYPE_CHECKING:
    from hftrainer.arguments.behaviours import Behaviours
    from hftrainer.checkpointing.writer import CheckpointWriter
    from hftrainer.hub.uploads import Uploads
    from hftrainer.search.backend import SearchBackend
    from hftrainer.trainer import Trainer
    from hftrainer.training.loop import TrainingLoop


#: What belongs to a process, or to a run in it: another process makes its own.
_OF_THE_PROCESS = (
    *("resolved", "engine", "checkpoint_writer", "interruption", "loop", "states", "uploads", "hp_study"),
)


class Internals:
    """The state of a Trainer that no release of transformers has, and the rooms that work on it.

    Args:
        trainer: whose it is.
        optimizers: the optimizer and the scheduler that the script has given, either None.

    Attributes:
        behaviours: those of the release of transformers that is followed.
        resolved: what the arguments mean, parsed for this Trainer or for the trial in progress.
        engine: the Lightning engine, built from the arguments.
        states: how the strategy gathers, saves and loads the states of model and optimizer.
        loop: the run in progress, if any.
        setup: builds what the arguments and the model decide.
        loaders: makes data loaders.
        evaluation: runs a pass over an evaluation or test set.
        saver: writes checkpoints and restores from them.
        run: one call of `train()`.
        lightning_callbacks: Lightning's callbacks, in the order given.
        search: the backend of the hyperparameter search in progress, if any.
        hp_study: the study of the last search, if its backend has such.
        searched_arguments: the arguments as they were before that search.
        args_have_changed: whether the engine has to be built again before the next run.
        averages_tokens: whether the items of a window are counted over all processes.
        optimizers_given: the script's own optimizer and scheduler.
        found: attributes of the Trainer that follow from its model, as they were when they were set.
        with_all_columns: a dataset without the columns that the model does not take, and the dataset it was made of.
        flos_per_token: a model, and its floating-point operations for a token.
        tokens_in_run: input tokens of this run, over all processes.
        checkpoints_written: folders, in the order in which this run wrote them.
        last_saved_step: optimizer step of the last checkpoint.
        resumed_from: the checkpoint that the run goes on from, if any.
    """

    behaviours: Behaviours
    engine: Any
    resolved: ResolvedArguments
    states: ModelStates
    checkpoint_writer: CheckpointWriter
    averages_tokens: bool
    past_index: int

    def __init__(self, trainer: Trainer, optimizers: tuple[Any, Any]) -> None:
        self.trainer = trainer
        self.setup = TrainerSetup(trainer, self)
        self.loaders = LoaderFactory(trainer, self)
        self.evaluation = EvaluationRunner(trainer, self)
        self.saver = CheckpointSaver(trainer, self)
        self.run = TrainingRun(trainer, self)
        self.optimizers_given = optimizers
        self.found: dict[str, Any] = {}
        self._log_folder: Any = None
        self.lightning_callbacks: list[Any] = []
        self.search: SearchBackend | None = None
        self.hp_study: Any = None
        self.searched_arguments: dict[str, Any] | None = None
        self.args_have_changed = False
        self.loop: TrainingLoop | None = None
        self.interruption = Interruption(saves=False)
        self.logged_metrics = LoggedMetrics()
        self.with_all_columns: tuple[Any, Any] = None, None
        self.prepares_training_data = False
        self.preparation_measured = False
        self.flos_per_token: tuple[Any, int] | None = None
        self.tokens_in_run = 0
        self.checkpoints_written: list[str] = []
        self.last_saved_step = 0
        self.resumed_from: str | None = None
        self.uploads: Uploads | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(_OF_THE_PROCESS)}

    def announce(self, event: str, *payload: Any, **kwargs: Any) -> None:
        """Call an event of all callbacks by the handler's method, and keep the control that they return."""
        trainer = self.trainer
        handle = getattr(trainer.callback_handler, event)
        trainer.control = handle(trainer.args, trainer.state, trainer.control, *payload, **kwargs)

    def is_overridden(self, *names: str) -> bool:
        """Whether a subclass or the script has replaced one of these methods of the Trainer."""
        return is_overridden(self.trainer, *names)

    def loggers(self) -> list[Any]:
        """The Lightning loggers that this process writes to; this opens their runs."""
        trainer = self.trainer
        if trainer.args.process_index:
            return []
        found = [(each, each.loggers(trainer.args, trainer.state, trainer.model)) for each in self.reporting()]
        named = [one for each, loggers in found if isinstance(each, TrackerCallback) for one in loggers]
        return [*named, *(one for each, loggers in found if not isinstance(each, TrackerCallback) for one in loggers)]

    def reporting(self) -> list[ReportingCallback]:
        """The callbacks that write to trackers."""
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, ReportingCallback)]

    def log_folder(self) -> Any:
        """Where trackers write files, the same for all of this Trainer."""
        if self._log_folder is None:
            self._log_folder = adapter().LogFolder(self.trainer.args)
        return self._log_folder
