"""Hyperparameter search with Ray Tune, which trains each trial in a separate process, on one machine or several."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer import errors
from hftrainer.arguments import old_names
from hftrainer.checkpointing.layout import PREFIX_CHECKPOINT_DIR
from hftrainer.search.backend import SearchBackend, check_keywords, check_limits, no_trial_message, read_directions
from hftrainer.search.trial_arguments import check_names, model_takes_trial
from hftrainer.search.workers import PickledTrainer, pickle_trainer
from hftrainer.trainer_utils import BestRun, default_hp_space_ray

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: Keyword arguments of `ray.tune.run` that the search sets → their names in `hyperparameter_search`.
_SEARCH_ARGUMENTS = {"run_or_experiment": "hp_space", "config": "hp_space", "num_samples": "n_trials"}
#: The objectives of a trial to compare; see `ray.tune.ExperimentAnalysis.get_best_trial`.
_SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")
#: User errors, which would fail every trial.
_USER_ERRORS = (errors.InvalidArgument, errors.MissingPackage, errors.UnknownArgument, errors.UnsupportedArgument)


class RaySearch(SearchBackend):
    """A search with Ray Tune. Its trials are dicts of hyperparameters.

    The object is pickled with the Trainer for the process of each trial.
    """

    name = "ray"
    install = "'ray[tune]'"
    default_hp_space = staticmethod(default_hp_space_ray)

    #: Step and metrics to report to Ray.
    _pending_report: tuple[int, dict[str, Any]] | None = None

    @classmethod
    def is_available(cls) -> bool:
        """Whether Ray is installed with the dependencies of Tune."""
        return all(importlib.util.find_spec(module) is not None for module in ("ray", "pandas", "pyarrow"))

    # ---- In the process of the search --------------------------------------------------------------------------

    def run(self, trainer: Trainer, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun:
        """Train `n_trials` trials, and return the best one.

        Raises:
            InvalidArgument: for an invalid value, here or in a trial.
            UnknownArgument: for a name in the space that is not a training argument, or an unknown keyword.
            UnsupportedArgument: for settings that Ray does not support.
            DamagedCheckpoint: if the state of the search to resume is truncated.
            SearchFailed: if no trial was completed.
        """
        from ray import tune

        self.directions = read_directions(direction)
        scope = _objective_scope(trainer.args)
        space = self.space(trainer)
        check_names(trainer.args, space, allow_model_arguments=model_takes_trial(trainer.model_init))
        self._check_arguments(trainer.args, n_trials, kwargs)
        # This frees device memory for the trials.
        self.parts.training_runner.release_trial()
        trainer.callback_handler.eval_dataloader = None
        options, stopper = self._options(trainer.args, kwargs), _stop_on_user_error()
        options["callbacks"] = [*(options.get("callbacks") or ()), stopper]
        try:
            analysis = tune.run(
                tune.with_parameters(train_trial, packed_trainer=pickle_trainer(self.parts)),
                config=dict(space),
                num_samples=-1 if n_trials is None else n_trials,
                **options,
            )
        except tune.TuneError:
            if stopper.error is not None:
                raise stopper.error from None
            raise
        return self._best_run(analysis, scope)

    def _check_arguments(self, args: Any, n_trials: Any, kwargs: Mapping[str, Any]) -> None:
        """Check the arguments before Ray starts."""
        from ray import tune

        keywords = [name for name in inspect.signature(tune.run).parameters if not name.startswith("_")]
        check_keywords("Ray Tune", kwargs, keywords, _SEARCH_ARGUMENTS)
        check_limits(n_trials, kwargs.get("time_budget_s"), "time_budget_s")
        if len(self.directions) > 1:
            raise errors.UnsupportedArgument(
                f"direction={self.directions}: Ray Tune has one objective; use backend='optuna' for several."
            )
        if args.world_size > 1:
            raise errors.UnsupportedArgument(
                f"backend='ray' starts a process for each trial, but a launcher has started {args.world_size}. Start "
                "the script without a launcher; on several GPUs, set lightning_config={'devices': 1}."
            )
        resources = kwargs.get("resources_per_trial")
        if isinstance(resources, Mapping) and resources.get("gpu", 0) > 1:
            raise errors.UnsupportedArgument(
                f"resources_per_trial={resources}: a trial uses one GPU or a fraction of one. Set gpu to at most 1."
            )
        if kwargs.get("resume"):
            _check_state(kwargs)
        _check_scheduler(args, kwargs.get("scheduler"))

    def _options(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of `tune.run`, with our defaults."""
        options: dict[str, Any] = {
            # Ray counts both types of devices as GPUs.
            "resources_per_trial": {"cpu": 1, "gpu": 1} if args.device.type in ("cuda", "xpu") else {"cpu": 1},
            "raise_on_failed_trial": False,
        }
        if not any(getattr(kwargs.get(option), "metric", None) for option in ("scheduler", "search_alg")):
            options |= {"metric": "objective", "mode": self.directions[0][:3]}
        return {**options, **kwargs}

    def _best_run(self, analysis: Any, scope: str) -> BestRun:
        """The best trial that did not fail; the first one if several are equal."""
        scores: list[tuple[float, Any]] = []
        mode = self.directions[0][:3]
        for trial in analysis.trials:
            score = trial.metric_analysis.get("objective", {}).get(mode if scope == "all" else scope, math.nan)
            if trial.status != "ERROR" and math.isfinite(score):
                scores.append((score, trial))
        if not scores:
            states = [trial.status.lower() for trial in analysis.trials]
            raise errors.SearchFailed(no_trial_message(states, filter(None, map(_explain_failure, analysis.trials))))
        if unfinished_trials := sum(trial.status not in ("TERMINATED", "ERROR") for trial in analysis.trials):
            logger.warning(
                "The search was stopped before %d of its trials finished. resume=True with the same name and "
                "storage_path continues it.",
                unfinished_trials,
            )
        best_trial = (min if mode == "min" else max)(scores, key=lambda pair: pair[0])[1]
        return BestRun(best_trial.trial_id, best_trial.last_result["objective"], best_trial.config, analysis)

    # ---- In the process of a trial -----------------------------------------------------------------------------

    def run_id(self, trial: Any) -> str:
        """Ray's id of the current trial."""
        from ray import tune

        return str(tune.get_context().get_trial_id())

    def train(self, trainer: Trainer, trial: dict[str, Any]) -> None:
        """Train a trial. Resume from a checkpoint if Ray provides one, of this trial or another."""
        from ray import tune

        # Trackers distinguish trials by their names.
        if trainer.hp_name is None:
            trainer.hp_name = lambda trial: f"run-{self.run_id(trial)}"
        checkpoint = tune.get_checkpoint()
        try:
            with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
                path = None if folder is None else str(next(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")))
                self.train_and_evaluate(trainer, trial, checkpoint=path)
            self.send_pending_report(trainer)
        finally:
            self.parts.training_runner.release_trial()

    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Store the report. Ray gets it after the checkpoint of this step, if one is due."""
        self.send_pending_report(trainer)
        self._pending_report = step, {**metrics, "objective": float(objective)}

    def send_pending_report(self, trainer: Trainer) -> None:
        """Report the last evaluation to Ray, with the checkpoint of its step if one exists.

        Raises:
            SystemExit: if Ray ends the trial.
        """
        from ray import tune

        if self._pending_report is None:
            return
        (step, metrics), self._pending_report = self._pending_report, None
        saved_folder = self._find_checkpoint(trainer, step)
        # Ray copies this folder, which holds only the checkpoint.
        with tempfile.TemporaryDirectory() as folder:
            if saved_folder is not None:
                Path(folder, saved_folder.name).symlink_to(saved_folder, target_is_directory=True)
            checkpoint = None if saved_folder is None else tune.Checkpoint.from_directory(folder)
            try:
                tune.report(metrics, checkpoint=checkpoint)
            except SystemExit:
                # Ray raises this when it ends a trial, but may kill the process at the end of the search.
                self.parts.call_callbacks("on_train_end")
                raise

    def _find_checkpoint(self, trainer: Trainer, step: int) -> Path | None:
        """The checkpoint of a step, if a trial can resume from it."""
        if self.parts.run.attempt.last_saved_step != step or trainer.args.save_only_model:
            return None
        self.parts.checkpoint_saver.wait_for_save()
        folder = Path(trainer._get_output_dir(self.parts.run.trial), f"{PREFIX_CHECKPOINT_DIR}-{step}").absolute()
        return folder if folder.is_dir() and not self.parts.checkpoint_writer.has_failed else None


def train_trial(config: dict[str, Any], packed_trainer: PickledTrainer) -> None:
    """Train a trial. Ray calls this in the trial's process."""
    parts = packed_trainer.unpack()
    assert isinstance(parts.search_backend, RaySearch)
    parts.search_backend.train(parts.trainer, config)


def _objective_scope(args: Any) -> str:
    """The objectives of a trial to compare: `ray_scope`, or its successor, the variable RAY_SCOPE."""
    scope, name = old_names.old_argument(args, "ray_scope"), "ray_scope"
    if scope == "last":
        scope, name = os.environ.get("RAY_SCOPE", "last"), "RAY_SCOPE"
    if scope not in _SCOPES:
        raise errors.InvalidArgument(f"{name}={scope!r} is unknown: use one of {', '.join(map(repr, _SCOPES))}.")
    return str(scope)


def _check_state(kwargs: Mapping[str, Any]) -> None:
    """Check that a local state to resume from is complete. Ray would otherwise start a new search.

    Raises:
        DamagedCheckpoint: if a file is truncated, because the search was killed while Ray wrote it.
        InvalidArgument: if the search has no name.
    """
    if not kwargs.get("name"):
        raise errors.InvalidArgument(f"resume={kwargs['resume']!r} needs the name of the search to resume.")
    storage = os.fspath(kwargs.get("storage_path") or "~/ray_results")
    folder = Path(storage, kwargs["name"]).expanduser()
    for path in [] if "://" in storage else folder.glob("experiment_state-*.json"):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            raise errors.DamagedCheckpoint(
                f"{path} is truncated: the search was killed while Ray wrote it, and resume={kwargs['resume']!r} would "
                "start a new search. Remove the file to resume from the previous state, if there is one, or use "
                "another name."
            ) from None


def _check_scheduler(args: Any, scheduler: Any) -> None:
    from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler, PopulationBasedTraining

    if scheduler in (None, "fifo") or type(scheduler) is FIFOScheduler:
        return
    name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
    if args.eval_strategy == "no":
        raise errors.InvalidArgument(
            f"scheduler={name} compares trials during training, but eval_strategy='no' never evaluates them: set "
            "eval_strategy, or remove scheduler."
        )
    resumes_trials = isinstance(scheduler, (HyperBandScheduler, PopulationBasedTraining))
    if (resumes_trials or name in ("hyperband", "hb_bohb")) and (args.save_strategy == "no" or args.save_only_model):
        raise errors.InvalidArgument(
            f"scheduler={name} resumes trials from checkpoints, which need the optimizer's state: set save_strategy to "
            "the value of eval_strategy, and save_only_model=False."
        )


def _stop_on_user_error() -> Any:
    """A Ray callback that stores the first user error of a trial, and ends the search."""
    from ray import tune

    class StopOnUserError(tune.Callback):
        error: Exception | None = None

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            error = _read_error(trial)
            if isinstance(error, _USER_ERRORS):
                self.error = error
                raise error

    return StopOnUserError()


def _read_error(trial: Any) -> Any:
    """A trial's error; None if it did not fail, or its process was killed."""
    from ray import cloudpickle

    path = trial.pickled_error_file
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return getattr(cloudpickle.load(file), "cause", None)


def _explain_failure(trial: Any) -> str | None:
    """Why a trial has no valid objective; None if the reason is unknown."""
    error = _read_error(trial)
    if error is not None:
        return f"{type(error).__name__}: {error}"
    last_objective = trial.last_result.get("objective")
    return None if last_objective is None else f"compute_objective returned {last_objective}"
