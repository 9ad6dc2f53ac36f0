"""Searching with sweeps of Weights & Biases."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.reporting.tracker_callbacks import WandbCallback
from hftrainer.search.backend import SearchBackend, check_keywords, read_directions, why_none
from hftrainer.search.trial_arguments import check_names, model_takes_trial
from hftrainer.trainer_utils import BestRun, default_hp_space_wandb

if TYPE_CHECKING:
    from hftrainer.training.trainer_api import TrainerApi

logger = logging.getLogger(__name__)

#: What `metric` calls the number that `compute_objective` returns; it is logged under this name then.
OBJECTIVE = "objective"


class _TrialFailed(Exception):
    """Tells W&B's agent that a run has failed, without a traceback that would hold the model."""


class WandbSearch(SearchBackend):
    """A search in which W&B's server chooses: it keeps the sweep, and agents anywhere train runs of it.

    Attributes:
        metric: what the server compares runs by.
        best: of the runs that this process has trained.
        failed: why runs of this process have failed.
    """

    name = "wandb"
    install = "wandb"
    default_hp_space = staticmethod(default_hp_space_wandb)

    metric: str

    def __init__(self) -> None:
        self.best: BestRun | None = None
        self.failed: list[str] = []

    def run(self, trainer: TrainerApi, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun:
        """Begin a sweep, or take part in the one that `sweep_id` names, and train up to `n_trials` of its runs.

        Args:
            trainer: trains the runs.
            n_trials: runs that this process trains; None goes on until the sweep is finished.
            direction: 'minimize' or 'maximize'.
            kwargs: `sweep_id`, `project`, `entity`, `name` of a new sweep, `metric` (default 'eval/loss'), and
                `max_consecutive_failed_runs`.

        Raises:
            InvalidArgument: for a space or a direction that cannot be.
            UnknownArgument: for another keyword, and for a parameter that is no argument.
            UnsupportedArgument: for several objectives or processes.
            SearchFailed: when no run was completed here.
        """
        import wandb

        self.directions = read_directions(direction)
        check_keywords("W&B", kwargs, list(inspect.signature(_options).parameters), {})
        options = _options(**kwargs)
        self.metric = options["metric"]
        if len(self.directions) > 1:
            raise UnsupportedArgument(f"direction={direction!r}: a sweep has one objective; use backend='optuna'.")
        if trainer.args.world_size > 1:
            raise UnsupportedArgument(
                "backend='wandb' trains a run in one process: start the script once for each device, with the sweep_id "
                "of the first; or use backend='optuna', whose trials several processes train together."
            )
        sweep, place = options["sweep_id"], {name: options[name] for name in ("project", "entity")}
        if sweep is None:
            sweep = wandb.sweep(self._space(trainer, options["name"]), **place)
        with _reporting(trainer):
            wandb.agent(
                sweep,
                function=lambda: self._train(trainer),
                count=n_trials,
                max_consecutive_failed_runs=options["max_consecutive_failed_runs"],
                **place,
            )
        return self._best(sweep)

    def hyperparameters(self, trainer: TrainerApi, trial: Any) -> Any:
        """What the server has chosen."""
        return trial

    def run_id(self, trial: Any) -> str:
        """The id of the run."""
        import wandb

        assert wandb.run is not None
        return str(wandb.run.id)

    def report(self, trainer: TrainerApi, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Log the objective, if the server is to compare runs by it; all other metrics go by the tracker."""
        if self.metric == OBJECTIVE:
            import wandb

            wandb.log({OBJECTIVE: objective, "train/global_step": step})

    def _space(self, trainer: TrainerApi, name: str | None) -> dict[str, Any]:
        """The configuration of the sweep that `hp_space` describes."""
        space = self.space(trainer)
        if not isinstance(space, Mapping) or not isinstance(space.get("parameters"), Mapping):
            raise InvalidArgument(
                f"hp_space returned {space!r}: for a sweep it must return its configuration, a dict with 'method' and "
                "'parameters'."
            )
        check_names(trainer.args, space["parameters"], for_model_too=model_takes_trial(trainer.model_init))
        metric = {**space.get("metric", {}), "goal": self.directions[0], "name": self.metric}
        return {**space, "metric": metric, **({"name": name} if name else {})}

    def _train(self, trainer: TrainerApi) -> None:
        """Train the run that the agent has been given."""
        import wandb

        run = wandb.run or wandb.init()
        chosen = dict(run.config)
        if trainer.hp_name is not None:
            run.name = trainer.hp_name(chosen)
        try:
            objective, reason = self._objective(trainer, chosen), None
        except Exception as error:
            logger.exception("The run %s has failed.", run.id)
            objective, reason = math.nan, f"{type(error).__name__}: {error}"
        finally:
            trainer._hftrainer.runner.release_trial()
        if reason is not None:
            self.failed.append(reason)
            raise _TrialFailed(reason)
        if self.metric not in dict(run.summary):
            logger.warning(
                "metric=%r is not among what is logged (%s): W&B cannot compare runs by it.",
                self.metric,
                ", ".join(sorted(name for name in dict(run.summary) if not name.startswith("_"))),
            )
        self._compare(run.id, objective, chosen)

    def _objective(self, trainer: TrainerApi, chosen: dict[str, Any]) -> float:
        trainer.objective = None
        trainer.train(trial=chosen)
        if trainer.objective is None:
            metrics = trainer.evaluate()
            trainer.objective = self.checked(trainer.compute_objective(dict(metrics)))
            self.report(trainer, chosen, trainer.state.global_step, trainer.objective, metrics)
        return trainer.objective

    def _compare(self, run_id: str, objective: float, chosen: dict[str, Any]) -> None:
        if math.isnan(objective):
            self.failed.append(f"compute_objective returned {objective}")
            return
        sign = 1 if self.directions == ["minimize"] else -1
        if self.best is None or sign * objective < sign * self.best.objective:  # type: ignore[operator]  # one objective
            self.best = BestRun(run_id, objective, chosen)

    def _best(self, sweep: str) -> BestRun:
        if self.best is None:
            raise SearchFailed(f"The sweep {sweep}: {why_none(['failed'] * len(self.failed), self.failed)}")
        if self.failed:
            reasons = "".join(f"\n- {reason}" for reason in dict.fromkeys(self.failed))
            logger.warning("%d runs of the sweep %s have failed:%s", len(self.failed), sweep, reasons)
        return self.best._replace(run_summary=sweep)


def _options(
    *,
    sweep_id: str | None = None,
    project: str | None = None,
    entity: str | None = None,
    name: str | None = None,
    metric: str = "eval/loss",
    max_consecutive_failed_runs: int | None = None,
) -> dict[str, Any]:
    return locals()


@contextmanager
def _reporting(trainer: TrainerApi) -> Iterator[None]:
    """Write to W&B during the search, whatever `report_to` names: the server learns metrics from nothing else."""
    if any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks):
        yield
        return
    callback = WandbCallback()
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)
