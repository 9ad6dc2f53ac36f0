"""Hyperparameter search with sweeps of Weights & Biases."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.search.backend import SearchBackend, TrialFailed, check_keywords, no_trial_message, read_directions
from hftrainer.search.trial_arguments import check_names, model_takes_trial
from hftrainer.trackers.callbacks import WandbCallback
from hftrainer.trainer_utils import BestRun, default_hp_space_wandb

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: The value of `metric` for sweeps that compare the result of `compute_objective`, which is then logged.
OBJECTIVE = "objective"


class WandbSearch(SearchBackend):
    """A sweep: W&B's server chooses the hyperparameters, and agents on any machine train its runs.

    Attributes:
        metric: the metric by which the server compares runs.
        best_run: the best run of this process.
        failures: the reasons why runs of this process failed.
    """

    name = "wandb"
    install = "wandb"
    default_hp_space = staticmethod(default_hp_space_wandb)

    metric: str

    def __init__(self, parts: TrainerParts) -> None:
        super().__init__(parts)
        self.best_run: BestRun | None = None
        self.failures: list[str] = []

    def run(
        self,
        trainer: Trainer,
        n_trials: int | None,
        direction: Any,
        *,
        sweep_id: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        metric: str = "eval/loss",
        max_consecutive_failed_runs: int | None = None,
        **unknown: Any,
    ) -> BestRun:
        """Start a sweep, or join the sweep `sweep_id`, and train up to `n_trials` of its runs.

        Args:
            trainer: trains the runs.
            n_trials: number of runs that this process trains; None trains runs until the sweep is finished.
            direction: 'minimize' or 'maximize'.
            sweep_id: the sweep to join; None starts a new one.
            project: project of the sweep.
            entity: user or team of the project.
            name: name of a new sweep.
            metric: the logged metric by which the server compares runs.
            max_consecutive_failed_runs: number of consecutive failed runs that ends the search.
            unknown: other keyword arguments, which are refused.

        Raises:
            InvalidArgument: if the space or direction is invalid.
            UnknownArgument: for other keyword arguments, and parameters that are not training arguments.
            UnsupportedArgument: for several objectives or several processes.
            SearchFailed: if this process completed no run.
        """
        import wandb

        self.directions = read_directions(direction)
        check_keywords("W&B", unknown, list(inspect.signature(self.run).parameters)[3:-1], {})
        self.metric = metric
        self._check_arguments(trainer)
        owner: dict[str, Any] = {"project": project, "entity": entity}
        options: dict[str, Any] = {"count": n_trials, "max_consecutive_failed_runs": max_consecutive_failed_runs}
        if sweep_id is None:
            sweep_id = wandb.sweep(self._space(trainer, name), **owner)
        with contextlib.ExitStack() as stack:
            # The sweep needs the metrics even without `report_to='wandb'`.
            if not any(isinstance(callback, WandbCallback) for callback in trainer.callback_handler.callbacks):
                trainer.add_callback(tracker := WandbCallback())
                stack.callback(trainer.remove_callback, tracker)
            wandb.agent(sweep_id, functools.partial(self._train, trainer), **options, **owner)
        return self._find_best_run(sweep_id)

    def run_id(self, trial: Any) -> str:
        """The id of the run."""
        import wandb

        assert wandb.run is not None
        return str(wandb.run.id)

    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Log the objective if the sweep compares it. The tracker logs all other metrics."""
        if self.metric == OBJECTIVE:
            import wandb

            wandb.log({OBJECTIVE: objective, "train/global_step": step})

    def _check_arguments(self, trainer: Trainer) -> None:
        if len(self.directions) > 1:
            raise UnsupportedArgument(f"direction={self.directions}: a sweep has one objective; use backend='optuna'.")
        if trainer.args.world_size > 1:
            raise UnsupportedArgument(
                "backend='wandb' trains each run in one process: start the script once per device, with the "
                "sweep_id of the first; or use backend='optuna', where several processes share a trial."
            )

    def _space(self, trainer: Trainer, name: str | None) -> dict[str, Any]:
        """The configuration of the sweep, from `hp_space`."""
        space = self.space(trainer)
        if not isinstance(space, Mapping) or not isinstance(space.get("parameters"), Mapping):
            raise InvalidArgument(
                f"hp_space returned {space!r}: it must return the configuration of the sweep, a dict with 'method' and "
                "'parameters'."
            )
        check_names(trainer.args, space["parameters"], allow_model_arguments=model_takes_trial(trainer.model_init))
        metric = {**space.get("metric", {}), "goal": self.directions[0], "name": self.metric}
        return {**space, "metric": metric, **({"name": name} if name else {})}

    def _train(self, trainer: Trainer) -> None:
        """Train one run of the sweep. W&B's agent calls this method."""
        import wandb

        run = wandb.run or wandb.init()
        params = dict(run.config)
        if trainer.hp_name is not None:
            run.name = trainer.hp_name(params)
        reason = None
        try:
            objective = self.train_and_evaluate(trainer, params)
        except Exception as error:
            logger.exception("The run %s failed.", run.id)
            reason = f"{type(error).__name__}: {error}"
            self.failures.append(reason)
        finally:
            self.parts.training_runner.release_trial()
        if reason is not None:
            raise TrialFailed(reason)
        if self.metric not in dict(run.summary):
            logger.warning(
                "metric=%r is not among the logged metrics (%s), so W&B cannot compare runs by it.",
                self.metric,
                ", ".join(sorted(name for name in dict(run.summary) if not name.startswith("_"))),
            )
        self._compare(run.id, objective, params)

    def _compare(self, run_id: str, objective: float, params: dict[str, Any]) -> None:
        if math.isnan(objective):
            self.failures.append(f"compute_objective returned {objective}")
            return
        sign = 1 if self.directions == ["minimize"] else -1
        if self.best_run is None or sign * objective < sign * self.best_run.objective:  # type: ignore[operator]
            self.best_run = BestRun(run_id, objective, params)

    def _find_best_run(self, sweep: str) -> BestRun:
        if self.best_run is None:
            raise SearchFailed(f"The sweep {sweep}: {no_trial_message(['failed'] * len(self.failures), self.failures)}")
        if self.failures:
            reasons = "".join(f"\n- {reason}" for reason in dict.fromkeys(self.failures))
            logger.warning("%d runs of the sweep %s failed:%s", len(self.failures), sweep, reasons)
        return self.best_run._replace(run_summary=sweep)
