"""Search with Optuna."""

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
from hftrainer.search.jobs import PackedTrainer, SearchWorkers, number_of_jobs, pack
from hftrainer.trainer_utils import BestRun, default_hp_space_optuna

if TYPE_CHECKING:
    from optuna import Study

    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: Keywords that go to `Study.optimize`. All others go to `optuna.create_study`.
_OPTIMIZE_KEYWORDS = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")
#: User attribute of a study: the last search with `n_jobs` that was stopped before it had all trials.
_STOPPED = "stopped"


class OptunaSearch(backend.SearchBackend):
    """A search with Optuna, whose study suggests hyperparameters and stores the results.

    Attributes:
        study: the study, in the main process only. The object is pickled with it for the workers of `n_jobs`.
    """

    name = "optuna"
    install = "optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)

    study: Study

    reports_last_evaluation = False  # as in transformers, which reports to Optuna during training only

    def run(self, trainer: Trainer, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Train trials until the study has `n_trials`, and return the best one in every process.

        Raises:
            InvalidArgument: for invalid keywords or directions, and for those that do not fit an existing study.
            UnsupportedArgument: for keywords that do not work with several processes.
            SearchFailed: if no trial was completed.
        """
        self.directions = backend.read_directions(direction)
        options = {name: kwargs.pop(name) for name in _OPTIMIZE_KEYWORDS if name in kwargs}
        _check(n_trials, options, kwargs, trainer.args.world_size > 1)
        self._jobs = number_of_jobs(options.pop("n_jobs", 1))
        from_main: Any = trainer.accelerator.processes.from_main
        from_main(lambda: self._open_study(trainer, kwargs))
        if trainer.args.process_index == 0:
            self._run_trials(trainer, n_trials, options)
            return from_main(lambda: (None, self._best()))[1]
        while True:  # the main process sends the number of each trial, and in the end the best one
            number, best = from_main(lambda: None)
            if number is None:
                return best
            self._train_with_main(trainer, SharedTrial(None, number, from_main))

    def hyperparameters(self, trainer: Trainer, trial: Any) -> Any:
        """The values that `hp_space` chooses."""
        return trainer.hp_space(trial)

    def run_id(self, trial: Any) -> str:
        """The number of the trial."""
        return str(trial.number)

    def report(self, trainer: Trainer, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Report an objective to Optuna, and end the trial if Optuna prunes it.

        Optuna does not prune when there are several objectives.

        Raises:
            optuna.TrialPruned: if the trial is pruned.
        """
        if len(self.directions) > 1:
            return
        trial.report(objective, step)
        if trial.should_prune():
            import optuna

            self.components.announce("on_train_end")
            raise optuna.TrialPruned(f"at step {step}")

    def _open_study(self, trainer: Trainer, kwargs: dict[str, Any]) -> None:
        """Create the study, or load an existing one and reseed its sampler, which would repeat its trials otherwise."""
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
                    f"study_name={kwargs['study_name']!r} is in the storage already: continue it with "
                    "load_if_exists=True, or give another name."
                ) from None
            study = optuna.create_study(**kwargs, load_if_exists=True)
            existing = [direction.name.lower() for direction in study.directions]
            if existing != self.directions:
                raise InvalidArgument(
                    f"direction={self.directions}: the study {study.study_name!r} in the storage has {existing}; give "
                    "the same, or another study_name."
                ) from None
            study.sampler.reseed_rng()
        self.study = self.components.hp_study = study

    def _run_trials(self, trainer: Trainer, n_trials: int | None, options: dict[str, Any]) -> None:
        """Train trials until the search ends, with `n_jobs` also in workers."""
        timeout, catch = options.pop("timeout", None), options.pop("catch", ())
        options["catch"] = (backend.TrialFailed, *(catch if isinstance(catch, Iterable) else (catch,)))
        self._count, self._options = studies.TrialCount(self.study, n_trials), options
        self._deadline = None if timeout is None else time.time() + timeout
        self._name = f"{os.getpid()}-{time.time()}"
        self._workers = SearchWorkers(str(trainer.args.output_dir))
        remaining = self._count.remaining()
        count = self._jobs if remaining is None else min(self._jobs, remaining)
        if count > 1:
            self.components.runner.release_trial()  # frees the model, which is then not pickled
            with self._workers.running(count, partial(train_in_worker, pack(self.components))):
                self.optimize(trainer)
        if not self._is_stopped():  # also retries the trials of killed workers
            self.optimize(trainer)

    def optimize(self, trainer: Trainer) -> None:
        """Run trials until there are enough, the time is up, or a callback stops the study."""
        started = 0

        def run_trial(trial: Any) -> Any:
            nonlocal started
            started += 1
            return self._run_trial(trainer, trial)

        def stop_when_complete(study: Study, _: Any) -> None:
            self._workers.check()
            if self._count.remaining() == 0 or self._is_stopped():
                study.stop()

        options = {**self._options, "callbacks": [*(self._options.get("callbacks") or ()), stop_when_complete]}
        while (remaining := self._count.remaining()) != 0:
            started = 0
            seconds = None if self._deadline is None else self._deadline - time.time()
            self.study.optimize(run_trial, n_trials=remaining, timeout=seconds, **options)
            if remaining is None or started < remaining:
                if self._jobs > 1 and self._count.remaining() != 0:  # a callback stopped the study, or the time is up
                    self.study.set_user_attr(_STOPPED, self._name)
                return
            # Trials may remain, if another process was killed.

    def _is_stopped(self) -> bool:
        """Whether any of the processes of `n_jobs` has stopped the search."""
        return self._jobs > 1 and self.study.user_attrs.get(_STOPPED) == self._name

    def _run_trial(self, trainer: Trainer, trial: Any) -> Any:
        """Train a trial, and return its objective or raise a new error, whose traceback does not keep the model."""
        import optuna

        trial.set_user_attr(studies.OWNER, process_identifier())
        if self._count.is_surplus(trial.number):
            reason = "other processes started the last trials at the same time"
            trial.set_user_attr(studies.INTERRUPTED, reason)
            raise backend.TrialFailed(reason)
        several, shared = trainer.args.world_size > 1, trial
        error: Exception | None = None
        if several:
            from_main = trainer.accelerator.processes.from_main
            from_main(lambda: (trial.number, None))
            shared = SharedTrial(trial, trial.number, from_main)
        try:
            objective = self.objective(trainer, shared)
        except optuna.TrialPruned as pruned:
            error = optuna.TrialPruned(str(pruned))
        except (KeyboardInterrupt, SystemExit) as interruption:
            self._interrupt(trial, interruption)
            raise
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            trial.set_user_attr(studies.FAILED, reason)
            # The other ranks of a distributed trial may be at another step, so the search cannot continue.
            if several or not is_out_of_memory(failure):
                raise
            error = backend.TrialFailed(reason)
        finally:
            self.components.runner.release_trial()
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
        if isinstance(interruption, SystemExit):  # Optuna itself handles KeyboardInterrupt only
            self.study.tell(trial, state=TrialState.FAIL)
        studies.enqueue_retry(self.study, trial.number)

    def _train_with_main(self, trainer: Trainer, trial: SharedTrial) -> None:
        import optuna

        try:
            with contextlib.suppress(optuna.TrialPruned):
                self.objective(trainer, trial)
        finally:
            self.components.runner.release_trial()

    def _best(self) -> BestRun | list[BestRun]:
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        if not any(trial.state is TrialState.COMPLETE for trial in trials):
            reasons = [trial.user_attrs[studies.FAILED] for trial in trials if studies.FAILED in trial.user_attrs]
            raise SearchFailed(backend.no_trial_message([trial.state.name.lower() for trial in trials], reasons))
        if running := sum(trial.state is TrialState.RUNNING for trial in trials):
            logger.warning(
                "%d of the trials are still running in other processes, and the best trial is chosen without them. If "
                "a process on another machine has ended, only a storage with a heartbeat_interval notices it.",
                running,
            )
        if len(self.directions) == 1:
            best = self.study.best_trial
            return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]
        return [BestRun(str(best.number), best.values, best.params) for best in self.study.best_trials]


def train_in_worker(packed: PackedTrainer) -> None:
    """Train trials of the study of a pickled Trainer; a worker of `n_jobs` calls this."""
    components = packed.unpack()
    assert isinstance(components.search, OptunaSearch)
    components.search.study.sampler.reseed_rng()  # seeded, it would suggest what it suggests in the script's process
    components.search.optimize(components.trainer)


def _check(n_trials: Any, options: Mapping[str, Any], kwargs: Mapping[str, Any], several: bool) -> None:
    """Check the keywords before the study is created."""
    import optuna

    known = [*inspect.signature(optuna.create_study).parameters, *_OPTIMIZE_KEYWORDS]
    backend.check_keywords("Optuna", kwargs, known, {"directions": "direction"})
    backend.check_limits(n_trials, options.get("timeout"), "timeout")
    if not isinstance(options.get("callbacks"), (list, tuple, type(None))):
        raise InvalidArgument(f"callbacks={options['callbacks']!r}: give a list of functions (study, trial) → None.")
    catch = options.get("catch", ())
    if not all(isinstance(each, type) for each in (catch if isinstance(catch, Iterable) else (catch,))):
        raise InvalidArgument(f"catch={catch!r}: give exception classes.")
    if kwargs.get("load_if_exists") and not kwargs.get("study_name"):
        raise InvalidArgument("load_if_exists=True needs a study_name: without one, each search creates a new study.")
    if several and options.get("n_jobs", 1) != 1:
        raise UnsupportedArgument(
            f"n_jobs={options['n_jobs']} starts processes, but a launcher has started several processes. Start the "
            "script without a launcher. On several GPUs set lightning_config={'devices': 1}, and each job uses one."
        )
    if several and catch:
        raise UnsupportedArgument(
            "catch is not supported with several processes: when one of them fails, the others wait for it. Run the "
            "search again with load_if_exists=True to continue it."
        )


class SharedTrial:
    """A trial of Optuna in several processes: the main process calls its methods and broadcasts the results.

    All processes must call the same methods in the same order. Reading `number` and `params` needs no communication.

    Args:
        trial: Optuna's trial in the main process; None in the others.
        number: the trial's number in the study.
        from_main: calls a function in the main process, and returns its result, or raises its error, in every process.

    Attributes:
        params: the suggested values by name.
    """

    def __init__(self, trial: Any, number: int, from_main: Callable[[Callable[[], Any]], Any]) -> None:
        self._trial = trial
        self._from_main = from_main
        self.number = number
        self.params: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of Optuna's trial."""
        from optuna import Trial

        if name.startswith("_") or not callable(getattr(Trial, name, None)):
            raise AttributeError(f"A trial in several processes has number, params and methods, but not {name!r}.")

        def call(*args: Any, **kwargs: Any) -> Any:
            result, self.params = self._from_main(
                lambda: (getattr(self._trial, name)(*args, **kwargs), self._trial.params)
            )
            return result

        return call
