"""Weights & Biases, written to as transformers does."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, WandbLogger

from hftrainer.compat import peers
from hftrainer_lightning.trackers.tracker import (
    SUMMARY_METRICS,
    Tracker,
    adapters_of,
    arguments_of,
    config_of,
    renamed,
)

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

#: The curves' x-axis.
STEP = "train/global_step"
_SIZE = "model/num_parameters"


class _TrainStepLogger(WandbLogger):
    """Plots over the Trainer's steps; Lightning's own logger uses an axis of another name."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.experiment.log(dict(metrics) if step is None else {**metrics, STEP: step})


class Wandb(Tracker):
    """A W&B run; an open one is reused, and stays open. `wandb.init` reads the `WANDB_*` variables."""

    #: Which models are uploaded: 'end', 'checkpoint' or 'false'.
    uploads = "false"

    def open(self) -> Logger:
        """Use the open run, or start one, named after `run_name` or the hyperparameter trial."""
        import wandb

        naming: dict[str, Any] = {"name": self.args.run_name}
        if self.trial is not None:
            naming = {"name": self.trial, "group": self.args.run_name or str(self.args.output_dir)}
        run = wandb.run
        if run is None:
            project = os.environ.get("WANDB_PROJECT", "huggingface")
            run = wandb.init(project=project, **{key: value for key, value in naming.items() if value is not None})
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return _TrainStepLogger(experiment=run)

    def start_trial(self, name: str | None) -> None:
        """Start a new run for the trial, and end the previous one. In a sweep, the agent has started it already."""
        import wandb

        if wandb.run is None or wandb.run.sweep_id is None:
            wandb.finish()
        self._logger = None
        super().start_trial(name)

    def describe(self, model: Any, state: TrainerState) -> None:
        """Write the configuration; watch the model and upload its structure if environment variables ask for it."""
        run = self.logger.experiment
        run.config.update({**adapters_of(model), **config_of(model), **arguments_of(self.args)}, allow_val_change=True)
        if hasattr(model, "num_parameters"):
            run.config.update({_SIZE: peers.num_parameters(model)}, allow_val_change=True)
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients"):
            run.watch(model, log=watched, log_freq=max(100, int(state.logging_steps)))
        if self.uploads != "false":
            metadata = {"model_config": config_of(model) or None, **self._size(), "initial_model": True}
            with tempfile.TemporaryDirectory() as folder:
                self._upload(_with_structure(folder, model), metadata, ["base_model"])

    def write(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        """Write the line; values of the whole run go into its summary."""
        run = self.logger.experiment
        for name in SUMMARY_METRICS & logs.keys():
            run.summary[name] = logs[name]
        curves = {name: value for name, value in logs.items() if name not in SUMMARY_METRICS}
        self.logger.log_metrics(renamed(curves), step=state.global_step)

    def predicted(self, metrics: Mapping[str, Any], model: Any, state: TrainerState) -> None:
        """Write the metrics."""
        self.describe_once(model, state)
        self.logger.log_metrics(renamed(metrics))

    def saved(self, checkpoint: str, state: TrainerState) -> None:
        """Upload the checkpoint if WANDB_LOG_MODEL=checkpoint."""
        if self.uploads == "checkpoint":
            aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self._upload(checkpoint, {**self._summary(), _SIZE: self._size()["num_parameters"]}, aliases)

    def end(self, model: Any, state: TrainerState, save_model: Callable[[str], None]) -> None:
        """Upload the model if WANDB_LOG_MODEL asks for it. The run stays open for later log lines."""
        super().end(model, state, save_model)
        if self.uploads == "false":
            return
        metadata = self._summary()
        if self.args.load_best_model_at_end:
            metadata = {
                f"eval/{self.args.metric_for_best_model}": state.best_metric,
                "train/total_floss": state.total_flos,  # spelled so by transformers, whose users look for it
                _SIZE: self._size()["num_parameters"],
            }
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder)
            self._upload(_with_structure(folder, model), {**metadata, "final_model": True}, ["final_model"])

    def _size(self) -> dict[str, Any]:
        return {"num_parameters": self.logger.experiment.config.get(_SIZE)}

    def _summary(self) -> dict[str, Any]:
        summary = dict(self.logger.experiment.summary)
        return {k: v for k, v in summary.items() if isinstance(v, (int, float)) and not k.startswith("_")}

    def _upload(self, folder: str, metadata: Mapping[str, Any], aliases: list[str]) -> None:
        """Log a folder as a version of the run's model."""
        import wandb

        run = self.logger.experiment
        unnamed = self.args.run_name is None or self.args.run_name == self.args.output_dir
        name = re.sub(r"[^\w.-]", "-", run.id if unnamed else run.name)  # W&B refuses others in an artifact's name
        artifact = wandb.Artifact(f"model-{name}", type="model", metadata=dict(metadata))
        artifact.add_dir(folder)
        run.log_artifact(artifact, aliases=aliases)


def _with_structure(folder: str, model: Any) -> str:
    """Write the model's layers to a text file; returns the folder."""
    with open(os.path.join(folder, "model_architecture.txt"), "w", encoding="utf-8") as file:
        print(model, file=file)
    return folder
