"""The callbacks that write a run to Lightning's loggers: the base classes, TensorBoard's, and shared helpers."""

from __future__ import annotations

import functools
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
from hftrainer.checkpointing.names import PREFIX_CHECKPOINT_DIR
from hftrainer.errors import MissingPackage
from hftrainer.plugins import load

logger = logging.getLogger(__name__)

#: Entry in the `loggers` of a `ReportingCallback`: a table of all log lines, `csv/version_N/metrics.csv`.
TABLE = "csv"
#: Those of the ids of runs that are numbers.
_NUMBERS = ("version", "rows", "lines")


@dataclass(frozen=True)
class EarlierRun:
    """The run of a checkpoint in a tracker.

    Attributes:
        ids: what `ReportingCallback.run_ids` returned at the checkpoint.
        step: the checkpoint's optimizer step; what the tracker holds of later steps is written again.
        log: the lines of the log up to it.
    """

    ids: Mapping[str, str]
    step: int
    log: list[dict[str, Any]]


class LogFolder:
    """The folder for trackers that write files; the same for all trackers of a run.

    Args:
        args: the run's arguments.
    """

    def __init__(self, args: BaseArguments) -> None:
        self.args = args
        self._paths: dict[str | None, str] = {}

    def path(self, trial: str | None) -> str:
        """The folder of a run, or of the trial with this name."""
        if trial not in self._paths:
            self._paths[trial] = self._new(trial)
        return self._paths[trial]

    def go_on_in(self, trial: str | None, folder: str) -> None:
        """Use the folder of an earlier run, unless one is in use already or the script or the environment names one."""
        if trial is not None or self._given() is None:
            self._paths.setdefault(trial, folder)

    def _given(self) -> str | None:
        return getattr(self.args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")

    def _new(self, trial: str | None) -> str:
        now = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        default = os.path.join(str(self.args.output_dir), "runs", now)
        if trial is not None:
            return os.path.join(default, trial)
        given = self._given()
        return os.path.expanduser(given) if given else default


class ReportingCallback(TrainerCallback):
    """Writes a run to Lightning loggers, on the main process. The loggers are made at the first write.

    Args:
        loggers: loggers of the script, and `TABLE`.

    Attributes:
        name: its name in `report_to`.
    """

    name = TABLE
    #: The names in `run_ids`.
    _ids: tuple[str, ...] = ("folder", "version", "rows")
    #: Whether an evaluation without training writes the hyperparameters too.
    _describes_evaluations = True

    def __init__(self, loggers: Sequence[Any] = ()) -> None:
        self._given = list(loggers)
        self._opened: list[Any] | None = None
        self._initialized = False
        self._trial: str | None = None
        #: The run to go on with, until it is opened.
        self._earlier: EarlierRun | None = None
        self._dropped: set[str] = set()
        self._save_model: Callable[[str], None] | None = None
        self._run_dir: Callable[[], str] | None = None
        self._log_folder: LogFolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An open run belongs to this process, and modules cannot be pickled.
        kept = {name: value for name, value in vars(self).items() if not isinstance(value, ModuleType)}
        return {**kept, "_opened": None}

    def attach(self, save_model: Callable[[str], None], run_folder: Callable[[], str], log_folder: LogFolder) -> None:
        """Connect the callback to its Trainer.

        Args:
            save_model: writes the model into a folder, for trackers that upload it.
            run_folder: returns the folder of the run's checkpoints.
            log_folder: where trackers write files; the same for all trackers of a Trainer.
        """
        self._save_model, self._run_dir, self._log_folder = save_model, run_folder, log_folder

    def loggers(self, args: Any, state: TrainerState, model: Any) -> list[Any]:
        """The Lightning loggers; this opens their runs."""
        return self._opened_loggers(args) if self._is_writing(state) else []

    def _opened_loggers(self, args: Any) -> list[Any]:
        if self._opened is None:
            self._opened = self._make_loggers(args)
        return self._opened

    def _make_loggers(self, args: Any) -> list[Any]:
        """Make the loggers."""
        return [self._make_table(args) if each == TABLE else each for each in self._given]

    def _make_table(self, args: Any) -> Any:
        loggers = load("lightning", "loggers")
        if (earlier := self._take_earlier()) is None:
            return loggers.CSVLogger(self._path(args), name=TABLE)
        version, rows = (int(earlier.ids[name]) for name in ("version", "rows"))
        return loggers.ResumedCSVLogger(self._path(args), name=TABLE, version=version, rows=rows)

    def run_ids(self) -> dict[str, str]:
        """What a checkpoint needs to hold for a later process to go on with the open run; empty if none is open."""
        table = next((each for each in self._opened or () if each not in self._given), None)
        if table is None:
            return {}
        rows = load("lightning", "loggers").count_rows(table)
        return {"folder": os.path.abspath(table.save_dir), "version": str(table.version), "rows": str(rows)}

    def can_read(self, ids: Any) -> TypeGuard[Mapping[str, str]]:
        """Whether `ids` are as `run_ids` returns them: the checkpoint may be of a later release."""
        return isinstance(ids, Mapping) and all(
            isinstance(value := ids.get(name), str) and (name not in _NUMBERS or value.isdigit()) for name in self._ids
        )

    def resume_run(self, args: Any, earlier: EarlierRun) -> None:
        """Go on with an earlier run, unless one is open already."""
        if TABLE in self._given and self._opened is None:
            folder = earlier.ids["folder"]
            table = os.path.join(folder, TABLE, f"version_{earlier.ids['version']}")
            self._earlier = earlier if self._is_folder_of_run(args, folder, table) else None

    def _take_earlier(self) -> EarlierRun | None:
        """The earlier run to go on with, once."""
        earlier, self._earlier = self._earlier, None
        return earlier

    def _warn_of_new_run(self, run: str, why: object) -> None:
        logger.warning("%s: the checkpoint's run, %s, cannot go on, and a new one begins: %s", self.name, run, why)

    def _is_folder_of_run(self, args: Any, folder: str, needed: str) -> bool:
        """Whether this run writes to the folder of the earlier one, which must still hold the folder `needed`."""
        if not os.path.isdir(needed):
            self._warn_of_new_run(needed, "there is no such folder.")
            return False
        if self._log_folder is None:
            self._log_folder = LogFolder(args)
        self._log_folder.go_on_in(self._trial, folder)
        return os.path.abspath(self._path(args)) == folder

    def _path(self, args: Any) -> str:
        """The folder for files of the run, or of the trial."""
        if self._log_folder is None:
            self._log_folder = LogFolder(args)
        return self._log_folder.path(self._trial)

    def _is_writing(self, state: TrainerState) -> bool:
        """Whether this process writes anything."""
        return state.is_world_process_zero

    def start_trial(self, args: Any, name: str | None) -> None:
        """Start a new run for a hyperparameter trial."""
        for each in self._opened or ():
            if each not in self._given:
                each.finalize("success")
        self._opened, self._initialized, self._trial, self._earlier = None, False, name, None

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open the run, and write the hyperparameters. Called once, before anything else is written."""
        self._initialized = True
        if self._is_writing(state):
            self._describe(args, state, model)

    def _set_up_once(self, args: Any, state: TrainerState, model: Any) -> None:
        if not self._initialized:
            self.setup(args, state, model)

    def _describe(self, args: Any, state: TrainerState, model: Any) -> None:
        """Write the hyperparameters: the arguments, and the model's configuration."""
        for each in self._opened_loggers(args):
            each.log_hyperparams({**model_config(model), **arguments_of(args)})

    def _write(self, args: Any, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the numbers of a log line."""
        for each in self._opened_loggers(args):
            each.log_metrics(self._numbers(renamed(logs)), step=state.global_step)
            each.save()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Write the hyperparameters, unless they were written before."""
        self._set_up_once(args, state, model)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the line."""
        if self._describes_evaluations:
            self._set_up_once(args, state, model)
        if self._is_writing(state):
            self._write(args, state, logs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """End the run; later events, such as an evaluation, are still written."""
        if self._is_writing(state):
            for each in self._opened_loggers(args):
                each.finalize("success")

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that are numbers; the others are left out, with one warning for each name."""
        return {name: value for name, value in values.items() if self._is_number(name, value)}

    def _is_number(self, name: str, value: Any) -> bool:
        if not isinstance(value, (int, float)) and name not in self._dropped:
            self._dropped.add(name)
            logger.warning("%s=%r (%s) is not a number: it is not sent to trackers.", name, value, type(value).__name__)
        return isinstance(value, (int, float))


class TrackerCallback(ReportingCallback):
    """Writes a run to one tracker."""

    def __init__(self) -> None:
        from hftrainer import integrations

        super().__init__()
        if missing := integrations.missing_packages(self.name):
            raise MissingPackage(f"{type(self).__name__} needs a package that is not installed: pip install {missing}")

    def loggers(self, args: Any, state: TrainerState, model: Any) -> list[Any]:
        """The Lightning logger; this calls `setup`."""
        if self._describes_evaluations:
            self._set_up_once(args, state, model)
        return super().loggers(args, state, model)

    def resume_run(self, args: Any, earlier: EarlierRun) -> None:
        """Go on with an earlier run, unless one is open already."""
        if self._opened is None:
            self._earlier = earlier

    def _tracker_logger(self, args: Any) -> Any:
        """The Lightning logger, which is opened if needed."""
        return self._opened_loggers(args)[0]

    def _checkpoint(self, args: Any, state: TrainerState) -> str:
        """The path of this step's checkpoint."""
        folder = str(args.output_dir) if self._run_dir is None else self._run_dir()
        return os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


class TensorBoardCallback(TrackerCallback):
    """Writes a run to TensorBoard: the arguments and the configuration as texts, log values as scalars or texts.

    Args:
        tb_writer: a `SummaryWriter` to write with; default one for `logging_dir`.

    Attributes:
        tb_writer: the writer during training; scripts may set it.
        logging_dir: the folder: `TENSORBOARD_LOGGING_DIR`, or else set when training begins.
    """

    name = "tensorboard"
    _ids = ("folder",)
    _describes_evaluations = False

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
        return {**super().__getstate__(), "tb_writer": None}  # an open file of this process

    def _is_writing(self, state: TrainerState) -> bool:
        """Whether this process writes; False if a script has set the writer class to None."""
        return super()._is_writing(state) and (self.tb_writer is not None or self._SummaryWriter is not None)

    def _make_loggers(self, args: Any) -> list[Any]:
        """Write directly to the folder, with the callback's writer."""
        return [load("lightning", "loggers").WriterLogger(functools.partial(self._writer, args), self._path(args))]

    def _path(self, args: Any) -> str:
        return super()._path(args) if self.logging_dir is None else self.logging_dir

    def _set_up_once(self, args: Any, state: TrainerState, model: Any) -> None:
        if not self._initialized:  # a subclass may define another `setup`, since transformers' callback has none
            super().setup(args, state, model)

    def _writer(self, args: Any, *, make: bool = True) -> Any:
        """The writer, created if needed. None if a script has set the writer class to None."""
        if self.tb_writer is None and make:
            self._init_summary_writer(args)
        return self.tb_writer

    def _init_summary_writer(self, args: Any) -> None:
        """Create the writer. Subclasses may override this method."""
        if self._SummaryWriter is not None:
            earlier = self._take_earlier()
            purged = {} if earlier is None else {"purge_step": earlier.step + 1}
            self.tb_writer = self._SummaryWriter(log_dir=self._path(args), **purged)

    def run_ids(self) -> dict[str, str]:
        """The folder, if the writer is the callback's own."""
        folder = self.logging_dir
        is_own = folder is not None and getattr(self.tb_writer, "log_dir", None) == folder
        return {"folder": os.path.abspath(str(folder))} if is_own else {}

    def resume_run(self, args: Any, earlier: EarlierRun) -> None:
        """Write to the folder of the earlier run; TensorBoard then leaves out what it holds of later steps."""
        folder = earlier.ids["folder"]
        if self.tb_writer is None and self._is_folder_of_run(args, folder, folder):
            self._earlier = earlier

    def start_trial(self, args: Any, name: str | None) -> None:
        """Write to a separate folder for a hyperparameter trial."""
        super().start_trial(args, name)
        self.tb_writer = self.logging_dir = None

    def _describe(self, args: Any, state: TrainerState, model: Any) -> None:
        """Write the arguments and the configuration as JSON."""
        logger = self._tracker_logger(args)
        logger.hparams.update(args.to_sanitized_dict())
        logger.experiment.add_text("args", args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            try:
                text = config.to_json_string()
            except TypeError:  # the script has put objects into it
                text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=repr)
            logger.experiment.add_text("model_config", text)

    def _write(self, args: Any, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the line, and flush the file."""
        writer = self._tracker_logger(args).experiment
        for name, value in renamed(logs).items():
            if isinstance(value, str):
                writer.add_text(name, value, state.global_step)
            elif self._is_number(name, value):
                writer.add_scalar(name, value, state.global_step)
        writer.flush()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Open the writer, and write the arguments and the configuration."""
        if state.is_world_process_zero:
            self.logging_dir = self._path(args)
            if self._writer(args) is not None:
                super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        """Write the line."""
        if state.is_world_process_zero and self._writer(args) is not None:
            super().on_log(args, state, control, logs=logs, model=model, **kwargs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Close the writer; later values open a new one."""
        if self.tb_writer is not None:
            super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
            self.tb_writer.close()
            self.tb_writer = None


def reporting_callbacks(callbacks: Sequence[Any]) -> list[ReportingCallback]:
    """The callbacks that write to trackers."""
    return [each for each in callbacks if isinstance(each, ReportingCallback)]


@dataclass(frozen=True)
class RunPlace:
    """Where a run keeps its checkpoints.

    Args:
        folder: the local folder.
        name: the same on every machine: the URL with `storage_url`, else the folder.
    """

    folder: str
    name: str

    def relative(self, ids: Mapping[str, str]) -> dict[str, str]:
        """A tracker's ids, its folder relative to that of the run if it is inside: another machine has another."""
        inside = ids.get("folder", "").startswith(self.folder + os.sep)
        return {**ids, "folder": os.path.relpath(ids["folder"], self.folder)} if inside else dict(ids)

    def absolute(self, ids: Mapping[str, str]) -> dict[str, str]:
        """The ids with the tracker's folder on this machine."""
        return {**ids, "folder": os.path.join(self.folder, ids["folder"])} if "folder" in ids else dict(ids)


def ids_of_open_runs(callbacks: Sequence[Any], place: RunPlace) -> dict[str, Any]:
    """What a checkpoint holds of the runs that are open in trackers: the run's place, and ids by tracker."""
    runs = {each.name: place.relative(ids) for each in reporting_callbacks(callbacks) if (ids := each.run_ids())}
    return {"place": place.name, "runs": runs} if runs else {}


def begin_runs(
    callbacks: Sequence[Any], saved: Mapping[str, Any], args: Any, state: TrainerState, place: RunPlace
) -> None:
    """Tell trackers that training begins: of a new trial, and of the runs in the checkpoint, with which they go on.

    Not when the checkpoint is of a run in another folder, which may have gone on and keeps what it holds.

    Args:
        callbacks: all callbacks.
        saved: what `ids_of_open_runs` returned at the checkpoint; empty in checkpoints without it.
        args: the run's arguments.
        state: the state in which training begins.
        place: where this run keeps its checkpoints.
    """
    reporting = reporting_callbacks(callbacks)
    for each in reporting if state.is_hyper_param_search else ():
        each.start_trial(args, state.trial_name)
    if not saved or args.new_tracker_run:
        return
    runs = saved.get("runs")
    if "place" not in saved or not isinstance(runs, Mapping):
        logger.warning("Trackers begin new runs: this release cannot read %s in the checkpoint.", reprlib.repr(saved))
        return
    if saved["place"] != place.name:
        logger.info("The checkpoint is of a run in %s: trackers begin new runs.", saved["place"])
        return
    for each in reporting:
        ids = runs.get(each.name)
        if each.can_read(ids):
            each.resume_run(args, EarlierRun(place.absolute(ids), state.global_step, list(state.log_history)))
        elif ids is not None:
            each._warn_of_new_run(reprlib.repr(ids), "this release cannot read it.")


def renamed(logs: Mapping[str, Any]) -> dict[str, Any]:
    """A log line with the trackers' names: `eval_loss` → `eval/loss`, `test_loss` → `test/loss`, others `train/…`."""
    return {_renamed(name): value for name, value in logs.items()}


def _renamed(name: str) -> str:
    stage, _, rest = name.partition("_")
    return f"{stage}/{rest}" if stage in ("eval", "test") and "_" in name else f"train/{name}"


def model_config(model: Any) -> dict[str, Any]:
    """The model's configuration as a dict; empty when it has none."""
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


def arguments_of(args: Any) -> dict[str, Any]:
    """The arguments as values that every tracker can write: a subclass's fields may hold any object."""
    values: dict[str, Any] = json.loads(args.to_json_string())
    return values
