"""Hyperparameter search with Optuna."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.parallel.devices import is_out_of_memory
from hftrainer.parallel.environment import process_identifier
from hftrainer.search import backend, studies
from hftrainer.search.workers import PickledTrainer, SearchWorkers, number_of_jobs, pickle_trainer
from hftrainer.trainer_utils import BestRun, default_hp_space_optuna

if TYPE_CHECKING:
    from optuna import Study

    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: Keyword arguments of `Study.optimize`. All others go to `optuna.create_study`.
_OPTIMIZE_KEYWORDS = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")
#: User attribute of a study: the last search with `n_jobs` that was stopped before its last trial.
_STOPPED = "stopped"


class OptunaSearch(backend.SearchBackend):
    """A search with Optuna, whose study suggests hyperparameters and stores the results.

    Attributes:
        study: the study, only in the main process. It is pickled with this object for the workers of `n_jobs`.
    """

    name = "optuna"
    install = "optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)

    study: Study

    # As in transformers, which reports to Optuna only during training.
    reports_last_evaluation = False

    def run(self, trainer: Trainer, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Train trials until the study has `n_trials`, and return the best trial in every process.

        Raises:
            InvalidArgument: if a keyword argument or direction is invalid, or does not match an existing study.
            UnsupportedArgument: if a keyword argument does not work with several processes.
            SearchFailed: if no trial was completed.
        """
        self.directions = backend.read_directions(direction)
        options = {name: kwargs.pop(name) for name in _OPTIMIZE_KEYWORDS if name in kwargs}
        _check_kwargs(n_trials, options, kwargs, trainer.args.world_size > 1)
        self._jobs = number_of_jobs(options.pop("n_jobs", 1))
        broadcast_from_main: Any = trainer.accelerator.processes.broadcast_from_main
        broadcast_from_main(lambda: self._open_study(trainer, kwargs))
        if trainer.args.process_index == 0:
            self._run_trials(trainer, n_trials, options)
            return broadcast_from_main(lambda: (None, self._find_best_run()))[1]
        # The main process sends the number of each trial, and finally the best trial.
        while True:
            number, best_run = broadcast_from_main(lambda: None)
            if number is None:
                return best_run
            self._train_with_main(trainer, BroadcastTrial(None, number, broadcast_from_main))

    def hyperparameters(self, trainer: Trainer, trial: Any) -> Any:
        """The values that `hp_space` chooses."""
        return trainer.hp_space(trial)

    def run_id(self, trial: Any) -> str:
        """The number of the trial."""
        return str(trial.number)

    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Report an objective to Optuna, and stop the trial if Optuna prunes it.

        Optuna does not prune trials with several objectives.

        Raises:
            optuna.TrialPruned: if the trial is pruned.
        """
        if len(self.directions) > 1:
            return
        trial.report(objective, step)
        if trial.should_prune():
            import optuna

            self.parts.call_callbacks("on_train_end")
            raise optuna.TrialPruned(f"at step {step}")

    def _open_study(self, trainer: Trainer, kwargs: dict[str, Any]) -> None:
        """Create the study, or load an existing study and reseed its sampler.

        Without the new seed, the sampler would repeat its trials.
        """
        import optuna

        journal = os.path.join(str(trainer.args.output_dir), "search.journal") if self._jobs > 1 else None
        storage = studies.open_storage(kwargs.get("storage"), journal)
        kwargs = {**kwargs, "storage": storage, "directions": self.directions}
        may_exist = kwargs.pop("load_if_exists", False)
        try:
            study = optuna.create_study(**kwargs)
        except optuna.exceptions.DuplicatedStudyError:
            if not may_exist:
                raise InvalidArgument(
                    f"study_name={kwargs['study_name']!r} is already in the storage: continue it with "
                    "load_if_exists=True, or use another name."
                ) from None
            study = optuna.create_study(**kwargs, load_if_exists=True)
            old_directions = [direction.name.lower() for direction in study.directions]
            if old_directions != self.directions:
                raise InvalidArgument(
                    f"direction={self.directions}: the study {study.study_name!r} in the storage has {old_directions}. "
                    "Use the same, or another study_name."
                ) from None
            study.sampler.reseed_rng()
        self.study = self.parts.hp_study = study

    def _run_trials(self, trainer: Trainer, n_trials: int | None, options: dict[str, Any]) -> None:
        """Train trials until the search ends; with `n_jobs`, also in workers."""
        timeout, catch = options.pop("timeout", None), options.pop("catch", ())
        options["catch"] = (backend.TrialFailed, *(catch if isinstance(catch, Iterable) else (catch,)))
        self._trial_count, self._options = studies.TrialCount(self.study, n_trials), options
        self._deadline = None if timeout is None else time.time() + timeout
        self._name = f"{os.getpid()}-{time.time()}"
        self._workers = SearchWorkers(str(trainer.args.output_dir))
        remaining_trials = self._trial_count.count_remaining_trials()
        worker_count = self._jobs if remaining_trials is None else min(self._jobs, remaining_trials)
        if worker_count > 1:
            # Free the model, so that it is not pickled.
            self.parts.training_runner.release_trial()
            with self._workers.run_workers(worker_count, partial(train_in_worker, pickle_trainer(self.parts))):
                self.optimize(trainer)
        # This also retries the trials of killed workers.
        if not self._is_stopped():
            self.optimize(trainer)

    def optimize(self, trainer: Trainer) -> None:
        """Run trials until the last trial, the time limit, or a stop by a callback."""
        started = 0

        def run_trial(trial: Any) -> Any:
            nonlocal started
            started += 1
            return self._run_trial(trainer, trial)

        def stop_when_complete(study: Study, _: Any) -> None:
            self._workers.check()
            if self._trial_count.count_remaining_trials() == 0 or self._is_stopped():
                study.stop()

        options = {**self._options, "callbacks": [*(self._options.get("callbacks") or ()), stop_when_complete]}
        while (remaining_trials := self._trial_count.count_remaining_trials()) != 0:
            started = 0
            seconds = None if self._deadline is None else self._deadline - time.time()
            self.study.optimize(run_trial, n_trials=remaining_trials, timeout=seconds, **options)
            if remaining_trials is None or started < remaining_trials:
                # A callback stopped the study, or the time limit is reached.
                if self._jobs > 1 and self._trial_count.count_remaining_trials() != 0:
                    self.study.set_user_attr(_STOPPED, self._name)
                return
            # Trials may remain if another process was killed.

    def _is_stopped(self) -> bool:
        """Whether any process of `n_jobs` stopped the search."""
        return self._jobs > 1 and self.study.user_attrs.get(_STOPPED) == self._name

    def _run_trial(self, trainer: Trainer, trial: Any) -> Any:
        """Train a trial, and return its objective.

        Raises new errors, so that their tracebacks do not keep the model.
        """
        import optuna

        trial.set_user_attr(studies.OWNER, process_identifier())
        if self._trial_count.is_surplus(trial.number):
            reason = "other processes started the last trials at the same time"
            trial.set_user_attr(studies.INTERRUPTED, reason)
            raise backend.TrialFailed(reason)
        is_distributed, shared_trial = trainer.args.world_size > 1, trial
        error: Exception | None = None
        if is_distributed:
            broadcast_from_main = trainer.accelerator.processes.broadcast_from_main
            broadcast_from_main(lambda: (trial.number, None))
            shared_trial = BroadcastTrial(trial, trial.number, broadcast_from_main)
        try:
            objective = self.train_and_evaluate(trainer, shared_trial)
        except optuna.TrialPruned as pruned:
            error = optuna.TrialPruned(str(pruned))
        except (KeyboardInterrupt, SystemExit) as interruption:
            self._interrupt(trial, interruption)
            raise
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            trial.set_user_attr(studies.FAILED, reason)
            # The other ranks of a distributed trial may be at another step, so the search cannot continue.
            if is_distributed or not is_out_of_memory(failure):
                raise
            error = backend.TrialFailed(reason)
        finally:
            self.parts.training_runner.release_trial()
        if error is not None:
            raise error
        values = objective if isinstance(objective, Sequence) else [objective]
        if any(math.isnan(float(value)) for value in values):
            trial.set_user_attr(studies.FAILED, f"compute_objective returned {objective}")
        return objective

    def _interrupt(self, trial: Any, interruption: BaseException) -> None:
        """Mark a trial as interrupted, so that the next search retries it."""
        from optuna.trial import TrialState

        trial.set_user_attr(studies.INTERRUPTED, f"stopped by {type(interruption).__name__}")
        # Optuna only handles KeyboardInterrupt.
        if isinstance(interruption, SystemExit):
            self.study.tell(trial, state=TrialState.FAIL)
        studies.enqueue_retry(self.study, trial.number)

    def _train_with_main(self, trainer: Trainer, trial: BroadcastTrial) -> None:
        import optuna

        try:
            with contextlib.suppress(optuna.TrialPruned):
                self.train_and_evaluate(trainer, trial)
        finally:
            self.parts.training_runner.release_trial()

    def _find_best_run(self) -> BestRun | list[BestRun]:
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        if not any(trial.state is TrialState.COMPLETE for trial in trials):
            reasons = [trial.user_attrs[studies.FAILED] for trial in trials if studies.FAILED in trial.user_attrs]
            raise SearchFailed(backend.no_trial_message([trial.state.name.lower() for trial in trials], reasons))
        if running_count := sum(trial.state is TrialState.RUNNING for trial in trials):
            logger.warning(
                "%d of the trials are still running in other processes, so the best trial is chosen without them. Only "
                "a storage with a heartbeat_interval detects the end of a process on another machine.",
                running_count,
            )
        if len(self.directions) == 1:
            best = self.study.best_trial
            return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]
        return [BestRun(str(best.number), best.values, best.params) for best in self.study.best_trials]


def train_in_worker(packed_trainer: PickledTrainer) -> None:
    """Train trials of a pickled Trainer's study. Called in a worker of `n_jobs`."""
    parts = packed_trainer.unpack()
    assert isinstance(parts.search_backend, OptunaSearch)
    # With the same seed, the sampler would repeat the suggestions of the script's process.
    parts.search_backend.study.sampler.reseed_rng()
    parts.search_backend.optimize(parts.trainer)


def _check_kwargs(n_trials: Any, options: Mapping[str, Any], kwargs: Mapping[str, Any], is_distributed: bool) -> None:
    """Check the keyword arguments before the study is created."""
    import optuna

    known = [*inspect.signature(optuna.create_study).parameters, *_OPTIMIZE_KEYWORDS]
    backend.check_keywords("Optuna", kwargs, known, {"directions": "direction"})
    backend.check_limits(n_trials, options.get("timeout"), "timeout")
    if not isinstance(options.get("callbacks"), (list, tuple, type(None))):
        raise InvalidArgument(f"callbacks={options['callbacks']!r} must be a list of functions (study, trial) → None.")
    catch = options.get("catch", ())
    if not all(isinstance(kind, type) for kind in (catch if isinstance(catch, Iterable) else (catch,))):
        raise InvalidArgument(f"catch={catch!r} must be exception classes.")
    if kwargs.get("load_if_exists") and not kwargs.get("study_name"):
        raise InvalidArgument("load_if_exists=True needs a study_name: without one, each search creates a new study.")
    if is_distributed and options.get("n_jobs", 1) != 1:
        raise UnsupportedArgument(
            f"n_jobs={options['n_jobs']} starts processes, but a launcher has started several processes. Start the "
            "script without a launcher. On several GPUs set lightning_config={'devices': 1}, so that each job uses one."
        )
    if is_distributed and catch:
        raise UnsupportedArgument(
            "catch is not supported with several processes: when one process fails, the others wait for it. Remove "
            "catch; to continue after an error, run the search again with load_if_exists=True."
        )


class BroadcastTrial:
    """An Optuna trial in several processes: the main process calls its methods and broadcasts the results.

    All processes must call the same methods in the same order. Reading `number` and `params` needs no communication.

    Args:
        trial: Optuna's trial in the main process; None in other processes.
        number: the trial's number in the study.
        broadcast_from_main: calls a function in the main process, and returns or raises its outcome in every process.

    Attributes:
        params: the suggested values by name.
    """

    def __init__(self, trial: Any, number: int, broadcast_from_main: Callable[[Callable[[], Any]], Any]) -> None:
        self._trial = trial
        self._broadcast_from_main = broadcast_from_main
        self.number = number
        self.params: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of Optuna's trial."""
        from optuna import Trial

        if name.startswith("_") or not callable(getattr(Trial, name, None)):
            raise AttributeError(f"A trial in several processes has number, params and methods, but not {name!r}.")

        def call_method(*args: Any, **kwargs: Any) -> Any:
            result, self.params = self._broadcast_from_main(
                lambda: (getattr(self._trial, name)(*args, **kwargs), self._trial.params)
            )
            return result

        return call_method
