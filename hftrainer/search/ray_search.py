"""Searching with Ray Tune: trials in processes of their own, on one machine or on many."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import legacy
from hftrainer.checkpointing.names import PREFIX_CHECKPOINT_DIR
from hftrainer.errors import (
    DamagedCheckpoint,
    InvalidArgument,
    MissingPackage,
    SearchFailed,
    UnknownArgument,
    UnsupportedArgument,
)
from hftrainer.search.backend import SearchBackend, check_end, check_keywords, read_directions, why_none
from hftrainer.search.packing import PackedTrainer, pack
from hftrainer.search.trial_arguments import check_names, model_takes_trial
from hftrainer.trainer_utils import BestRun, default_hp_space_ray

if TYPE_CHECKING:
    from hftrainer.training.trainer_api import TrainerApi

logger = logging.getLogger(__name__)

#: Keywords of `ray.tune.run` that the search sets → what they are called here.
_OURS = {"run_or_experiment": "hp_space", "config": "hp_space", "num_samples": "n_trials"}
#: Which of a trial's objectives make it the best; see `ray.tune.ExperimentAnalysis.get_best_trial`.
_SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")
#: Devices that Ray counts as GPUs.
_GPUS = ("cuda", "xpu")
#: Mistakes that every other trial would make too.
_MISTAKES = (InvalidArgument, MissingPackage, UnknownArgument, UnsupportedArgument)


class RaySearch(SearchBackend):
    """A search with Ray Tune, whose trials are dicts of what was chosen.

    The object travels into the process of each trial with the Trainer.
    """

    name = "ray"
    install = "'ray[tune]'"
    default_hp_space = staticmethod(default_hp_space_ray)

    _due: tuple[int, dict[str, Any]] | None = None

    @classmethod
    def is_available(cls) -> bool:
        """Whether Ray is installed with what Tune needs."""
        return all(importlib.util.find_spec(module) is not None for module in ("ray", "pandas", "pyarrow"))

    # ---- In the process that searches --------------------------------------------------------------------------

    def run(self, trainer: TrainerApi, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun:
        """Run trials until there are `n_trials`, and return the best.

        Raises:
            InvalidArgument: for values that cannot be, and for what a trial finds so.
            UnknownArgument: for a name in the space that is no argument, or a keyword that Ray does not know.
            UnsupportedArgument: for what Ray cannot do.
            DamagedCheckpoint: when the state of a search to go on with was cut off.
            SearchFailed: when no trial has been completed.
        """
        from ray import tune

        self.directions = read_directions(direction)
        scope = _scope(trainer.args)
        space = self.space(trainer)
        check_names(trainer.args, space, for_model_too=model_takes_trial(trainer.model_init))
        self._check(trainer.args, n_trials, kwargs)
        trainer._hftrainer.runner.release_trial()  # trials need the memory of the device
        trainer.callback_handler.eval_dataloader = None
        options, mistakes = self._options(trainer.args, kwargs), _mistakes()
        options["callbacks"] = [*(options.get("callbacks") or ()), mistakes]
        try:
            analysis = tune.run(
                tune.with_parameters(train_trial, packed=pack(trainer)),
                config=dict(space),
                num_samples=-1 if n_trials is None else n_trials,
                **options,
            )
        except tune.TuneError:
            if mistakes.found is not None:
                raise mistakes.found from None
            raise
        return self._best(analysis, scope)

    def _check(self, args: Any, n_trials: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse what cannot work before anything is started."""
        from ray import tune

        known = [name for name in inspect.signature(tune.run).parameters if not name.startswith("_")]
        check_keywords("Ray Tune", kwargs, known, _OURS)
        check_end(n_trials, kwargs.get("time_budget_s"), "time_budget_s")
        if len(self.directions) > 1:
            raise UnsupportedArgument(
                f"direction={self.directions}: Ray Tune has one objective; use backend='optuna' for several."
            )
        if args.world_size > 1:
            raise UnsupportedArgument(
                f"backend='ray' starts the processes of the trials itself, and this is one of {args.world_size}: start "
                "the script without a launcher, on several GPUs with lightning_config={'devices': 1}."
            )
        resources = kwargs.get("resources_per_trial")
        if isinstance(resources, Mapping) and resources.get("gpu", 0) > 1:
            raise UnsupportedArgument(
                f"resources_per_trial={resources}: a trial trains in one process, on one GPU or a part of one."
            )
        if kwargs.get("resume") and not kwargs.get("name"):
            raise InvalidArgument(f"resume={kwargs['resume']!r} needs the name of the search that it goes on with.")
        if kwargs.get("resume"):
            _check_state(kwargs)
        _check_scheduler(args, kwargs.get("scheduler"))

    def _options(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of `tune.run`, with our defaults."""
        options: dict[str, Any] = {
            "resources_per_trial": {"cpu": 1, "gpu": 1} if args.device.type in _GPUS else {"cpu": 1},
            "raise_on_failed_trial": False,
        }
        if not any(getattr(kwargs.get(each), "metric", None) for each in ("scheduler", "search_alg")):
            options |= {"metric": "objective", "mode": self._mode}
        return {**options, **kwargs}

    @property
    def _mode(self) -> str:
        return self.directions[0][:3]

    def _best(self, analysis: Any, scope: str) -> BestRun:
        """The trial with the best objective of those that have not failed; the first of equals."""
        scores: list[tuple[float, Any]] = []
        for trial in analysis.trials:
            score = trial.metric_analysis.get("objective", {}).get(self._mode if scope == "all" else scope, math.nan)
            if trial.status != "ERROR" and math.isfinite(score):
                scores.append((score, trial))
        if not scores:
            reasons = [_reason(trial) for trial in analysis.trials]
            raise SearchFailed(why_none([trial.status.lower() for trial in analysis.trials], filter(None, reasons)))
        if unfinished := sum(trial.status not in ("TERMINATED", "ERROR") for trial in analysis.trials):
            logger.warning(
                "The search was stopped before %d of its trials had ended: resume=True with the same name and "
                "storage_path goes on.",
                unfinished,
            )
        choose = min if self._mode == "min" else max
        best = choose(scores, key=lambda scored: scored[0])[1]
        return BestRun(best.trial_id, best.last_result["objective"], best.config, analysis)

    # ---- In the process of a trial -----------------------------------------------------------------------------

    def hyperparameters(self, trainer: TrainerApi, trial: Any) -> Any:
        """The trial is what was chosen."""
        return trial

    def run_id(self, trial: Any) -> str:
        """Ray's name for the trial in hand."""
        from ray import tune

        return tune.get_context().get_trial_id()

    def train(self, trainer: TrainerApi, trial: dict[str, Any]) -> None:
        """Train a trial, from the checkpoint that Ray gives it, which may be its own or that of another trial."""
        from ray import tune

        if trainer.hp_name is None:  # trackers keep trials apart by it
            trainer.hp_name = lambda trial: f"run-{self.run_id(trial)}"
        trainer.objective = None
        checkpoint = tune.get_checkpoint()
        try:
            with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
                found = None if folder is None else str(next(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")))
                trainer.train(resume_from_checkpoint=found, trial=trial)
            if trainer.objective is None and checkpoint is None:
                metrics = trainer.evaluate()
                trainer.objective = self.checked(trainer.compute_objective(dict(metrics)))
                self.report(trainer, trial, trainer.state.global_step, trainer.objective, metrics)
            self.after_saving(trainer)
        finally:
            trainer._hftrainer.runner.release_trial()

    def report(self, trainer: TrainerApi, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Keep it for Ray until the checkpoint of this step, if there is to be one, is written."""
        self.after_saving(trainer)
        self._due = step, {**metrics, "objective": float(objective)}

    def after_saving(self, trainer: TrainerApi) -> None:
        """Report the last evaluation to Ray, with the checkpoint of its step.

        Raises:
            SystemExit: when Ray ends the trial.
        """
        from ray import tune

        if self._due is None:
            return
        (step, metrics), self._due = self._due, None
        with _only(self._checkpoint_of(trainer, step)) as folder:
            checkpoint = None if folder is None else tune.Checkpoint.from_directory(folder)
            try:
                tune.report(metrics, checkpoint=checkpoint)
            except SystemExit:  # what follows is done if the process is not ended with the search
                trainer._hftrainer.announce("on_train_end")
                raise

    @staticmethod
    def _checkpoint_of(trainer: TrainerApi, step: int) -> Path | None:
        """The checkpoint of a step, if there is one that a trial can go on from."""
        if trainer._hftrainer.run.last_saved_step != step or trainer.args.save_only_model:
            return None
        trainer._hftrainer.saver.wait()
        folder = Path(trainer._get_output_dir(trainer._trial), f"{PREFIX_CHECKPOINT_DIR}-{step}").absolute()
        return folder if folder.is_dir() and not trainer._hftrainer.checkpoint_writer.failed else None


def train_trial(config: dict[str, Any], packed: PackedTrainer) -> None:
    """What Ray calls for each trial, in its process."""
    trainer = packed.unpack()
    assert isinstance(trainer._hftrainer.search, RaySearch)
    trainer._hftrainer.search.train(trainer, config)


@contextlib.contextmanager
def _only(checkpoint: Path | None) -> Iterator[str | None]:
    """A folder with nothing but a checkpoint in it, which Ray copies."""
    if checkpoint is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
        yield folder


def _scope(args: Any) -> str:
    """Which of a trial's objectives count: `ray_scope`, or the environment's RAY_SCOPE, which has taken its place."""
    given, name = legacy.value(args, "ray_scope"), "ray_scope"
    if given == "last":
        given, name = os.environ.get("RAY_SCOPE", "last"), "RAY_SCOPE"
    if given not in _SCOPES:
        raise InvalidArgument(f"{name}={given!r}: give one of {', '.join(map(repr, _SCOPES))}.")
    return given


def _check_state(kwargs: Mapping[str, Any]) -> None:
    """Refuse to go on from a state on this machine that Ray was writing when it was killed: it would begin anew.

    Raises:
        DamagedCheckpoint: with the file.
    """
    folder = Path(kwargs.get("storage_path") or "~/ray_results", kwargs["name"]).expanduser()
    newest = max(folder.glob("experiment_state-*.json"), default=None)
    if newest is None:
        return
    try:
        json.loads(newest.read_bytes())
    except ValueError:
        raise DamagedCheckpoint(
            f"{newest} was cut off when the search was killed, and resume={kwargs['resume']!r} would begin anew. "
            "Remove it to go on from the state before, if there is one, or give another name."
        ) from None


def _check_scheduler(args: Any, scheduler: Any) -> None:
    from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler, PopulationBasedTraining

    if scheduler in (None, "fifo") or type(scheduler) is FIFOScheduler:
        return
    name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
    if args.eval_strategy == "no":
        raise InvalidArgument(
            f"scheduler={name} compares trials while they train, and eval_strategy='no' evaluates none of them: set "
            "eval_strategy, or leave the scheduler out."
        )
    pauses = isinstance(scheduler, (HyperBandScheduler, PopulationBasedTraining)) or name in ("hyperband", "hb_bohb")
    if pauses and (args.save_strategy == "no" or args.save_only_model):
        raise InvalidArgument(
            f"scheduler={name} lets trials go on from checkpoints, their own or those of others, and none is complete: "
            "set save_strategy as eval_strategy is set, and save_only_model=False."
        )


def _mistakes() -> Any:
    """A callback of Ray that ends the search when a trial finds a mistake that all trials would find, and keeps it."""
    from ray import tune

    class Mistakes(tune.Callback):
        found: Exception | None = None

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            error = _error(trial)
            if isinstance(error, _MISTAKES):
                self.found = error
                raise error

    return Mistakes()


def _error(trial: Any) -> Any:
    """What a failed trial has raised; None when it has not failed, or its process has died."""
    from ray import cloudpickle

    path = trial.pickled_error_file
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return getattr(cloudpickle.load(file), "cause", None)


def _reason(trial: Any) -> str | None:
    """Why a trial has no objective; None when nobody knows."""
    error = _error(trial)
    if error is not None:
        return f"{type(error).__name__}: {error}"
    last = trial.last_result.get("objective")
    return None if last is None else f"compute_objective returned {last}"
