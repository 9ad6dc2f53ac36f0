"""Comet, written to as transformers does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CometLogger, Logger

from hftrainer_lightning.trackers.tracker import Tracker, adapters_of, arguments_of, config_of, renamed

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerState


class Comet(Tracker):
    """A Comet experiment; a running one is reused. `comet_ml` itself reads the `COMET_*` variables."""

    #: Whether the output folder is uploaded at the end.
    uploads = False

    def open(self) -> Logger:
        """Start or continue an experiment, depending on COMET_MODE; each hyperparameter trial gets its own."""
        import comet_ml

        asked = os.environ.get("COMET_MODE", "").lower()
        mode = "create" if self.trial is not None else asked if asked in ("get_or_create", "get", "create") else None
        online = {"online": True, "offline": False}.get(asked)
        # Lightning's logger cannot start an experiment offline; it uses the running one.
        comet_ml.start(mode=mode, online=online, experiment_config=comet_ml.ExperimentConfig(name=self.args.run_name))
        return CometLogger(name=self.args.run_name)

    def start_trial(self, name: str | None) -> None:
        """Start a new experiment for the trial, and end the previous one."""
        if self._logger is not None:
            self.logger.experiment.end()
        super().start_trial(name)

    def describe(self, model: Any, state: TrainerState) -> None:
        """Write the model's structure, the arguments and the configuration."""
        experiment = self.logger.experiment
        experiment.set_model_graph(str(model))
        config = {"config": config_of(model)} if config_of(model) else {}
        self.logger.log_hyperparams({"args": arguments_of(self.args), **config, **adapters_of(model)})
        if state.is_hyper_param_search:
            experiment.log_optimization(optimization_id=state.trial_name, parameters=state.trial_params)

    def write(self, logs: Mapping[str, Any], state: TrainerState) -> None:
        """Write the line with its step and epoch."""
        self.logger.experiment.log_metrics(renamed(logs), step=state.global_step, epoch=state.epoch)

    def predicted(self, metrics: Mapping[str, Any], model: Any, state: TrainerState) -> None:
        """Write the metrics."""
        self.log(metrics, model, state)

    def end(self, model: Any, state: TrainerState, save_model: Callable[[str], None]) -> None:
        """Upload the output folder if COMET_LOG_ASSETS is set. The experiment stays open for later log lines."""
        super().end(model, state, save_model)
        if self.uploads:
            self.logger.experiment.log_asset_folder(
                str(self.args.output_dir), recursive=True, log_file_name=True, step=state.global_step
            )
