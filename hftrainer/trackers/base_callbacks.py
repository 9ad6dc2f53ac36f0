"""Callbacks that write a run to Lightning's loggers: base classes, and runs that continue after a restart."""

from __future__ import annotations

import json
import logging
import os
import reprlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard

from hftrainer.arguments.base import BaseArguments
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing.layout import PREFIX_CHECKPOINT_DIR
from hftrainer.errors import MissingPackage
from hftrainer.plugins import import_adapter
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

#: Entry in the `loggers` of a `ReportingCallback`: a table of all log lines, `csv/version_N/metrics.csv`.
CSV_LOGGER = "csv"
#: The ids of runs that must be numbers.
_NUMERIC_IDS = ("version", "rows", "lines")


@dataclass(frozen=True)
class EarlierRun:
    """The run in a tracker that belongs to a checkpoint.

    Attributes:
        ids: the result of `ReportingCallback.run_ids` at the checkpoint.
        step: the checkpoint's optimizer step. Values of later steps in the tracker are written again.
        log: the log lines up to the checkpoint.
    """

    ids: Mapping[str, str]
    step: int
    log: list[dict[str, Any]]


class LogFolder:
    """The folder for trackers that write files, shared by all trackers of a run.

    Args:
        args: the run's arguments.
    """

    def __init__(self, args: BaseArguments) -> None:
        self.args = args
        self._paths: dict[str | None, str] = {}

    def path(self, trial: str | None) -> str:
        """The folder of a run, or of the trial with this name."""
        if trial not in self._paths:
            self._paths[trial] = self._make_path(trial)
        return self._paths[trial]

    def reuse(self, trial: str | None, folder: str) -> None:
        """Use the folder of an earlier run, unless a folder is already in use or set by the script or environment."""
        if trial is not None or self._explicit_folder() is None:
            self._paths.setdefault(trial, folder)

    def _explicit_folder(self) -> str | None:
        return getattr(self.args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")

    def _make_path(self, trial: str | None) -> str:
        now = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        default = os.path.join(str(self.args.output_dir), "runs", now)
        if trial is not None:
            return os.path.join(default, trial)
        folder = self._explicit_folder()
        return os.path.expanduser(folder) if folder else default


class ReportingCallback(TrainerCallback):
    """Writes a run to Lightning loggers on the main process, which are created at the first write.

    Args:
        loggers: the script's loggers, or `CSV_LOGGER`.

    Attributes:
        name: the callback's name in `report_to`.
    """

    name = CSV_LOGGER
    #: The keys of `run_ids`.
    _ids: tuple[str, ...] = ("folder", "version", "rows")
    #: Whether an evaluation without training also writes the hyperparameters.
    _describes_evaluations = True

    def __init__(self, loggers: Sequence[Any] = ()) -> None:
        self._script_loggers = list(loggers)
        self._open_loggers: list[Any] | None = None
        self._initialized = False
        self._trial: str | None = None
        #: The run to continue; None after it was opened.
        self._earlier_run: EarlierRun | None = None
        self._dropped_names: set[str] = set()
        self._save_model: Callable[[str], None] | None = None
        self._run_folder: Callable[[], str] | None = None
        self._log_folder: LogFolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An open run belongs to this process, and modules cannot be pickled.
        state = {name: value for name, value in vars(self).items() if not isinstance(value, ModuleType)}
        return {**state, "_open_loggers": None}

    def attach(self, save_model: Callable[[str], None], run_folder: Callable[[], str], log_folder: LogFolder) -> None:
        """Connect the callback to its Trainer.

        Args:
            save_model: writes the model to a folder, for trackers that upload it.
            run_folder: returns the folder of the run's checkpoints.
            log_folder: the folder for files, shared by all trackers of a Trainer.
        """
        self._save_model, self._run_folder, self._log_folder = save_model, run_folder, log_folder

    def loggers(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[Any]:
        """Open the runs, and return the Lightning loggers; empty if this process does not write."""
        return self._get_loggers(args) if self._is_writing(state) else []

    def _get_loggers(self, args: TrainingArguments) -> list[Any]:
        if self._open_loggers is None:
            self._open_loggers = self._make_loggers(args)
        return self._open_loggers

    def _make_loggers(self, args: TrainingArguments) -> list[Any]:
        """Create the loggers."""
        return [self._make_table(args) if logger == CSV_LOGGER else logger for logger in self._script_loggers]

    def _make_table(self, args: TrainingArguments) -> Any:
        loggers = import_adapter("lightning", "loggers")
        if (earlier_run := self._take_earlier_run()) is None:
            return loggers.CSVLogger(self._path(args), name=CSV_LOGGER)
        version, rows = (int(earlier_run.ids[name]) for name in ("version", "rows"))
        return loggers.ResumedCSVLogger(self._path(args), name=CSV_LOGGER, version=version, rows=rows)

    def run_ids(self) -> dict[str, str]:
        """The ids in a checkpoint with which a later process can continue the open run; empty if no run is open."""
        table = next((logger for logger in self._open_loggers or () if logger not in self._script_loggers), None)
        if table is None:
            return {}
        rows = import_adapter("lightning", "loggers").count_rows(table)
        return {"folder": os.path.abspath(table.save_dir), "version": str(table.version), "rows": str(rows)}

    def can_read(self, ids: Any) -> TypeGuard[Mapping[str, str]]:
        """Whether `ids` have the format of `run_ids`: a later release may have written the checkpoint."""
        return isinstance(ids, Mapping) and all(
            isinstance(value := ids.get(name), str) and (name not in _NUMERIC_IDS or value.isdigit())
            for name in self._ids
        )

    def resume_run(self, args: TrainingArguments, earlier: EarlierRun) -> None:
        """Continue an earlier run, unless a run is already open."""
        if CSV_LOGGER in self._script_loggers and self._open_loggers is None:
            folder = earlier.ids["folder"]
            table = os.path.join(folder, CSV_LOGGER, f"version_{earlier.ids['version']}")
            self._earlier_run = earlier if self._is_folder_of_run(args, folder, table) else None

    def _take_earlier_run(self) -> EarlierRun | None:
        """The earlier run to continue; None from the second call on."""
        earlier_run, self._earlier_run = self._earlier_run, None
        return earlier_run

    def _warn_about_new_run(self, run: str, reason: object) -> None:
        logger.warning("%s: the checkpoint's run, %s, cannot continue, so a new run starts: %s", self.name, run, reason)

    def _is_folder_of_run(self, args: TrainingArguments, folder: str, required_folder: str) -> bool:
        """Whether this run writes to the folder of the earlier run, where `required_folder` must exist."""
        if not os.path.isdir(required_folder):
            self._warn_about_new_run(required_folder, "the folder does not exist.")
            return False
        self._log_folder = self._log_folder or LogFolder(args)
        self._log_folder.reuse(self._trial, folder)
        return os.path.abspath(self._path(args)) == folder

    def _path(self, args: TrainingArguments) -> str:
        """The folder for files of the run, or of the trial."""
        self._log_folder = self._log_folder or LogFolder(args)
        return self._log_folder.path(self._trial)

    def _is_writing(self, state: TrainerState) -> bool:
        """Whether this process writes anything."""
        return state.is_world_process_zero

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Start a new run for a hyperparameter trial."""
        for logger in self._open_loggers or ():
            if logger not in self._script_loggers:
                logger.finalize("success")
        self._open_loggers, self._initialized, self._trial, self._earlier_run = None, False, name, None

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open the run, and write the hyperparameters. Called once, before anything else is written."""
        self._initialized = True
        if self._is_writing(state):
            self._describe(args, state, model)

    def _set_up_once(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        if not self._initialized:
            self.setup(args, state, model)

    def _describe(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Write the hyperparameters: the arguments and the model's configuration."""
        for logger in self._get_loggers(args):
            logger.log_hyperparams({**model_config(model), **arguments_of(args)})

    def _write_logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the numbers of a log line."""
        for logger in self._get_loggers(args):
            logger.log_metrics(self._numbers(to_tracker_names(logs)), step=state.global_step)
            logger.save()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Write the hyperparameters, unless they are already written."""
        self._set_up_once(args, state, model)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the log line."""
        if self._describes_evaluations:
            self._set_up_once(args, state, model)
        if self._is_writing(state):
            self._write_logs(args, state, logs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """End the run; later events, such as an evaluation, are still written."""
        if self._is_writing(state):
            for logger in self._get_loggers(args):
                logger.finalize("success")

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that are numbers. Others are dropped, with one warning per name."""
        return {name: value for name, value in values.items() if self._is_number(name, value)}

    def _is_number(self, name: str, value: Any) -> bool:
        if not isinstance(value, (int, float)) and name not in self._dropped_names:
            self._dropped_names.add(name)
            logger.warning("%s=%r (%s) is not a number, so trackers do not get it.", name, value, type(value).__name__)
        return isinstance(value, (int, float))


class TrackerCallback(ReportingCallback):
    """Writes a run to one tracker."""

    def __init__(self) -> None:
        from hftrainer.trackers import registry

        super().__init__()
        if packages := registry.missing_packages(self.name):
            raise MissingPackage(f"{type(self).__name__} needs a package that is not installed: pip install {packages}")

    def loggers(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[Any]:
        """Call `setup` if needed, and return the Lightning logger."""
        if self._describes_evaluations:
            self._set_up_once(args, state, model)
        return super().loggers(args, state, model)

    def resume_run(self, args: TrainingArguments, earlier: EarlierRun) -> None:
        """Continue an earlier run, unless a run is already open."""
        if self._open_loggers is None:
            self._earlier_run = earlier

    def _tracker_logger(self, args: TrainingArguments) -> Any:
        """The Lightning logger, opened if needed."""
        return self._get_loggers(args)[0]

    def _checkpoint_path(self, args: TrainingArguments, state: TrainerState) -> str:
        """The path of this step's checkpoint."""
        folder = str(args.output_dir) if self._run_folder is None else self._run_folder()
        return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def reporting_callbacks(callbacks: Sequence[Any]) -> list[ReportingCallback]:
    """The callbacks that write to trackers."""
    return [callback for callback in callbacks if isinstance(callback, ReportingCallback)]


@dataclass(frozen=True)
class CheckpointPlace:
    """The location of a run's checkpoints.

    Args:
        folder: the local folder.
        name: `storage_url` if set, else the folder: the same on every machine.
    """

    folder: str
    name: str

    def relative(self, ids: Mapping[str, str]) -> dict[str, str]:
        """A tracker's ids, with its folder relative to `folder` if inside, since machines have different folders."""
        is_inside = ids.get("folder", "").startswith(self.folder + os.sep)
        return {**ids, "folder": os.path.relpath(ids["folder"], self.folder)} if is_inside else dict(ids)

    def absolute(self, ids: Mapping[str, str]) -> dict[str, str]:
        """A tracker's ids, with its folder on this machine."""
        return {**ids, "folder": os.path.join(self.folder, ids["folder"])} if "folder" in ids else dict(ids)


def ids_of_open_runs(callbacks: Sequence[Any], place: CheckpointPlace) -> dict[str, Any]:
    """A checkpoint's entry for open runs in trackers: the run's place, and the ids by tracker."""
    reporting = reporting_callbacks(callbacks)
    runs = {callback.name: place.relative(ids) for callback in reporting if (ids := callback.run_ids())}
    return {"place": place.name, "runs": runs} if runs else {}


def begin_runs(
    callbacks: list[Any], saved: Mapping[str, Any], args: TrainingArguments, state: TrainerState, place: CheckpointPlace
) -> None:
    """Prepare trackers for the start of training: for a new trial, or to continue the checkpoint's runs.

    Trackers do not continue the runs of a checkpoint from another folder, since that run may have continued.

    Args:
        callbacks: all callbacks.
        saved: the result of `ids_of_open_runs` at the checkpoint; empty in checkpoints without it.
        args: the run's arguments.
        state: the state at the start of training.
        place: the location of this run's checkpoints.
    """
    trackers = reporting_callbacks(callbacks)
    for tracker in trackers if state.is_hyper_param_search else ():
        tracker.start_trial(args, state.trial_name)
    if not saved or args.new_tracker_run:
        return
    runs = saved.get("runs")
    if "place" not in saved or not isinstance(runs, Mapping):
        logger.warning("Trackers start new runs: this release cannot read %s in the checkpoint.", reprlib.repr(saved))
        return
    if saved["place"] != place.name:
        logger.info("The checkpoint belongs to a run in %s, so trackers start new runs.", saved["place"])
        return
    for tracker in trackers:
        ids = runs.get(tracker.name)
        if tracker.can_read(ids):
            tracker.resume_run(args, EarlierRun(place.absolute(ids), state.global_step, list(state.log_history)))
        elif ids is not None:
            tracker._warn_about_new_run(reprlib.repr(ids), "this release cannot read it.")


def to_tracker_names(logs: Mapping[str, Any]) -> dict[str, Any]:
    """A log line with trackers' names: `eval_loss` → `eval/loss`, `test_loss` → `test/loss`, else `train/…`."""
    return {_to_tracker_name(name): value for name, value in logs.items()}


def _to_tracker_name(name: str) -> str:
    stage, _, rest = name.partition("_")
    return f"{stage}/{rest}" if stage in ("eval", "test") and "_" in name else f"train/{name}"


def model_config(model: Any) -> dict[str, Any]:
    """The model's configuration as a dict; empty if there is none."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def peft_config(model: Any) -> dict[str, Any]:
    """The configurations of PEFT's adapters under 'peft_config'; empty for other models."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping):
        return {}
    return {"peft_config": {name: config.to_dict() for name, config in adapters.items()}}


def arguments_of(args: TrainingArguments) -> dict[str, Any]:
    """The arguments as JSON values, since the fields of a subclass may hold any object."""
    return json.loads(args.to_json_string())
