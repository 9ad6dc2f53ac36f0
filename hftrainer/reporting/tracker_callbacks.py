"""The callbacks that write a run to trackers, with the names, attributes and methods of transformers' own.

Scripts find them in `callback_handler.callbacks`, use their writer, subclass them, or remove them. What they write, and
when, is in `hftrainer_lightning.trackers.tracker`: each has a Lightning logger, made when it is first needed.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hftrainer.callbacks.state import TrainerCallback
from hftrainer.checkpointing.names import PREFIX_CHECKPOINT_DIR
from hftrainer.checkpointing.weights import save_weights
from hftrainer.errors import MissingPackage
from hftrainer.parallel.config_files import env_flag
from hftrainer.plugins import adapter

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerState
    from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class ReportingCallback(TrainerCallback):
    """Writes a run to trackers.

    Args:
        trackers: the trackers to write to.
    """

    def __init__(self, trackers: Sequence[Any] = ()) -> None:
        self._trackers = list(trackers)
        self._save_model: Callable[[str], None] | None = None
        self._run_folder: Callable[[], str] | None = None
        self._log_folder: Any = None

    def attach(self, save_model: Callable[[str], None], run_folder: Callable[[], str], log_folder: Any) -> None:
        """Connect the callback to its Trainer.

        Args:
            save_model: writes the model into a folder, for trackers that upload it.
            run_folder: returns the folder of the run's checkpoints.
            log_folder: where trackers write files; the same for all trackers of a Trainer.
        """
        self._save_model, self._run_folder, self._log_folder = save_model, run_folder, log_folder

    def trackers(self, args: TrainingArguments) -> list[Any]:
        """The trackers of this callback, with the current arguments."""
        for tracker in self._trackers:
            tracker.args = args
        return self._trackers

    def _written_trackers(self, args: TrainingArguments, state: TrainerState) -> list[Any]:
        """The trackers that this process writes to: none unless it is the main process."""
        return self.trackers(args) if state.is_world_process_zero else []

    def loggers(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[Any]:
        """The Lightning loggers; this opens their runs."""
        return [tracker.logger for tracker in self.trackers(args)]

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Start a new run for a hyperparameter trial."""
        for tracker in self.trackers(args):
            tracker.start_trial(name)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Write the hyperparameters, unless they were written before."""
        for tracker in self._written_trackers(args, state):
            tracker.begin(model, state)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the line."""
        for tracker in self._written_trackers(args, state):
            tracker.log(logs, model, state)

    def on_predict(self, args, state, control, metrics, model=None, **kwargs):
        """Write the metrics of a prediction, to the trackers for which transformers does so."""
        for tracker in self._written_trackers(args, state):
            tracker.predicted(metrics, model, state)

    def on_save(self, args, state, control, **kwargs):
        """Upload the checkpoint, if the tracker's settings ask for it."""
        folder = str(args.output_dir) if self._run_folder is None else self._run_folder()
        for tracker in self._written_trackers(args, state):
            tracker.saved(os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"), state)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """End the run."""

        def save(folder: str) -> None:
            if self._save_model is not None:
                self._save_model(folder)
                return
            save_weights(model, folder)
            if processing_class is not None:
                processing_class.save_pretrained(folder)

        for tracker in self._written_trackers(args, state):
            tracker.end(model, state, save)


class TrackerCallback(ReportingCallback):
    """Writes a run to one tracker.

    Attributes:
        name: its name in `report_to`.
    """

    name = ""

    def __init__(self) -> None:
        from hftrainer import integrations

        super().__init__()
        if missing := integrations.missing_packages(self.name):
            raise MissingPackage(f"{type(self).__name__} needs a package that is not installed: pip install {missing}")

    def trackers(self, args: TrainingArguments) -> list[Any]:
        """The tracker, made on first use: before that there are no arguments."""
        if not self._trackers:
            self._trackers = [adapter().make_tracker(self.name, args, self._log_folder)]
        return super().trackers(args)


class _SetUpCallback(TrackerCallback):
    """A tracker with a `setup` that opens its run and writes the hyperparameters. Subclasses may override it."""

    #: Attribute → name of the module in it. Modules cannot be pickled, so a copy imports it again.
    _modules: dict[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self._initialized = False
        self._find_modules()

    def _find_modules(self) -> None:
        for attribute, module in self._modules.items():
            setattr(self, attribute, importlib.import_module(module))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_modules()

    def trackers(self, args: TrainingArguments) -> list[Any]:
        """The tracker; none if a script has set its module to None, as transformers' callbacks allow."""
        if any(getattr(self, attribute) is None for attribute in self._modules):
            return []
        return super().trackers(args)

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open the run, and write the hyperparameters. Called once, before anything else is written."""
        self._initialized = True
        for tracker in self._written_trackers(args, state):
            tracker.describe_once(model, state)

    def _set_up_once(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        if not self._initialized:
            self.setup(args, state, model)
        for tracker in self._trackers:
            # A subclass's `setup` may have written the hyperparameters without the tracker.
            tracker.described = True

    def loggers(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[Any]:
        """The Lightning logger; this calls `setup`."""
        self._set_up_once(args, state, model)
        return super().loggers(args, state, model)

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Start a new run for a hyperparameter trial."""
        super().start_trial(args, name)
        self._initialized = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Set up."""
        self._set_up_once(args, state, model)
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the line."""
        self._set_up_once(args, state, model)
        super().on_log(args, state, control, logs=logs, model=model, **kwargs)


class TensorBoardCallback(TrackerCallback):
    """Writes a run to TensorBoard.

    Args:
        tb_writer: a `SummaryWriter` to write with; default one for `logging_dir`.

    Attributes:
        tb_writer: the writer, during training; it may be set.
        logging_dir: the folder: `TENSORBOARD_LOGGING_DIR`, or once training begins one below `output_dir`.
    """

    name = "tensorboard"

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
        self._SummaryWriter: Any = SummaryWriter
        self.tb_writer = tb_writer
        given = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = None if given is None else os.path.expanduser(given)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tb_writer": None}  # an open file of this process

    def trackers(self, args: TrainingArguments) -> list[Any]:
        """The tracker, which writes with `tb_writer`."""
        (tracker,) = super().trackers(args)
        tracker.directory, tracker.make_writer = self.logging_dir, functools.partial(self._writer, args)
        return [tracker]

    def loggers(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[Any]:
        """The Lightning logger; none if a script has set the writer class to None."""
        there = self.tb_writer is not None or self._SummaryWriter is not None
        return super().loggers(args, state, model) if there else []

    def _writer(self, args: TrainingArguments, *, make: bool = True) -> Any:
        """The writer, created if needed. None if a script has set the writer class to None."""
        if self.tb_writer is None and make:
            self._init_summary_writer(args)
        return self.tb_writer

    def _init_summary_writer(self, args: TrainingArguments) -> None:
        """Make the writer. Subclasses may override it."""
        if self._SummaryWriter is not None:
            (tracker,) = self.trackers(args)
            self.tb_writer = self._SummaryWriter(log_dir=tracker.path())

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Write to a separate folder for a hyperparameter trial."""
        super().start_trial(args, name)
        self.tb_writer = self.logging_dir = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Open the writer, and write the arguments and the configuration."""
        if not state.is_world_process_zero:
            return
        (tracker,) = self.trackers(args)
        self.logging_dir = tracker.path()
        if self._writer(args) is not None:
            super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the line."""
        if state.is_world_process_zero and self._writer(args) is not None:
            super().on_log(args, state, control, logs=logs, model=model, **kwargs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Close the writer; later values get a new one."""
        if self.tb_writer is not None:
            super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
            self.tb_writer.close()
            self.tb_writer = None


class WandbLogModel(str, enum.Enum):
    """Values of `WANDB_LOG_MODEL`: which models are uploaded to W&B."""

    CHECKPOINT = "checkpoint"
    END = "end"
    FALSE = "false"

    @property
    def is_enabled(self) -> bool:
        """Whether anything is uploaded."""
        return self is not WandbLogModel.FALSE

    @classmethod
    def _missing_(cls, value: object) -> WandbLogModel:
        if not isinstance(value, str):
            raise TypeError(f"WANDB_LOG_MODEL={value!r} ({type(value).__name__}): give a string.")
        if value.lower() in ("end", "checkpoint", "false"):
            return cls(value.lower())
        logger.warning("WANDB_LOG_MODEL=%r is not 'end', 'checkpoint' or 'false': models are not uploaded.", value)
        return cls.FALSE


class WandbCallback(_SetUpCallback):
    """Writes a run to Weights & Biases."""

    name = "wandb"
    _modules = {"_wandb": "wandb"}

    def __init__(self) -> None:
        super().__init__()
        self._log_model = WandbLogModel(os.environ.get("WANDB_LOG_MODEL", "false"))

    def trackers(self, args: TrainingArguments) -> list[Any]:
        """The tracker, which uploads models as `_log_model` sets."""
        found = super().trackers(args)
        for tracker in found:
            tracker.uploads = str(self._log_model.value)
        return found


class MLflowCallback(_SetUpCallback):
    """Writes a run to MLflow."""

    name = "mlflow"
    _modules = {"_ml_flow": "mlflow"}

    def __init__(self) -> None:
        super().__init__()
        self._auto_end_run = self._log_artifacts = False

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open a run, or use the active one, and write the hyperparameters."""
        self._log_artifacts = env_flag("HF_MLFLOW_LOG_ARTIFACTS")
        super().setup(args, state, model, **kwargs)
        self._auto_end_run = any(tracker.has_begun for tracker in self._trackers)

    def on_save(self, args, state, control, **kwargs):
        """Log the checkpoint as a model if HF_MLFLOW_LOG_ARTIFACTS is set."""
        if self._log_artifacts:
            super().on_save(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """End the run, unless the script started it."""
        if self._auto_end_run:
            super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)


class CometCallback(_SetUpCallback):
    """Writes a run to Comet."""

    name = "comet_ml"

    def __init__(self) -> None:
        super().__init__()
        self._log_assets = False

    @property
    def _experiment(self) -> Any:
        """Comet's experiment, once it is open."""
        opened = [tracker.opened for tracker in self._trackers if tracker.opened is not None]
        return opened[0].experiment if opened else None

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Start or continue an experiment, and write the hyperparameters."""
        self._log_assets = env_flag("COMET_LOG_ASSETS")
        super().setup(args, state, model, **kwargs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Upload the output folder if COMET_LOG_ASSETS is set."""
        for tracker in self._trackers:
            tracker.uploads = self._log_assets
        super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)


#: The callback classes for names in `report_to`.
CALLBACKS: tuple[type[TrackerCallback], ...] = (CometCallback, MLflowCallback, TensorBoardCallback, WandbCallback)


def reporting_callbacks(callbacks: Sequence[Any]) -> list[ReportingCallback]:
    """The callbacks that write to trackers."""
    return [each for each in callbacks if isinstance(each, ReportingCallback)]
