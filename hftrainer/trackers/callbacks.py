"""Callbacks that write a run to W&B, MLflow or Comet, with the names, attributes and methods of transformers'.

Scripts find them in `callback_handler.callbacks`, use their writer, subclass them, or remove them. Each opens a
Lightning logger, which Lightning's callbacks also use.
"""

from __future__ import annotations

import enum
import functools
import importlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hftrainer.base.config_files import env_flag
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.weights import save_weights
from hftrainer.compat import libraries
from hftrainer.errors import InvalidSetup
from hftrainer.plugins import import_adapter
from hftrainer.trackers.base_callbacks import TrackerCallback, arguments_of, model_config, peft_config, to_tracker_names
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class WandbLogModel(str, enum.Enum):
    """Values of `WANDB_LOG_MODEL`: the models to upload to W&B."""

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
            raise TypeError(f"WANDB_LOG_MODEL={value!r} ({type(value).__name__}) must be a string.")
        if value.lower() in ("end", "checkpoint", "false"):
            return cls(value.lower())
        logger.warning("WANDB_LOG_MODEL=%r is not 'end', 'checkpoint' or 'false': models are not uploaded.", value)
        return cls.FALSE


#: Metrics of a run's last log line: one number per run, not a curve.
SUMMARY_METRICS = frozenset(
    {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
)
_SIZE = "model/num_parameters"
#: Variables with which users choose the run.
_WANDB_RUN = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")


class WandbCallback(TrackerCallback):
    """Writes to a W&B run. An open run is reused and stays open. `wandb.init` reads the `WANDB_*` variables."""

    name = "wandb"
    _ids = ("id", "lines")

    def __init__(self) -> None:
        super().__init__()
        self._log_model = WandbLogModel(os.environ.get("WANDB_LOG_MODEL", "false"))

    @functools.cached_property
    def _wandb(self) -> Any:
        """The library; a script may set it to None, as in transformers' callback."""
        return importlib.import_module("wandb")

    def _is_writing(self, state: TrainerState) -> bool:
        return super()._is_writing(state) and self._wandb is not None

    def _make_loggers(self, args: TrainingArguments) -> list[Any]:
        """Use the open run, or start one, named after `run_name` or the hyperparameter trial."""
        name_options: dict[str, Any] = {"name": args.run_name}
        if self._trial is not None:
            name_options = {"name": self._trial, "group": args.run_name or str(args.output_dir)}
        run = self._wandb.run
        if run is None:
            project = os.environ.get("WANDB_PROJECT", "huggingface")
            name_options = {key: value for key, value in name_options.items() if value is not None}
            if (logger := self._reopen_run(project, name_options)) is not None:
                return [logger]
            run = self._wandb.init(project=project, **name_options)
        return [import_adapter("lightning", "loggers").TrainStepLogger(run)]

    def _reopen_run(self, project: str, name_options: Mapping[str, Any]) -> Any:
        """A logger for the checkpoint's run, with the lines up to it; None without a run that can continue."""
        earlier_run = self._take_earlier_run()
        if earlier_run is None or any(os.environ.get(name) for name in _WANDB_RUN):
            return None
        run_id, lines = earlier_run.ids["id"], int(earlier_run.ids["lines"])
        try:
            run = self._wandb.init(project=project, id=run_id, resume="must")
        except self._wandb.Error as error:
            self._warn_about_new_run(run_id, error)
            return None
        # Callbacks may add lines without a step to the log, and send other lines.
        is_all_ours = lines == len(earlier_run.log) and all("step" in line for line in earlier_run.log)
        line_count = run.starting_step
        if line_count > lines:
            run = self._rewind(run, project, name_options, lines, earlier_run.step)
        elif line_count < lines and not is_all_ours:
            reason = (
                f"it has {line_count} of {lines} lines. Some are not from the Trainer, which restores only its own."
            )
            if not line_count:
                run.finish()
                self._warn_about_new_run(run_id, reason)
                return None
            logger.warning("The W&B run %s lacks lines: %s", run_id, reason)
        tracker = import_adapter("lightning", "loggers").TrainStepLogger(run)
        # W&B lost the lines that were not sent before a kill. Offline, the files of each process contain all lines.
        for line in earlier_run.log[line_count:] if line_count < lines and is_all_ours else ():
            self._write_line(tracker, {name: value for name, value in line.items() if name != "step"}, line["step"])
        return tracker

    def _rewind(self, run: Any, project: str, name_options: Mapping[str, Any], lines: int, step: int) -> Any:
        """The same run with only its first lines; if the server cannot rewind, with all lines and a mark."""
        init = functools.partial(self._wandb.init, project=project)
        run.finish()
        try:
            # W&B counts lines from 0. A run without remaining lines is started again.
            return init(resume_from=f"{run.id}?_step={lines - 1}") if lines else init(id=run.id, **name_options)
        except self._wandb.Error as error:
            logger.warning(
                "W&B cannot rewind the run %s to step %d, so it has later steps twice: %s", run.id, step, error
            )
        # W&B's service otherwise keeps the id of a run that could not be opened.
        self._wandb.teardown()
        run = init(id=run.id, resume="must")
        run.config.update({"resumed_from_step": step}, allow_val_change=True)
        return run

    def run_ids(self) -> dict[str, str]:
        """The run's id, and its number of lines."""
        if not self._open_loggers:
            return {}
        run = self._open_loggers[0].experiment
        return {"id": run.id, "lines": str(max(run.step, run.starting_step))}

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """End the previous run, and start a new run for the trial. In a sweep, the agent has already started it."""
        if self._wandb is not None and (self._wandb.run is None or self._wandb.run.sweep_id is None):
            self._wandb.finish()
        self._open_loggers = None
        super().start_trial(args, name)

    def _describe(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Write the configuration; if environment variables request it, watch the model and upload its structure."""
        run = self._tracker_logger(args).experiment
        config = {**peft_config(model), **model_config(model), **arguments_of(args)}
        run.config.update(config, allow_val_change=True)
        if hasattr(model, "num_parameters"):
            run.config.update({_SIZE: libraries.num_parameters(model)}, allow_val_change=True)
        watch_mode = os.environ.get("WANDB_WATCH", "false")
        if watch_mode in ("all", "parameters", "gradients"):
            run.watch(model, log=watch_mode, log_freq=max(100, int(state.logging_steps)))
        if self._log_model != "false":
            size = run.config.get(_SIZE)
            info = {"model_config": model_config(model) or None, "num_parameters": size, "initial_model": True}
            with tempfile.TemporaryDirectory() as folder:
                self._upload(args, _write_structure(folder, model), info, ["base_model"])

    def _write_logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the log line; values for the complete run go to its summary."""
        self._write_line(self._tracker_logger(args), logs, state.global_step)

    def _write_line(self, logger: Any, logs: Mapping[str, Any], step: int) -> None:
        for name in SUMMARY_METRICS & logs.keys():
            logger.experiment.summary[name] = logs[name]
        curves = {name: value for name, value in logs.items() if name not in SUMMARY_METRICS}
        logger.log_metrics(to_tracker_names(curves), step=step)

    def on_predict(self, args, state, control, metrics, model=None, **kwargs):
        """Write the metrics of a prediction."""
        self._set_up_once(args, state, model)
        if self._is_writing(state):
            self._tracker_logger(args).log_metrics(to_tracker_names(metrics))

    def on_save(self, args, state, control, **kwargs):
        """Upload the checkpoint if WANDB_LOG_MODEL=checkpoint."""
        if self._is_writing(state) and self._log_model == "checkpoint":
            run = self._tracker_logger(args).experiment
            aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
            metadata = {**_summary(run), _SIZE: run.config.get(_SIZE)}
            self._upload(args, self._checkpoint_path(args, state), metadata, aliases)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Upload the model if WANDB_LOG_MODEL requests it. The run stays open for later log lines."""
        super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
        if not self._is_writing(state) or self._log_model == "false":
            return
        run = self._tracker_logger(args).experiment
        metadata = _summary(run)
        if args.load_best_model_at_end:
            metadata = {
                f"eval/{args.metric_for_best_model}": state.best_metric,
                # The typo is transformers', and users may look for this name.
                "train/total_floss": state.total_flos,
                _SIZE: run.config.get(_SIZE),
            }
        with tempfile.TemporaryDirectory() as folder:
            if self._save_model is not None:
                self._save_model(folder)
            else:
                save_weights(model, folder)
                if processing_class is not None:
                    processing_class.save_pretrained(folder)
            self._upload(args, _write_structure(folder, model), {**metadata, "final_model": True}, ["final_model"])

    def _upload(self, args: TrainingArguments, folder: str, metadata: Mapping[str, Any], aliases: list[str]) -> None:
        """Log a folder as a version of the run's model."""
        run = self._tracker_logger(args).experiment
        is_unnamed = args.run_name is None or args.run_name == args.output_dir
        # W&B refuses other characters in an artifact's name.
        name = re.sub(r"[^\w.-]", "-", run.id if is_unnamed else run.name)
        artifact = self._wandb.Artifact(f"model-{name}", type="model", metadata=dict(metadata))
        artifact.add_dir(folder)
        run.log_artifact(artifact, aliases=aliases)


def _summary(run: Any) -> dict[str, Any]:
    """The numbers in the summary of a W&B run."""
    return {k: v for k, v in dict(run.summary).items() if isinstance(v, (int, float)) and not k.startswith("_")}


def _write_structure(folder: str, model: Any) -> str:
    """Write the model's layers to a text file; returns the folder."""
    with open(os.path.join(folder, "model_architecture.txt"), "w", encoding="utf-8") as file:
        print(model, file=file)
    return folder


#: The tag with the steps at which an MLflow run was resumed.
_RESUME_TAG = "hftrainer.resumed_from_step"
#: Characters that MLflow's servers do not accept in a metric's name.
_INVALID_CHARACTERS = re.compile(r"[^0-9A-Za-z_\-. :/]")


class MLflowCallback(TrackerCallback):
    """Writes to an MLflow run, with unchanged names. An active run is reused and stays active.

    `mlflow` reads MLFLOW_TRACKING_URI and MLFLOW_RUN_ID, and has defaults without them.
    """

    name = "mlflow"
    _ids = ("id",)

    _auto_end_run = _log_artifacts = False
    #: The id of the run, if this callback started it.
    _started_run_id: str | None = None
    #: Values of the checkpoint's step and later steps in a resumed run, by name and step.
    _stored_values: dict[tuple[str, int], float] | None = None

    @functools.cached_property
    def _ml_flow(self) -> Any:
        """The library; a script may set it to None, as in transformers' callback."""
        return importlib.import_module("mlflow")

    def _is_writing(self, state: TrainerState) -> bool:
        return super()._is_writing(state) and self._ml_flow is not None

    def _make_loggers(self, args: TrainingArguments) -> list[Any]:
        """Use the active run, or start one."""
        nested = env_flag("MLFLOW_NESTED_RUN")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        run = self._ml_flow.active_run()
        if run is None or nested or os.environ.get("MLFLOW_RUN_ID"):
            if experiment:
                self._ml_flow.set_experiment(experiment)
            run = self._reopen_run(nested) or self._ml_flow.start_run(run_name=args.run_name, nested=nested)
            self._started_run_id = run.info.run_id
        make_logger = import_adapter("lightning", "loggers").MLFlowLogger
        return [make_logger(tracking_uri=self._ml_flow.get_tracking_uri(), run_id=run.info.run_id)]

    def _reopen_run(self, nested: bool) -> Any:
        """Activate the checkpoint's run again; None without a run that can continue.

        MLflow cannot delete values, so existing values of later steps are not written again.
        """
        self._stored_values = None
        earlier_run = self._take_earlier_run()
        if earlier_run is None or os.environ.get("MLFLOW_RUN_ID"):
            return None
        run_id, step = earlier_run.ids["id"], earlier_run.step
        try:
            run = self._ml_flow.start_run(run_id=run_id, nested=nested)
        except self._ml_flow.exceptions.MlflowException as error:
            self._warn_about_new_run(run_id, error)
            return None
        client = self._ml_flow.MlflowClient()
        curves = [client.get_metric_history(run_id, name) for name in run.data.metrics]
        self._stored_values = {
            (point.key, point.step): point.value for curve in curves for point in curve if point.step >= step
        }
        steps = [run.data.tags[_RESUME_TAG]] if _RESUME_TAG in run.data.tags else []
        client.set_tag(run_id, _RESUME_TAG, ", ".join([*steps, str(step)]))
        return run

    def run_ids(self) -> dict[str, str]:
        """The run's id, if this callback started it."""
        run_id = self._open_loggers[0].run_id if self._open_loggers else None
        return {"id": str(run_id)} if run_id is not None and run_id == self._started_run_id else {}

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """Start a new run for the trial, unless the user's run is active."""
        self._open_loggers = None
        super().start_trial(args, name)

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Open a run or use the active run, and write the hyperparameters."""
        self._log_artifacts = env_flag("HF_MLFLOW_LOG_ARTIFACTS")
        super().setup(args, state, model, **kwargs)
        self._auto_end_run = self._started_run_id is not None

    def _describe(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Write the parameters that MLflow can store, and the tags of MLFLOW_TAGS."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        values = {**model_config(model), **arguments_of(args)}
        if env_flag("MLFLOW_FLATTEN_PARAMS"):
            values = _flatten(values)
        for name in [name for name, value in values.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH]:
            del values[name]
            logger.warning(
                "MLflow does not get the parameter %s, which is longer than %d characters. "
                "MLFLOW_FLATTEN_PARAMS=1 writes each entry of a dict separately.",
                name,
                MAX_PARAM_VAL_LENGTH,
            )
        limit = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        client, run_id = self._tracker_logger(args).experiment, self._tracker_logger(args).run_id
        # MLflow refuses to change a parameter.
        old_params = {} if self._stored_values is None else client.get_run(run_id).data.params
        items = [item for item in values.items() if item[0] not in old_params][
            : int(limit) if limit.isdigit() else None
        ]
        for first in range(0, len(items), MAX_PARAMS_TAGS_PER_BATCH):
            batch = items[first : first + MAX_PARAMS_TAGS_PER_BATCH]
            client.log_batch(run_id, params=[Param(name, str(value)) for name, value in batch])
        if tags := os.environ.get("MLFLOW_TAGS"):
            client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in json.loads(tags).items()])

    def _write_logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the numbers; in names, replace characters that MLflow does not allow."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = self._numbers(
            {name: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for name, v in logs.items()}
        )
        metrics = [Metric(_INVALID_CHARACTERS.sub("_", name), v, now, state.global_step) for name, v in numbers.items()]
        client, run_id = self._tracker_logger(args).experiment, self._tracker_logger(args).run_id
        if not self._has_line(metrics):
            client.log_batch(run_id, metrics=metrics)

    def _has_line(self, metrics: Sequence[Any]) -> bool:
        """Whether a resumed run already has a line, judged by its losses, since times differ between processes."""
        losses = [metric for metric in metrics if metric.key.endswith("loss")] or metrics
        old_values = self._stored_values or {}
        # Compare texts, so that NaN equals NaN.
        return all(str(old_values.get((loss.key, loss.step))) == str(float(loss.value)) for loss in losses)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Set up, and reopen a run that an earlier training ended."""
        super().on_train_begin(args, state, control, model=model, **kwargs)
        if self._is_writing(state) and self._started_run_id is not None and self._ml_flow.active_run() is None:
            self._ml_flow.start_run(run_id=self._started_run_id)

    def on_save(self, args, state, control, **kwargs):
        """Log the checkpoint as a model if HF_MLFLOW_LOG_ARTIFACTS is set."""
        if self._is_writing(state) and self._log_artifacts:
            checkpoint, pyfunc = self._checkpoint_path(args, state), self._ml_flow.pyfunc
            model = {"artifacts": {"model_path": checkpoint}, "python_model": pyfunc.PythonModel()}
            pyfunc.log_model(name=os.path.basename(checkpoint), **model)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """End the run, unless the script started it. MLflow still accepts later values."""
        if self._is_writing(state) and self._auto_end_run and self._ml_flow.active_run() is not None:
            self._ml_flow.end_run()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of nested dicts, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= _flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


class CometCallback(TrackerCallback):
    """Writes to a Comet experiment. A running experiment is reused. `comet_ml` reads the `COMET_*` variables."""

    name = "comet_ml"
    _ids = ("key",)
    _log_assets = False

    @property
    def _experiment(self) -> Any:
        """The open Comet experiment; None if none is open."""
        return self._open_loggers[0].experiment if self._open_loggers else None

    def _make_loggers(self, args: TrainingArguments) -> list[Any]:
        """Start or continue an experiment, depending on COMET_MODE; each hyperparameter trial gets a new one."""
        import comet_ml

        value = os.environ.get("COMET_MODE", "").lower()
        mode = "create" if self._trial is not None else value if value in ("get_or_create", "get", "create") else None
        online = {"online": True, "offline": False}.get(value)
        # Lightning's logger cannot start an offline experiment, but it uses a running one.
        if not self._resume(online):
            config = comet_ml.ExperimentConfig(name=args.run_name)
            try:
                comet_ml.start(mode=mode, online=online, experiment_config=config)
            except ValueError as error:
                # Comet has no key.
                raise InvalidSetup(f"report_to='comet_ml': {str(error).strip()}, or COMET_MODE=offline.") from None
        return [import_adapter("lightning", "loggers").CometLogger(name=args.run_name)]

    def _resume(self, online: bool | None) -> bool:
        """Continue the checkpoint's experiment; False without an experiment that can continue."""
        import comet_ml

        earlier_run = self._take_earlier_run()
        experiment = comet_ml.get_running_experiment()
        is_chosen = os.environ.get("COMET_EXPERIMENT_KEY") or os.environ.get("COMET_MODE", "").lower() == "create"
        if earlier_run is None or is_chosen or not (experiment is None or experiment.ended):
            return False
        key = earlier_run.ids["key"]
        try:
            experiment = comet_ml.start(mode="get", experiment_key=key, online=online)
        except comet_ml.exceptions.CometException as error:
            self._warn_about_new_run(key, error)
            return False
        # Comet cannot delete the values of later steps.
        experiment.log_other("resumed_from_step", earlier_run.step)
        return True

    def run_ids(self) -> dict[str, str]:
        """The experiment's key; empty offline, where a resumed run may overwrite the files of its key."""
        import comet_ml

        is_online = self._experiment is not None and not isinstance(self._experiment, comet_ml.OfflineExperiment)
        return {"key": self._experiment.get_key()} if is_online else {}

    def start_trial(self, args: TrainingArguments, name: str | None) -> None:
        """End the previous experiment, and start a new experiment for the trial."""
        if self._experiment is not None:
            self._experiment.end()
        super().start_trial(args, name)

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Start or continue an experiment, and write the hyperparameters."""
        self._log_assets = env_flag("COMET_LOG_ASSETS")
        super().setup(args, state, model, **kwargs)

    def _describe(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Write the model's structure, the arguments and the configuration."""
        logger = self._tracker_logger(args)
        logger.experiment.set_model_graph(str(model))
        config = {"config": model_config(model)} if model_config(model) else {}
        logger.log_hyperparams({"args": arguments_of(args), **config, **peft_config(model)})
        if state.is_hyper_param_search:
            logger.experiment.log_optimization(optimization_id=state.trial_name, parameters=state.trial_params)

    def _write_logs(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Write the log line with its step and epoch."""
        line = to_tracker_names(logs)
        self._tracker_logger(args).experiment.log_metrics(line, step=state.global_step, epoch=state.epoch)

    def on_predict(self, args, state, control, metrics, model=None, **kwargs):
        """Write the metrics of a prediction."""
        self.on_log(args, state, control, logs=metrics, model=model)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        """Upload the output folder if COMET_LOG_ASSETS is set. The experiment stays open for later log lines."""
        super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
        if self._is_writing(state) and self._log_assets:
            self._tracker_logger(args).experiment.log_asset_folder(
                str(args.output_dir), recursive=True, log_file_name=True, step=state.global_step
            )
