"""The callback that writes a run to TensorBoard, with the name, attributes and methods of transformers'."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from hftrainer.callbacks.state import TrainerState
from hftrainer.plugins import import_adapter
from hftrainer.trackers.base_callbacks import EarlierRun, TrackerCallback, to_tracker_names
from hftrainer.training_args import TrainingArguments


class TensorBoardCallback(TrackerCallback):
    """Writes a run to TensorBoard: arguments and configuration as texts, log values as scalars or texts.

    Args:
        tb_writer: the `SummaryWriter`; default: a writer for `logging_dir`.

    Attributes:
        tb_writer: the writer during training; scripts may set it.
        logging_dir: the folder: `TENSORBOARD_LOGGING_DIR`, or else set at the start of training.
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
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self.logging_dir = None if folder is None else os.path.expanduser(folder)

    def __getstate__(self) -> dict[str, Any]:
        # The writer is an open file of this process.
        return {**super().__getstate__(), "tb_writer": None}

    def _is_writing(self, state: TrainerState) -> bool:
        """Whether this process writes; False if a script set the writer class to None."""
        return super()._is_writing(state) and (self.tb_writer is not None or self._SummaryWriter is not None)

    def _make_loggers(self, args: TrainingArguments) -> list[Any]:
        """Create a logger that writes directly to the folder, with the callback's writer."""
        loggers = import_adapter("lightning", "loggers")
        return [loggers.WriterLogger(functools.partial(self._writer, args), self._path(args))]

    def _path(self, args: TrainingArguments) -> str:
        return super()._path(args) if self.logging_dir is None else self.logging_dir

    def _set_up_once(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        # A subclass may define an unrelated `setup`, since transformers' callback has none.
        if not self._initialized:
            super().setup(args, state, model)

    def _writer(self, args: TrainingArguments, *, create: bool = True) -> Any:
        """The writer, created if needed; None if a script set the writer class to None."""
        if self.tb_writer is None and create:
            self._init_summary_writer(args)
        return self.tb_writer

    def _init_summary_writer(self, args: TrainingArguments) -> None:
        """Create the writer. Subclasses may override this method."""
        if self._SummaryWriter is not None:
            earlier_run = self._take_earlier_run()
            purge_kwargs = {} if earlier_run is None else {"purge_step": earlier_run.step + 1}
            self.tb_writer = self._SummaryWriter(log_dir=self._path(args), **purge_kwargs)

    def run_ids(self) -> dict[str, str]:
        """The folder, unless the script set the writer."""
        folder = self.logging_dir
        is_default = folder is not None and getattr(self.tb_writer, "log_dir", None) == folder
        return {"folder": os.path.abspath(str(folder))} if is_default else {}

    def resume_run(self, args: TrainingArguments, earlier: EarlierRun) -> None:
        """Write to the folder of the earlier run, with a new writer: TensorBoard then ignores its later steps."""
        folder = earlier.ids["folder"]
        if self.run_ids() == earlier.ids:
            self.tb_writer.close()
            self.tb_writer = None
        if self.tb_writer is None and self._is_folder_of_run(args, folder, folder):
            self._earlier_run = earlier

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Write to a separate folder for a hyperparameter trial."""
        super().start_trial(args, name)
        self.tb_writer = self.logging_dir = None

    def _describe(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Write the arguments and the configuration as JSON."""
        logger = self._tracker_logger(args)
        logger.hparams.update(args.to_sanitized_dict())
        logger.experiment.add_text("args", args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            try:
                text = config.to_json_string()
            # The configuration contains objects of the script.
            except TypeError:
                text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=repr)
            logger.experiment.add_text("model_config", text)

    def _write_logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the log line, and flush the file."""
        writer = self._tracker_logger(args).experiment
        for name, value in to_tracker_names(logs).items():
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
        """Write the log line."""
        if state.is_world_process_zero and self._writer(args) is not None:
            super().on_log(args, state, control, logs=logs, model=model, **kwargs)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Close the writer; later values open a new one."""
        if self.tb_writer is not None:
            super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
            self.tb_writer.close()
            self.tb_writer = None
