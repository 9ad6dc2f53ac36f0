"""Searches with Optuna: wrong arguments, counting and retrying of trials, and what a trial changes in the Trainer."""

import logging
import math
import os
import socket
import subprocess
import sys
from datetime import timedelta

import numpy as np
import optuna
import pytest

from hftrainer import TrainerCallback
from hftrainer.errors import InvalidArgument, MissingPackage, SearchFailed, UnknownArgument, UnsupportedArgument
from hftrainer.parallel.environment import has_ended, process_identifier
from hftrainer.search.studies import FAILED, INTERRUPTED, OWNER, RETRY_OF, TrialCount
from hftrainer.trainer_utils import default_compute_objective
from hftrainer_ray.search import RaySearch
from tests.support.searches import SearchBackend, make_search_trainer, return_none
from tests.support.small_models import Plain, make_plain

HOST = process_identifier().split(" ")[0]
#: A process of this machine that has ended.
GONE = f"{HOST} {2**22 + 1} 1"


def rates(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)}


def trial_states(study):
    return [trial.state.name for trial in study.trials]


def in_storage(folder):
    return {"storage": f"sqlite:///{folder}/a.db", "study_name": "a", "load_if_exists": True}


def choose(**choice):
    return {"hp_space": lambda trial: choice}


RAY = {"backend": "ray"}
REFUSED = {
    "sigopt": ({"backend": "sigopt"}, UnsupportedArgument, r"SigOpt's service was shut down\. Use backend='optuna'"),
    "ray": (RAY, MissingPackage, r"pip install 'ray\[tune\]'"),
    "unknown backend": ({"backend": "optunna"}, InvalidArgument, "did you mean 'optuna'"),
    "directions": ({"directions": ["minimize"]}, UnknownArgument, "did you mean 'direction'"),
    "no direction": ({"direction": []}, InvalidArgument, "use 'minimize' or 'maximize', or a list"),
    "no seconds": ({"timeout": -1}, InvalidArgument, "timeout=-1 must be a number of seconds above 0"),
    "a callback alone": ({"callbacks": print}, InvalidArgument, "callbacks=.* must be a list of functions"),
    "no exceptions": ({"catch": "x"}, InvalidArgument, "catch='x' must be exception classes"),
    "no database": ({"storage": "search.db"}, InvalidArgument, r"storage='search\.db' is not a database URL"),
    "no truth": (choose(dataloader_drop_last="maybe"), InvalidArgument, "='maybe' is not a bool: use True or False"),
    "no trials": ({"n_trials": 0}, InvalidArgument, "n_trials=0 must be a positive integer"),
    "no end": ({"n_trials": None}, InvalidArgument, "n_trials=None: the search would never end"),
    "no name to go on with": ({"load_if_exists": True}, InvalidArgument, "needs a study_name"),
    "a space that is none": ({"hp_space": {"learning_rate": 1}}, InvalidArgument, "hp_space=.*: pass a function"),
    "a short name": (choose(lr=1), UnknownArgument, "has no argument 'lr'; did you mean 'learning_rate'"),
    "a method": (choose(to_dict=1), UnknownArgument, "has no argument 'to_dict'"),
    "of the model": (choose(zebras=1), UnknownArgument, r"'zebras'; suggest hyperparameters of the model in model_in"),
    "no number": (choose(num_train_epochs="many"), InvalidArgument, "num_train_epochs='many' is not of type float"),
    "out of range": (choose(gradient_accumulation_steps=0), InvalidArgument, "=0: use a number of at least 1"),
    "nothing": ({"compute_objective": return_none}, InvalidArgument, "returned None: it must return"),
    "two for one": ({"compute_objective": lambda _: (1, 2)}, InvalidArgument, r"returned \(1, 2\): .* a number"),
    "a metric that is missing": ({"compute_objective": lambda of: of["eval_f1"]}, KeyError, "reads 'eval_f1', but"),
    "no argument": ({"compute_objective": lambda: 1.0}, InvalidArgument, "compute_objective=.* of one argument"),
    "two arguments": ({"hp_space": lambda trial, more: {}}, InvalidArgument, "hp_space=.* of one argument, the trial"),
    "a name": ({"hp_name": lambda: "x"}, InvalidArgument, "hp_name=.*: pass a function of one argument"),
    "one for two": ({"direction": ["minimize"] * 2}, InvalidArgument, "it must return 2 numbers, one per direction"),
}


class TestOptuna(SearchBackend):
    name, keyword = "optuna", "study_name"

    def grid(self, **values):
        def space(trial):
            return {name: trial.suggest_categorical(name, choices) for name, choices in values.items()}

        count = math.prod(map(len, values.values()))
        return {"hp_space": space, "n_trials": count, "sampler": optuna.samplers.GridSampler(values, seed=0)}

    def failures(self, trainer, best, caplog):
        failed = [trial for trial in trainer.hp_study.trials if trial.state.name == "FAIL"]
        assert len(failed) == 2 and best.run_id not in [str(trial.number) for trial in failed]
        return "\n".join(trial.user_attrs[FAILED] for trial in failed)

    @pytest.mark.parametrize("case", REFUSED)
    def test_invalid_search_is_refused(self, tmp_path, monkeypatch, case):
        monkeypatch.setattr(RaySearch, "is_available", lambda: False)  # make test-downstream installs it
        self.assert_refused(tmp_path, *REFUSED[case])


def test_search_needs_a_model_init(tmp_path):
    trainer = make_search_trainer(tmp_path, model_init=None, trainer={"model": make_plain()})
    with pytest.raises(InvalidArgument, match="pass Trainer a model_init"):
        trainer.hyperparameter_search()


def test_existing_study_must_match_the_search(tmp_path):
    keywords = {**in_storage(tmp_path), "hp_space": rates, "n_trials": 1}
    make_search_trainer(tmp_path).hyperparameter_search(**keywords)
    with pytest.raises(InvalidArgument, match="study_name='a' is already in the storage: continue it with load_if"):
        make_search_trainer(tmp_path).hyperparameter_search(**{**keywords, "load_if_exists": False})
    for direction in ("maximize", ["minimize", "minimize"]):
        with pytest.raises(InvalidArgument, match=r"the study 'a' in the storage has \['minimize'\]"):
            make_search_trainer(tmp_path).hyperparameter_search(direction=direction, **keywords)


def test_default_objective_leaves_measurements_out(tmp_path):
    """`evaluate()` before the search measures the time that it takes to prepare the model."""
    trainer = make_search_trainer(tmp_path, skip_memory_metrics=False, eval_strategy="no")
    trainer.evaluate()
    best = trainer.hyperparameter_search(rates, n_trials=1)
    assert best.objective == trainer.hp_study.best_value > 0.1
    measured = ["eval_model_preparation_time", "eval_runtime", "eval_mem_cpu_alloc_delta", "eval_a_per_second", "epoch"]
    assert default_compute_objective({"eval_loss": 1.0, **dict.fromkeys(measured, 9.0)}) == 1.0
    assert default_compute_objective({"eval_loss": 1.0, "eval_a": 2.0, "eval_b": 3.0, "eval_runtime": 9.0}) == 5.0


def test_unknown_names_go_to_model_init_unless_misspelt(tmp_path, caplog):
    """With a `model_init` that takes the trial, a name may be its own, unless it is nearly an argument's."""
    trainer = make_search_trainer(tmp_path, model_init=lambda trial: Plain())
    with caplog.at_level(logging.INFO, "hftrainer"):
        trainer.hyperparameter_search(**choose(width=3), n_trials=1)
    assert "Not training arguments, so only model_init can use them: width" in caplog.text
    assert "Trial 0: width 3." in caplog.messages
    with pytest.raises(UnknownArgument, match="did you mean 'learning_rate'"):
        trainer.hyperparameter_search(**choose(learning_rat=3), n_trials=1)


class FailsAtHighRate(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if state.trial_params["learning_rate"] > 0.05:
            raise KeyError("of the user's")


@pytest.mark.parametrize("catch", [KeyError, (KeyError,)])
def test_error_in_a_trial_ends_the_search_unless_caught(tmp_path, catch):
    keywords = TestOptuna().grid(learning_rate=[0.01, 0.1])
    with pytest.raises(KeyError, match="of the user's"):
        make_search_trainer(tmp_path, {"callbacks": [FailsAtHighRate]}).hyperparameter_search(**keywords)
    trainer = make_search_trainer(tmp_path, {"callbacks": [FailsAtHighRate]})
    trainer.hyperparameter_search(**keywords, catch=catch)
    assert sorted(trial_states(trainer.hp_study)) == ["COMPLETE", "FAIL"]
    assert {trial.user_attrs.get(FAILED) for trial in trainer.hp_study.trials} == {None, 'KeyError: "of the user\'s"'}


class Interrupting(TrainerCallback):
    def __init__(self, at, error):
        self.at, self.error = at, error

    def on_step_end(self, args, state, control, **kwargs):
        self.at -= 1
        if self.at == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_search_continues_with_the_lost_trial(tmp_path, error):
    """Ctrl-C keeps finished trials; the same call continues, and tries the values of the interrupted one again."""
    keywords = {**in_storage(tmp_path), "n_trials": 3}
    trainer = make_search_trainer(tmp_path, {"callbacks": [Interrupting(4, error)]})
    with pytest.raises(error):
        trainer.hyperparameter_search(rates, **keywords)
    assert trial_states(trainer.hp_study) == ["COMPLETE", "FAIL", "WAITING"]
    assert trainer.hp_study.trials[1].user_attrs[INTERRUPTED] == f"stopped by {error.__name__}"
    trainer.hyperparameter_search(rates, **keywords)
    assert trial_states(trainer.hp_study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    _, lost, again, last = trainer.hp_study.trials
    assert again.params == lost.params != last.params and again.user_attrs[RETRY_OF] == 1
    before = trainer.hp_study.best_trial.number
    assert trainer.hyperparameter_search(rates, **keywords).run_id == str(before)  # nothing is left to do
    assert len(trainer.hp_study.trials) == 4


def test_timeout_and_callbacks_end_the_search(tmp_path):
    trainer = make_search_trainer(tmp_path)
    with pytest.raises(SearchFailed, match="no trial was started"):
        trainer.hyperparameter_search(rates, n_trials=None, timeout=1e-9)
    seen = []

    def stop(study, trial):
        seen.append(trial.number)
        study.stop()

    trainer.hyperparameter_search(rates, n_trials=5, callbacks=[stop], gc_after_trial=True)
    assert seen == [0]


@pytest.fixture
def study():
    return optuna.create_study()


def begin_trial(study, owner=GONE):
    trial = study.ask()
    trial.set_user_attr(OWNER, owner)
    return trial


def test_has_ended_recognizes_a_process_that_is_gone():
    host, process, began = process_identifier().split(" ")
    assert not has_ended(process_identifier())
    assert has_ended(f"{host} {process} {int(began) - 1}")  # the id has been used again
    assert has_ended(GONE)
    assert not has_ended(GONE.replace(host, "elsewhere"))


@pytest.mark.skipif(not hasattr(os, "waitid") or not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_zombie_has_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays
    assert has_ended(f"{socket.gethostname()} {child.pid}")
    child.wait()


def test_remaining_trials_count_lost_ones_again(study):
    count = TrialCount(study, 3)
    assert count.count_remaining_trials() == 3
    study.enqueue_trial({"x": 1})  # waits: nobody has begun it
    assert count.count_remaining_trials() == 3
    for owner in (process_identifier(), GONE, "elsewhere 1 1"):
        begin_trial(study, owner)
    assert count.count_remaining_trials() == 1
    assert trial_states(study) == ["RUNNING", "FAIL", "RUNNING"]
    assert "has ended" in study.trials[1].user_attrs[INTERRUPTED]
    fourth = begin_trial(study, process_identifier())
    assert not count.is_surplus(fourth.number)
    assert count.count_remaining_trials() == 0
    assert count.is_surplus(study.ask().number)
    assert TrialCount(study, None).count_remaining_trials() is None
    study.tell(fourth, state=optuna.trial.TrialState.FAIL)  # without a reason, as Optuna's heartbeat does
    assert TrialCount(study, 4).count_remaining_trials() == 1


def test_lost_trial_is_tried_again_once(study):
    for found in (["FAIL", "WAITING"], ["FAIL", "FAIL"]):
        begin_trial(study).suggest_float("x", 0, 1)
        assert TrialCount(study, 1).count_remaining_trials() == 1
        assert trial_states(study) == found
    assert study.trials[0].params == study.trials[1].params


def test_interrupted_trial_is_tried_again_by_the_next_search(study):
    """Its process had said so before it was killed; only the next search tries it, not the one after that."""
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr(INTERRUPTED, "its process has ended")
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    for _ in range(2):
        TrialCount(study, 1)
        assert trial_states(study) == ["FAIL", "WAITING"]
    assert study.ask().suggest_float("x", 0, 1) == study.trials[0].params["x"]


def test_trial_lost_before_it_drew_values_is_tried_again_each_time(study):
    study.enqueue_trial({"x": 0.25})
    for _ in range(2):
        begin_trial(study)
        TrialCount(study, 1).count_remaining_trials()
    assert study.ask().suggest_float("x", 0, 1) == 0.25
    assert [trial.user_attrs.get(RETRY_OF) for trial in study.trials] == [None, 0, 0]


def test_trial_finished_by_another_process_is_kept(study):
    trial = study.ask()
    running = study.trials[0]
    study.tell(trial, 0.5)
    TrialCount(study, 1)._interrupt(running, "its process has ended")
    assert trial_states(study) == ["COMPLETE"]
    assert INTERRUPTED not in study.trials[0].user_attrs


def test_trial_without_an_owner_counts_as_lost_after_a_wait(study, monkeypatch):
    monkeypatch.setattr("hftrainer.search.studies._TIME_TO_SET_OWNER", timedelta(seconds=0.3))
    study.ask()
    assert TrialCount(study, 1).count_remaining_trials() == 1  # after waiting
    assert trial_states(study) == ["FAIL"]


def test_surplus_trial_begun_at_the_same_time_is_dropped(tmp_path, monkeypatch):
    """Another process begins the last trial between our count and our own trial."""
    trainer, original = make_search_trainer(tmp_path), optuna.Study.ask

    def ask(study, *args):
        if len(study.trials) == 2:
            study.add_trial(optuna.create_trial(value=0.0))
        return original(study, *args)

    monkeypatch.setattr(optuna.Study, "ask", ask)
    trainer.hyperparameter_search(rates, n_trials=3)
    assert trial_states(trainer.hp_study) == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL"]
    assert "same time" in trainer.hp_study.trials[3].user_attrs[INTERRUPTED]


def test_trials_running_on_another_machine_count(tmp_path, caplog):
    """They may still be running: they count, and the result says that they are not in it."""
    begin_trial(optuna.create_study(**in_storage(tmp_path)), "elsewhere 1 1")
    trainer = make_search_trainer(tmp_path)
    trainer.hyperparameter_search(rates, n_trials=3, **in_storage(tmp_path))
    assert trial_states(trainer.hp_study) == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert "1 of the trials are still running in other processes" in caplog.text


def test_enqueued_trials_come_first(tmp_path):
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    keywords = {**in_storage(tmp_path), "storage": optuna.storages.JournalStorage(journal)}
    optuna.create_study(**keywords).enqueue_trial({"learning_rate": 0.03})
    trainer = make_search_trainer(tmp_path)
    trainer.hyperparameter_search(rates, n_trials=2, **keywords)
    assert len(trainer.hp_study.trials) == 2
    assert trainer.hp_study.trials[0].params == {"learning_rate": 0.03}


def test_seeded_sampler_does_not_repeat_values_in_a_later_search(tmp_path):
    for n_trials in (2, 4):
        trainer, sampler = make_search_trainer(tmp_path), optuna.samplers.RandomSampler(seed=1)
        trainer.hyperparameter_search(rates, n_trials=n_trials, sampler=sampler, **in_storage(tmp_path))
    assert len({trial.params["learning_rate"] for trial in trainer.hp_study.trials}) == 4


class Notes(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.found.append((args.to_dict(), self.trainer._train_batch_size, self.trainer._hftrainer.engine.plan))


def run_with(folder, *choices, objective=None):
    notes, left = Notes(), iter(choices)
    trainer = notes.trainer = make_search_trainer(folder, {"callbacks": [notes]})
    trainer.hyperparameter_search(lambda trial: next(left), objective, n_trials=np.int64(len(choices)))
    return trainer, notes.found


def test_each_trial_rebuilds_what_follows_from_arguments(tmp_path):
    trainer, found = run_with(
        tmp_path,
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
        {"lightning_config": {"limit_val_batches": 1}, "bf16": True},
        {"eval_strategy": "no", "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    )
    (first, batch, plan), (second, default_batch, second_plan), (third, *_) = found
    assert (batch, plan.accumulate_grad_batches, first["label_smoothing_factor"]) == (3, 2, 0.1)
    assert (default_batch, second_plan.accumulate_grad_batches, second["label_smoothing_factor"]) == (8, 1, 0.0)
    assert second_plan.trainer_overrides["limit_val_batches"] == 1 and second_plan.precision == "bf16-mixed"
    assert "lightning_config" not in third and third["bf16"] is False
    assert third["activation_checkpointing_kwargs"] == {"use_reentrant": False}
    assert trainer.args.eval_strategy == "steps" and trainer.args.activation_checkpointing_kwargs is None


def test_label_smoothing_reaches_the_loss(tmp_path):
    factors = iter([0.0, 0.5])
    trainer = make_search_trainer(tmp_path)
    trainer.hyperparameter_search(lambda trial: {"label_smoothing_factor": next(factors)}, n_trials=2)
    unsmoothed, smoothed = trainer.hp_study.trials
    assert unsmoothed.value != smoothed.value


def test_trial_values_are_cast_to_the_type_of_the_argument(tmp_path):
    values = {"seed": 3.7, "warmup_steps": 0.5, "per_device_train_batch_size": "4"}
    truths = [{"dataloader_drop_last": truth} for truth in ("False", "true", 1)]
    _, found = run_with(tmp_path, values, *truths, objective=lambda metrics: [metrics["eval_loss"]])
    first, *others = [args for args, *_ in found]
    assert (first["seed"], first["warmup_steps"], first["per_device_train_batch_size"]) == (3, 0.5, 4)
    assert [args["dataloader_drop_last"] for args in others] == [False, True, True]


def test_batch_size_set_after_the_search_is_used(tmp_path):
    trainer, _ = run_with(tmp_path, {"per_device_train_batch_size": 3})
    assert trainer.args.per_device_train_batch_size == 8
    trainer.args.per_device_train_batch_size = 5
    trainer.train()
    assert trainer.state.train_batch_size == 5


def test_train_accepts_a_dict_as_trial(tmp_path):
    trials = []

    def model_init(trial):
        trials.append(trial)
        return Plain()

    trainer = make_search_trainer(tmp_path, model_init=model_init, save_strategy="steps", save_steps=2)
    trainer.train(trial={"learning_rate": 0.25, "width": 3})
    assert trainer.args.learning_rate == 0.25
    assert trials == [None, {"learning_rate": 0.25, "width": 3}]
    assert trainer.state.is_hyper_param_search and trainer.state.trial_params == trials[1]
    assert (tmp_path / "checkpoint-2").is_dir()
    with pytest.raises(InvalidArgument, match="trial=3: pass a trial of Optuna, or a dict"):
        trainer.train(trial=3)


def test_trial_resumes_a_checkpoint_with_its_own_arguments(tmp_path):
    """The states come from the checkpoint, the settings of optimizer and schedule from the trial's arguments."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 1, "learning_rate": 0.1}
    trainer = make_search_trainer(tmp_path, **settings)
    checkpoint = str(tmp_path / "checkpoint-2")
    trainer.train()
    undisturbed = logged_values(trainer, "loss")
    trainer.train(checkpoint, trial={"learning_rate": 0.1})
    assert logged_values(trainer, "loss") == undisturbed
    trainer.train(checkpoint, trial={"learning_rate": 0.01, "weight_decay": 0.25, "adam_beta1": 0.5})
    assert logged_values(trainer, "learning_rate") == pytest.approx([0.1, 0.075, 0.005, 0.0025])
    decayed, other = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.25, 0.0)
    assert decayed["betas"] == other["betas"] == (0.5, 0.999)
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {4}


def logged_values(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def test_plateau_schedule_keeps_the_rate_of_the_checkpoint(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    trainer = make_search_trainer(tmp_path, learning_rate=0.5, **settings)
    trainer.train()
    trainer.train(str(tmp_path / "checkpoint-2"), trial={"learning_rate": 0.25})
    assert "ReduceLROnPlateau keeps the checkpoint's learning rate 0.5 instead of the trial's 0.25" in caplog.text
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
