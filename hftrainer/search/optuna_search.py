"""Searching with Optuna."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.parallel.process_identity import this_process
from hftrainer.search.backend import SearchBackend, check_end, check_keywords, read_directions, why_none
from hftrainer.search.jobs import Jobs
from hftrainer.search.shared_trial import SharedTrial
from hftrainer.search.studies import FAILED, INTERRUPTED, OWNER, TrialCount, open_storage, try_again
from hftrainer.trainer_utils import BestRun, default_hp_space_optuna
from hftrainer.training.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from optuna import Study

    from hftrainer.training.trainer_api import TrainerApi

logger = logging.getLogger(__name__)

#: Keywords that are `Study.optimize`'s; all others are `optuna.create_study`'s.
_OF_OPTIMIZE = ("timeout", "n_jobs", "catch", "callbacks", "gc_after_trial", "show_progress_bar")


class _TrialFailed(Exception):
    """A trial has failed in a way that says nothing about the next one."""


class OptunaSearch(SearchBackend):
    """A search with Optuna: the study says what to try, and keeps what came of it.

    Attributes:
        study: in the main process.
    """

    name = "optuna"
    install = "optuna"
    default_hp_space = staticmethod(default_hp_space_optuna)

    study: Study

    def run(self, trainer: TrainerApi, n_trials: int | None, direction: Any, **kwargs: Any) -> BestRun | list[BestRun]:
        """Run trials until the study has `n_trials`, and return the best in every process.

        Raises:
            InvalidArgument: for keywords or directions that cannot be, or that do not fit an existing study.
            UnsupportedArgument: for what one process alone could do.
            SearchFailed: when no trial has been completed.
        """
        several = trainer.args.world_size > 1
        self.directions = read_directions(direction)
        options = {name: kwargs.pop(name) for name in _OF_OPTIMIZE if name in kwargs}
        _check(n_trials, options, kwargs, several)
        self._jobs = Jobs(options.pop("n_jobs", 1), str(trainer.args.output_dir), options.pop("timeout", None))
        from_main: Any = trainer.accelerator.processes.from_main
        from_main(lambda: self._open(trainer, kwargs))
        if trainer.args.process_index == 0:
            if not self._jobs.is_over:
                self._work(_Objective(self, trainer), TrialCount(self.study, n_trials), options)
            return from_main(lambda: (None, self._best()))[1]
        while (told := from_main(lambda: None))[0] is not None:
            self._follow(trainer, SharedTrial(None, told[0], from_main))
        return told[1]

    def hyperparameters(self, trainer: TrainerApi, trial: Any) -> Any:
        """What `hp_space` chooses."""
        return trainer.hp_space(trial)

    def run_id(self, trial: Any) -> str:
        """The number of the trial."""
        return str(trial.number)

    def report(self, trainer: TrainerApi, trial: Any, step: int, objective: Any, metrics: Mapping[str, float]) -> None:
        """Tell Optuna, and end the trial if it is not promising; with several objectives Optuna cannot say.

        Raises:
            optuna.TrialPruned: to end it.
        """
        if len(self.directions) > 1:
            return
        trial.report(objective, step)
        if trial.should_prune():
            import optuna

            trainer._hftrainer.announce("on_train_end")
            raise optuna.TrialPruned(f"at step {step}")

    def objective(self, trainer: TrainerApi, trial: Any) -> Any:
        """Train a trial; its last evaluation, or one after training, says how good it is."""
        trainer.objective = None
        trainer.train(trial=trial)
        if trainer.objective is None:
            trainer.objective = self.checked(trainer.compute_objective(trainer.evaluate()))
        return trainer.objective

    def _open(self, trainer: TrainerApi, kwargs: dict[str, Any]) -> None:
        """Make the study, or go on with one that exists; its sampler then draws other numbers than the one before."""
        import optuna

        kwargs = self._jobs.sharing(kwargs)
        kwargs = {**kwargs, "storage": open_storage(kwargs.get("storage")), "directions": self.directions}
        goes_on = kwargs.pop("load_if_exists", False) or self._jobs.is_worker
        try:
            study = optuna.create_study(**kwargs)
        except optuna.exceptions.DuplicatedStudyError:
            if not goes_on:
                raise InvalidArgument(
                    f"study_name={kwargs['study_name']!r} is in the storage already: load_if_exists=True goes on with "
                    "it, or give another name."
                ) from None
            study = optuna.create_study(**kwargs, load_if_exists=True)
            there = [direction.name.lower() for direction in study.directions]
            if there != self.directions:
                raise InvalidArgument(
                    f"direction={self.directions}: the study {study.study_name!r} in the storage has {there}; give the "
                    "same, or another study_name."
                ) from None
            study.sampler.reseed_rng()
        self.study = trainer._hftrainer.hp_study = study
        self._jobs.opened(study.study_name)

    def _work(self, objective: _Objective, count: TrialCount, options: dict[str, Any]) -> None:
        with self._jobs.at_work(count.left()):
            self._optimize(objective, count, dict(options))
        if self._jobs.lost and not self._jobs.is_stopped(self.study):  # what they have left
            self._optimize(objective, count, dict(options))

    def _optimize(self, objective: _Objective, count: TrialCount, options: dict[str, Any]) -> None:
        """Run trials until there are enough, the time is up, or a callback stops the study."""
        catch = options.pop("catch", ())
        catch = tuple(catch) if isinstance(catch, Iterable) else (catch,)

        def stop_when_complete(study: Study, _: Any) -> None:
            self._jobs.look_after_workers()
            if count.left() == 0 or self._jobs.is_stopped(study):
                study.stop()

        options["callbacks"] = [*(options.get("callbacks") or ()), stop_when_complete]
        objective.count = count
        while (left := count.left()) != 0:
            begun = objective.begun
            self.study.optimize(
                objective, n_trials=left, timeout=self._jobs.left(), catch=(_TrialFailed, *catch), **options
            )
            if left is None or objective.begun - begun < left:  # else others were faster, or were ended
                self._tell_others(count)
                return

    def _tell_others(self, count: TrialCount) -> None:
        """Note that the search was stopped, if it was not for the time or the number of trials."""
        seconds = self._jobs.left()
        if self._jobs.count > 1 and count.left() != 0 and (seconds is None or seconds > 0):
            self._jobs.stop(self.study)

    def _follow(self, trainer: TrainerApi, trial: SharedTrial) -> None:
        import optuna

        try:
            self.objective(trainer, trial)
        except optuna.TrialPruned:
            return
        finally:
            trainer._hftrainer.runner.release_trial()

    def _best(self) -> BestRun | list[BestRun]:
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        if not any(trial.state is TrialState.COMPLETE for trial in trials):
            reasons = [trial.user_attrs[FAILED] for trial in trials if FAILED in trial.user_attrs]
            raise SearchFailed(why_none([trial.state.name.lower() for trial in trials], reasons))
        if running := sum(trial.state is TrialState.RUNNING for trial in trials):
            logger.warning(
                "%d of the trials are still running in other processes: the best is that of the finished ones. Of "
                "processes on other machines only a storage with a heartbeat_interval finds out that they have ended.",
                running,
            )
        if len(self.directions) == 1:
            best = self.study.best_trial
            return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]
        return [BestRun(str(best.number), best.values, best.params) for best in self.study.best_trials]


class _Objective:
    """What Optuna calls for each trial.

    Args:
        search: whose trials they are.
        trainer: trains them.

    Attributes:
        begun: trials begun.
        count: of the study's trials.
    """

    count: TrialCount

    def __init__(self, search: OptunaSearch, trainer: TrainerApi) -> None:
        self.search = search
        self.trainer = trainer
        self.begun = 0

    def __call__(self, trial: Any) -> Any:
        self.begun += 1
        trial.set_user_attr(OWNER, this_process())
        if self.count.is_surplus(trial.number):
            trial.set_user_attr(INTERRUPTED, "others have begun the last trials at the same moment")
            raise _TrialFailed("Other processes have begun the last trials at the same moment.")
        try:
            objective, ended = self._attempt(trial)
        finally:
            self.trainer._hftrainer.runner.release_trial()
        if ended is not None:
            raise ended
        return objective

    def _attempt(self, trial: Any) -> tuple[Any, Exception | None]:
        """The objective, or what ends the trial and not the search, without a traceback that would hold the model."""
        import optuna

        several, shared = self.trainer.args.world_size > 1, trial
        if several:
            from_main = self.trainer.accelerator.processes.from_main
            from_main(lambda: (trial.number, None))
            shared = SharedTrial(trial, trial.number, from_main)
        try:
            objective = self.search.objective(self.trainer, shared)
        except optuna.TrialPruned as pruned:
            return None, optuna.TrialPruned(str(pruned))
        except (KeyboardInterrupt, SystemExit) as ended:
            trial.set_user_attr(INTERRUPTED, f"stopped by {type(ended).__name__}")
            if isinstance(ended, SystemExit):  # which Optuna does not notice
                self.search.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            try_again(self.search.study, trial.number)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            trial.set_user_attr(FAILED, reason)
            if several or not is_out_of_memory(error):  # the other processes wait somewhere within the trial
                raise
            return None, _TrialFailed(reason)
        if any(math.isnan(value) for value in _numbers(objective)):
            trial.set_user_attr(FAILED, f"compute_objective returned {objective}")
        return objective, None


def _numbers(objective: Any) -> list[float]:
    return [float(value) for value in (objective if isinstance(objective, Sequence) else [objective])]


def _check(n_trials: Any, options: Mapping[str, Any], kwargs: Mapping[str, Any], several: bool) -> None:
    """Refuse keywords that cannot work before anything is made."""
    import optuna

    known = [*inspect.signature(optuna.create_study).parameters, *_OF_OPTIMIZE]
    check_keywords("Optuna", kwargs, known, {"directions": "direction"})
    check_end(n_trials, options.get("timeout"), "timeout")
    if not isinstance(options.get("callbacks"), (list, tuple, type(None))):
        raise InvalidArgument(f"callbacks={options['callbacks']!r}: give a list of functions (study, trial) → None.")
    caught = options.get("catch", ())
    if not all(isinstance(each, type) for each in (caught if isinstance(caught, Iterable) else (caught,))):
        raise InvalidArgument(f"catch={caught!r}: give classes of exceptions.")
    if kwargs.get("load_if_exists") and not kwargs.get("study_name"):
        raise InvalidArgument("load_if_exists=True needs a study_name: without one each search makes a study anew.")
    if several and options.get("n_jobs", 1) != 1:
        raise UnsupportedArgument(
            f"n_jobs={options['n_jobs']} starts the script again, and this is one of several processes: start it "
            "without a launcher, on several GPUs with lightning_config={'devices': 1}; each job has one of them."
        )
    if several and options.get("catch"):
        raise UnsupportedArgument(
            "catch cannot be honoured with several processes: where one fails, the others wait within the trial. Start "
            "the search again with load_if_exists=True, and it goes on."
        )
