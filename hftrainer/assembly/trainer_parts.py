"""The parts of a Trainer, behind the one attribute `Trainer._hftrainer`.

Subclasses may use any name for their attributes and methods. So a name that no release of transformers has is never
looked up on the Trainer, but on this object or on one of its parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.assembly.trainer_setup import TrainerSetup
from hftrainer.callbacks.state import has_saved_state
from hftrainer.checkpointing.writing.writer import CheckpointWriter
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.loader_factory import LoaderFactory
from hftrainer.evaluation.evaluation_runner import EvaluationRunner
from hftrainer.hub.trainer_hub import TrainerHub
from hftrainer.model.model_setup import ModelSetup
from hftrainer.optimizers.optimizer_setup import OptimizerSetup
from hftrainer.plugins import import_adapter
from hftrainer.releases.policy import ReleasePolicy
from hftrainer.reporting.memory import TrainerMemoryTracker
from hftrainer.storage.sync import StorageSync
from hftrainer.strategies.strategy import Strategy
from hftrainer.trackers.base_callbacks import LogFolder, TrackerCallback, reporting_callbacks
from hftrainer.training.checkpoints.restorer import CheckpointRestorer
from hftrainer.training.checkpoints.saver import CheckpointSaver
from hftrainer.training.control_actions import ControlActions
from hftrainer.training.run import Run
from hftrainer.training.runner import TrainingRunner
from hftrainer.training.steps.counters import Counters
from hftrainer.training.steps.loss import LossComputer

if TYPE_CHECKING:
    from hftrainer.hub.upload_queue import UploadQueue
    from hftrainer.plugins import LightningEngine
    from hftrainer.trainer import Trainer

#: Attributes that a copy in another process must create again.
_LOCAL_ATTRIBUTES = ("resolved", "engine", "checkpoint_writer", "strategy", "upload_queue", "hp_study")

#: Attributes of the Trainer that a copy in another process must create again.
_LOCAL_TRAINER_ATTRIBUTES = ("accelerator", "gather_function", "_memory_tracker", "deepspeed", "push_in_progress")


@dataclass(eq=False, repr=False)
class TrainerParts:
    """The parts of a Trainer, and the state that they share.

    Args:
        trainer: the Trainer.
        script_optimizers: the optimizer and the scheduler that the script passed; either may be None.

    Attributes:
        run: the state of the current or last `train()`.
        policy: the behaviour of the followed release of transformers.
        resolved: the parsed arguments. A trial replaces `resolved`, `engine`, `strategy` and `checkpoint_writer`.
        engine: the Lightning engine, built from the arguments.
        strategy: how the processes share the model.
        checkpoint_writer: writes checkpoint folders, synchronously or in the background.
        averages_tokens: whether the items of an optimizer step are counted over all processes.
        past_index: index of the model's output that the next batch gets as `mems`; -1 for none.
        upload_queue: the uploads to the Hub; None before the repository is open, and on other ranks.
        search_backend: the backend of the current hyperparameter search, if any.
        hp_study: the study of the last search with Optuna, or None.
        arguments_before_search: the arguments before the current search.
        needs_rebuild: whether the next run must rebuild the engine.
        lightning_callbacks: Lightning's callbacks, in the script's order.
        trainer_setup: builds everything that depends on the arguments.
        model_setup: sets up the model.
        optimizer_setup: creates the optimizer and its schedule.
        loader_factory: makes data loaders.
        loss_computer: prepares micro-batches and computes their losses.
        counters: count tokens and floating-point operations over all ranks.
        checkpoint_saver: writes checkpoints.
        checkpoint_restorer: restores weights and progress from them.
        control_actions: logs, saves and evaluates when due.
        evaluation_runner: runs a pass over an evaluation or test set.
        trainer_hub: what the Trainer pushes to the Hub.
        storage_sync: keeps the output folder at a URL.
        training_runner: runs `train()`.
    """

    trainer: Trainer
    script_optimizers: tuple[Any, Any] = (None, None)
    run: Run = field(default_factory=Run)
    policy: ReleasePolicy = field(init=False)
    resolved: ResolvedArguments = field(init=False)
    engine: LightningEngine = field(init=False)
    strategy: Strategy = field(init=False)
    checkpoint_writer: CheckpointWriter = field(init=False)
    averages_tokens: bool = field(init=False)
    past_index: int = field(init=False)
    upload_queue: UploadQueue | None = None
    search_backend: Any = None
    hp_study: Any = None
    arguments_before_search: dict[str, Any] | None = None
    needs_rebuild: bool = False
    lightning_callbacks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trainer_setup = TrainerSetup(self)
        self.model_setup = ModelSetup(self)
        self.optimizer_setup = OptimizerSetup(self)
        self.loader_factory = LoaderFactory(self)
        self.loss_computer = LossComputer(self)
        self.counters = Counters(self)
        self.checkpoint_saver = CheckpointSaver(self)
        self.checkpoint_restorer = CheckpointRestorer(self)
        self.control_actions = ControlActions(self)
        self.evaluation_runner = EvaluationRunner(self)
        self.trainer_hub = TrainerHub(self)
        self.storage_sync = StorageSync(self)
        self.training_runner = TrainingRunner(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(_LOCAL_ATTRIBUTES)}

    def trainer_state_for_copy(self) -> dict[str, Any]:
        """The Trainer's attributes for `copy.deepcopy` and pickling; `rebuild` creates the others."""
        return {**vars(self.trainer), **dict.fromkeys(_LOCAL_TRAINER_ATTRIBUTES), "_eval_dataloaders": {}}

    def rebuild(self) -> None:
        """Create engine, accelerator, storage and uploads for a copied Trainer."""
        self.trainer._memory_tracker = TrainerMemoryTracker(self.trainer.args.skip_memory_metrics)
        self.trainer_setup.resolve_arguments()
        self.trainer.create_accelerator_and_postprocess()
        self.storage_sync.open_mirror()
        if self.trainer.args.push_to_hub:
            self.trainer.accelerator.processes.broadcast_from_main(self.trainer.init_hf_repo)

    @property
    def unwrapped_model(self) -> Any:
        """The user's model, without wrappers and not compiled."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    def run_folder_without_override(self, trial: Any) -> str:
        """The folder of the run, or of the trial; `output_dir` where a subclass overrides `_get_output_dir`.

        An override may count its calls, so this adds none.
        """
        has_override = is_overridden(self.trainer, "_get_output_dir")
        return str(self.trainer.args.output_dir) if has_override else self.trainer._get_output_dir(trial)

    def call_callbacks(self, event: str, *payload: Any, **kwargs: Any) -> None:
        """Call an event of all callbacks through the handler, and keep the control that they return."""
        self.run.heartbeat.record_event(event)
        handle = getattr(self.trainer.callback_handler, event)
        self.trainer.control = handle(self.trainer.args, self.trainer.state, self.trainer.control, *payload, **kwargs)

    def require_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; raises ValueError if it does not exist yet."""
        optimizer: torch.optim.Optimizer | None = self.trainer.optimizer
        if optimizer is None:
            raise ValueError("There is no optimizer yet: call create_optimizer() or train() first.")
        return optimizer

    def stateful_callbacks(self) -> list[Any]:
        """The callbacks and the control whose states are saved in checkpoints."""
        trainer = self.trainer
        return [owner for owner in [*trainer.callback_handler.callbacks, trainer.control] if has_saved_state(owner)]

    def open_loggers(self) -> list[Any]:
        """The Lightning loggers that this process writes to. The call opens their runs."""
        if self.trainer.args.process_index:
            return []
        callbacks = reporting_callbacks(self.trainer.callback_handler.callbacks)
        loggers_by_callback = [
            (callback, callback.loggers(self.trainer.args, self.trainer.state, self.trainer.model))
            for callback in callbacks
        ]
        # Loggers of report_to come first.
        loggers_by_callback.sort(key=lambda pair: not isinstance(pair[0], TrackerCallback))
        return [logger for _, loggers in loggers_by_callback for logger in loggers]

    def print_xla_metrics(self) -> None:
        """Print torch_xla's metrics on the main process, if `debug="tpu_metrics_debug"`."""
        is_requested = "tpu_metrics_debug" in (self.trainer.args.debug or ()) and self.trainer.args.device.type == "xla"
        if is_requested and self.trainer.is_world_process_zero():
            import_adapter("xla", "devices").print_metrics()

    @functools.cached_property
    def log_folder(self) -> LogFolder:
        """The folder where trackers write files; the same for all trackers of this Trainer."""
        return LogFolder(self.trainer.args)
