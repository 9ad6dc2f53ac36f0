"""What a search refuses, which trials count, and what a trial changes in the Trainer."""

import gc
import logging
import math
from datetime import timedelta

import numpy as np
import optuna
import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage, SearchFailed, UnknownArgument, UnsupportedArgument
from hftrainer.parallel.process_identity import is_gone, this_process
from hftrainer.search.ray_search import RaySearch
from hftrainer.search.studies import FAILED, INTERRUPTED, OWNER, RETRY_OF, TrialCount
from hftrainer.trainer_utils import BestRun, default_compute_objective
from tests.support.tiny import Plain, make_plain, plain_data


@pytest.fixture(autouse=True, scope="module")
def _collect_quickly():
    gc.freeze()
    yield
    gc.unfreeze()


def make_trainer(folder, trainer=None, model_init=make_plain, **settings):
    defaults = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, **{**defaults, **settings})
    given = {"train_dataset": plain_data(), "eval_dataset": plain_data(8), **(trainer or {})}
    return Trainer(model_init=model_init, args=args, **given)


def rates(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)}


# ---- Bad input -------------------------------------------------------------------------------------------------


def no_dict(trial):
    trial.suggest_float("learning_rate", 1e-4, 1e-1)


REFUSED = {
    "sigopt": ({"backend": "sigopt"}, UnsupportedArgument, r"SigOpt's service was shut down\. Use backend='optuna'"),
    "ray": ({"backend": "ray"}, MissingPackage, r"pip install 'ray\[tune\]'"),
    "unknown backend": ({"backend": "optunna"}, InvalidArgument, "did you mean 'optuna'"),
    "unknown keyword": ({"studyname": "x"}, UnknownArgument, "has no argument 'studyname'; did you mean 'study_name'"),
    "directions": ({"directions": ["minimize"]}, UnknownArgument, "did you mean 'direction'"),
    "direction": ({"direction": "down"}, InvalidArgument, "direction='down': give 'minimize' or 'maximize'"),
    "no direction": ({"direction": []}, InvalidArgument, "give 'minimize' or 'maximize', or a list"),
    "no seconds": ({"timeout": -1}, InvalidArgument, "timeout=-1: give a number of seconds above 0"),
    "seconds as text": ({"timeout": "10"}, InvalidArgument, "timeout='10': give a number of seconds"),
    "a callback alone": ({"callbacks": print}, InvalidArgument, "callbacks=.*: give a list of functions"),
    "no exceptions": ({"catch": "x"}, InvalidArgument, "catch='x': give exception classes"),
    "no database": ({"storage": "search.db"}, InvalidArgument, r"storage='search\.db' is not a database URL"),
    "no truth": (
        {"hp_space": lambda trial: {"dataloader_drop_last": "maybe"}},
        InvalidArgument,
        "dataloader_drop_last='maybe' is not a bool: give True or False",
    ),
    "no trials": ({"n_trials": 0}, InvalidArgument, "n_trials=0: give a positive integer"),
    "no end": ({"n_trials": None}, InvalidArgument, "n_trials=None: the search would never end"),
    "no name to go on with": ({"load_if_exists": True}, InvalidArgument, "needs a study_name"),
    "a space that is none": ({"hp_space": {"learning_rate": 1}}, InvalidArgument, "hp_space=.*: give a function"),
    "a misspelled argument": (
        {"hp_space": lambda trial: {"learning_rte": trial.suggest_float("lr", 0, 1)}},
        UnknownArgument,
        "TrainingArguments has no argument 'learning_rte'; did you mean 'learning_rate'",
    ),
    "a method": ({"hp_space": lambda trial: {"to_dict": 1}}, UnknownArgument, "has no argument 'to_dict'"),
    "an argument of the model": (
        {"hp_space": lambda trial: {"zebras": 1}},
        UnknownArgument,
        r"has no argument 'zebras'; suggest hyperparameters of the model in model_init\(trial\)",
    ),
    "no dict": ({"hp_space": no_dict}, InvalidArgument, "hp_space returned None: it must return a dict"),
    "no number": (
        {"hp_space": lambda trial: {"num_train_epochs": "many"}},
        InvalidArgument,
        "num_train_epochs='many' is not of type float",
    ),
    "out of range": (
        {"hp_space": lambda trial: {"gradient_accumulation_steps": 0}},
        InvalidArgument,
        "gradient_accumulation_steps=0: give a number of at least 1",
    ),
    "read once": ({"hp_space": lambda trial: {"report_to": "csv"}}, InvalidArgument, "report_to: read only when"),
    "nothing returned": ({"compute_objective": lambda metrics: None}, InvalidArgument, "returned None: it must return"),
    "two for one": ({"compute_objective": lambda metrics: (1, 2)}, InvalidArgument, r"returned \(1, 2\): .* a number"),
    "one for two": ({"direction": ["minimize"] * 2}, InvalidArgument, "it must return 2 numbers, one per direction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, monkeypatch, case):
    keywords, error, words = REFUSED[case]
    monkeypatch.setattr(RaySearch, "is_available", lambda: False)  # make test-downstream installs it
    trainer = make_trainer(tmp_path, learning_rate=0.5)
    with pytest.raises(error, match=words):
        trainer.hyperparameter_search(**{"hp_space": rates, "n_trials": 2, **keywords})
    assert trainer.hp_search_backend is None and trainer.args.learning_rate == 0.5


def test_no_model_init(tmp_path):
    trainer = make_trainer(tmp_path, model_init=None, trainer={"model": make_plain()})
    with pytest.raises(InvalidArgument, match="give Trainer a model_init"):
        trainer.hyperparameter_search()


def test_optuna_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="pip install optuna"):
        make_trainer(tmp_path).hyperparameter_search()


def test_a_study_that_exists(tmp_path):
    keywords = {"hp_space": rates, "n_trials": 1, "storage": f"sqlite:///{tmp_path}/a.db", "study_name": "a"}
    make_trainer(tmp_path).hyperparameter_search(**keywords)
    with pytest.raises(InvalidArgument, match="study_name='a' is in the storage already: continue it with load_if"):
        make_trainer(tmp_path).hyperparameter_search(**keywords)
    for direction in ("maximize", ["minimize", "minimize"]):
        with pytest.raises(InvalidArgument, match=r"the study 'a' in the storage has \['minimize'\]"):
            make_trainer(tmp_path).hyperparameter_search(direction=direction, load_if_exists=True, **keywords)


def test_truths_and_numbers_of_other_libraries(tmp_path):
    trainer, seen = make_trainer(tmp_path), []
    trainer.add_callback(type("Look", (TrainerCallback,), {"on_train_begin": lambda *a, **k: seen.append(drops())}))

    def drops():
        return trainer.args.dataloader_drop_last

    trainer.hyperparameter_search(
        lambda trial: {"dataloader_drop_last": ["False", "true", 1][trial.number]},
        compute_objective=lambda metrics: [metrics["eval_loss"]],
        n_trials=np.int64(3),
    )
    assert seen == [False, True, True]


def test_the_default_objective_is_no_measurement(tmp_path):
    """`evaluate()` before the search measures the time that it takes to prepare the model."""
    trainer = make_trainer(tmp_path, skip_memory_metrics=False, eval_strategy="no")
    trainer.evaluate()
    best = trainer.hyperparameter_search(rates, n_trials=1)
    assert best.objective == trainer.hp_study.best_value > 0.1
    measured = ["eval_model_preparation_time", "eval_runtime", "eval_mem_cpu_alloc_delta", "eval_steps_per_second"]
    assert default_compute_objective({"eval_loss": 1.0, **dict.fromkeys(measured, 9.0)}) == 1.0


def test_names_for_the_model(tmp_path, caplog):
    """With a `model_init` that takes the trial, a name may be its own, unless it is nearly an argument's."""

    def model_init(trial):
        return Plain()

    trainer = make_trainer(tmp_path, model_init=model_init)
    with caplog.at_level(logging.INFO, "hftrainer"):
        trainer.hyperparameter_search(lambda trial: {"width": 3}, n_trials=1)
    assert "Not training arguments, so only model_init can use them: width" in caplog.text
    with pytest.raises(UnknownArgument, match="did you mean 'learning_rate'"):
        trainer.hyperparameter_search(lambda trial: {"learning_rat": 3}, n_trials=1)


# ---- Trials that fail ------------------------------------------------------------------------------------------


def of(study):
    return [trial.state.name for trial in study.trials]


def test_out_of_memory_is_skipped(tmp_path):
    made = []

    def model_init(trial):
        made.append(trial)
        if len(made) == 3:  # the Trainer makes one itself
            raise torch.OutOfMemoryError("CUDA out of memory: as asked")
        return Plain()

    trainer = make_trainer(tmp_path, model_init=model_init)
    best = trainer.hyperparameter_search(rates, n_trials=4)
    assert of(trainer.hp_study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert trainer.hp_study.trials[1].user_attrs[FAILED] == "OutOfMemoryError: CUDA out of memory: as asked"
    assert best.run_id in "023" and isinstance(best, BestRun)


def test_nan_is_skipped(tmp_path):
    values = iter([1.0, 1.0, 1.0, math.nan, 3.0, 3.0])
    trainer = make_trainer(tmp_path)
    best = trainer.hyperparameter_search(rates, lambda metrics: next(values), n_trials=3, direction="maximize")
    assert of(trainer.hp_study) == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trainer.hp_study.trials[1].user_attrs[FAILED] == "compute_objective returned nan"
    assert (best.run_id, best.objective) == ("2", 3.0)


def test_all_fail(tmp_path):
    with pytest.raises(SearchFailed, match=r"No trial was completed \(2 fail\).*\n- compute_objective returned nan"):
        make_trainer(tmp_path).hyperparameter_search(rates, lambda metrics: math.nan, n_trials=2)


class Failing(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if state.trial_params["learning_rate"] > 0.05:
            raise KeyError("of the user's")


@pytest.mark.parametrize("catch", [KeyError, (KeyError,)])
def test_other_errors_end_the_search_unless_caught(tmp_path, catch):
    def halves(trial):
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.01, 0.1])}

    keywords = {
        "hp_space": halves,
        "n_trials": 2,
        "sampler": optuna.samplers.GridSampler({"learning_rate": [0.01, 0.1]}),
    }
    with pytest.raises(KeyError, match="of the user's"):
        make_trainer(tmp_path, {"callbacks": [Failing]}).hyperparameter_search(**keywords)
    trainer = make_trainer(tmp_path, {"callbacks": [Failing]})
    trainer.hyperparameter_search(**keywords, catch=catch)
    assert sorted(of(trainer.hp_study)) == ["COMPLETE", "FAIL"]
    assert {trial.user_attrs.get(FAILED) for trial in trainer.hp_study.trials} == {None, 'KeyError: "of the user\'s"'}


class Interrupting(TrainerCallback):
    def __init__(self, at, error):
        self.at, self.error = at, error

    def on_step_end(self, args, state, control, **kwargs):
        self.at -= 1
        if self.at == 0:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted(tmp_path, error):
    """Ctrl-C keeps what is finished; the same call goes on, and another trial takes the place of the one cut off."""
    keywords = {"storage": f"sqlite:///{tmp_path}/a.db", "study_name": "a", "load_if_exists": True, "n_trials": 3}
    trainer = make_trainer(tmp_path, {"callbacks": [Interrupting(4, error)]})
    with pytest.raises(error):
        trainer.hyperparameter_search(rates, **keywords)
    assert of(trainer.hp_study) == ["COMPLETE", "FAIL", "WAITING"]
    assert trainer.hp_study.trials[1].user_attrs[INTERRUPTED] == f"stopped by {error.__name__}"
    trainer.hyperparameter_search(rates, **keywords)
    assert of(trainer.hp_study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    _, lost, again, last = trainer.hp_study.trials
    assert again.params == lost.params != last.params and again.user_attrs[RETRY_OF] == 1
    before = trainer.hp_study.best_trial.number
    assert trainer.hyperparameter_search(rates, **keywords).run_id == str(before)  # nothing is left to do
    assert len(trainer.hp_study.trials) == 4


# ---- Which trials count ----------------------------------------------------------------------------------------


def test_another_process_is_gone_or_not():
    mine = this_process()
    host, process, began = mine.split(" ")
    assert not is_gone(mine)
    assert is_gone(f"{host} {process} {int(began) - 1}")  # the id has been used again
    assert is_gone(f"{host} {2**22 + 1} 1")
    assert not is_gone(f"elsewhere {2**22 + 1} 1")


def test_count(monkeypatch):
    study = optuna.create_study()
    count = TrialCount(study, 3)
    assert count.remaining() == 3
    study.enqueue_trial({"x": 1})  # waits: nobody has begun it
    assert count.remaining() == 3
    trials = [study.ask() for _ in range(3)]
    trials[0].set_user_attr(OWNER, this_process())
    trials[1].set_user_attr(OWNER, f"{this_process().split(' ')[0]} {2**22 + 1} 1")
    trials[2].set_user_attr(OWNER, "elsewhere 1 1")
    assert count.remaining() == 1
    assert of(study) == ["RUNNING", "FAIL", "RUNNING"]
    assert "has ended" in study.trials[1].user_attrs[INTERRUPTED]
    fourth = study.ask()
    assert not count.is_surplus(fourth.number)
    fourth.set_user_attr(OWNER, this_process())
    assert count.remaining() == 0
    assert count.is_surplus(study.ask().number)
    assert TrialCount(study, None).remaining() is None
    study.tell(fourth, state=optuna.trial.TrialState.FAIL)  # without a reason, as Optuna's heartbeat does
    assert TrialCount(study, 4).remaining() == 1


def test_tried_again_once():
    study = optuna.create_study()
    for number in (0, 1):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        trial.set_user_attr(OWNER, f"{this_process().split(' ')[0]} {2**22 + 1} 1")
        assert TrialCount(study, 1).remaining() == 1
        assert of(study) == [["FAIL", "WAITING"], ["FAIL", "FAIL"]][number]
    assert study.trials[0].params == study.trials[1].params


def test_a_process_that_was_killed_before_it_could_try_again():
    """It had said that the trial was cut off: the next search tries it, and the one after that does not."""
    study = optuna.create_study()
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr(INTERRUPTED, "its process has ended")
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    for _ in range(2):
        TrialCount(study, 1)
        assert of(study) == ["FAIL", "WAITING"]
    assert study.ask().suggest_float("x", 0, 1) == study.trials[0].params["x"]


def test_tried_again_if_it_had_not_begun():
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25})
    for _ in range(2):
        trial = study.ask()
        trial.set_user_attr(OWNER, f"{this_process().split(' ')[0]} {2**22 + 1} 1")
        TrialCount(study, 1).remaining()
    assert study.ask().suggest_float("x", 0, 1) == 0.25
    assert [trial.user_attrs.get(RETRY_OF) for trial in study.trials] == [None, 0, 0]


def test_another_process_has_finished_the_trial_meanwhile():
    study = optuna.create_study()
    trial = study.ask()
    running = study.trials[0]
    study.tell(trial, 0.5)
    TrialCount(study, 1)._interrupt(running, "its process has ended")
    assert of(study) == ["COMPLETE"]
    assert INTERRUPTED not in study.trials[0].user_attrs


def test_a_process_that_was_killed_before_it_said_who_it_is(monkeypatch):
    monkeypatch.setattr("hftrainer.search.studies._TIME_TO_SET_OWNER", timedelta(seconds=0.3))
    study = optuna.create_study()
    study.ask()
    assert TrialCount(study, 1).remaining() == 1  # after waiting
    assert of(study) == ["FAIL"]


def test_last_trials_begun_at_the_same_moment(tmp_path, monkeypatch):
    """Another process takes the last one between our look and our trial."""
    trainer = make_trainer(tmp_path)

    original = optuna.Study.ask

    def ask(study, *args):
        if len(study.trials) == 2:
            study.add_trial(optuna.create_trial(value=0.0))
        return original(study, *args)

    monkeypatch.setattr(optuna.Study, "ask", ask)
    trainer.hyperparameter_search(rates, n_trials=3)
    assert of(trainer.hp_study) == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL"]
    assert "same time" in trainer.hp_study.trials[3].user_attrs[INTERRUPTED]


def test_time_and_callbacks_end_it(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.hyperparameter_search(rates, n_trials=None, timeout=0.5)
    assert 1 <= len(trainer.hp_study.trials) < 100
    seen = []

    def stop(study, trial):
        seen.append(trial.number)
        study.stop()

    trainer.hyperparameter_search(rates, n_trials=5, callbacks=[stop], gc_after_trial=True)
    assert seen == [0]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:Heartbeat of storage")
@pytest.mark.parametrize("kind", ["database", "journal"])
def test_optuna_alone_does_not_notice_a_killed_process_at_once(tmp_path, kind):
    """Its heartbeat waits for a period of grace, and a journal has no heartbeat."""
    if kind == "journal":
        path = str(tmp_path / "journal")
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    else:
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/a.db", heartbeat_interval=1)
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    trial.set_user_attr(OWNER, f"{this_process().split(' ')[0]} {2**22 + 1} 1")
    if kind == "database":
        storage.record_heartbeat(trial._trial_id)
    optuna.storages.fail_stale_trials(study)
    assert of(study) == ["RUNNING"]
    assert TrialCount(study, 1).remaining() == 1
    assert of(study) == ["FAIL"]


def test_trials_on_another_machine(tmp_path, caplog):
    """Nobody here knows whether they are still running: they count, and the result says that they are not in it."""
    keywords = {"storage": f"sqlite:///{tmp_path}/a.db", "study_name": "a"}
    optuna.create_study(**keywords).ask().set_user_attr(OWNER, "elsewhere 1 1")
    trainer = make_trainer(tmp_path)
    trainer.hyperparameter_search(rates, n_trials=3, load_if_exists=True, **keywords)
    assert of(trainer.hp_study) == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert "1 of the trials are still running in other processes" in caplog.text


def test_enqueued_trials_come_first(tmp_path):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    optuna.create_study(storage=storage, study_name="a").enqueue_trial({"learning_rate": 0.03})
    trainer = make_trainer(tmp_path)
    trainer.hyperparameter_search(rates, n_trials=2, storage=storage, study_name="a", load_if_exists=True)
    assert len(trainer.hp_study.trials) == 2
    assert trainer.hp_study.trials[0].params == {"learning_rate": 0.03}


def test_a_seeded_sampler_does_not_repeat_itself(tmp_path):
    keywords = {"storage": f"sqlite:///{tmp_path}/a.db", "study_name": "a", "load_if_exists": True}
    for n_trials in (2, 4):
        sampler = optuna.samplers.RandomSampler(seed=1)
        trainer = make_trainer(tmp_path)
        trainer.hyperparameter_search(rates, n_trials=n_trials, sampler=sampler, **keywords)
    assert len({trial.params["learning_rate"] for trial in trainer.hp_study.trials}) == 4


# ---- The arguments of a trial ----------------------------------------------------------------------------------


class Notes(TrainerCallback):
    """What each run has found when it begins."""

    def __init__(self):
        self.found = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.found.append((args.to_dict(), self.trainer._train_batch_size, self.trainer._hftrainer.engine.plan))


def run_with(folder, *choices, **settings):
    notes, left = Notes(), iter(choices)
    trainer = notes.trainer = make_trainer(folder, {"callbacks": [notes]}, **settings)
    trainer.hyperparameter_search(lambda trial: next(left), n_trials=len(choices))
    return trainer, notes.found


def test_what_follows_from_arguments_is_built_anew(tmp_path):
    trainer, found = run_with(
        tmp_path,
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
        {"lightning_config": {"limit_val_batches": 1}, "bf16": True},
        {"eval_strategy": "no", "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    )
    (first, batch, plan), (second, default_batch, second_plan), (third, *_) = found
    assert (batch, plan.accumulate_grad_batches, first["label_smoothing_factor"]) == (3, 2, 0.1)
    assert (default_batch, second_plan.accumulate_grad_batches, second["label_smoothing_factor"]) == (8, 1, 0.0)
    assert second_plan.config["limit_val_batches"] == 1 and second_plan.precision == "bf16-mixed"
    assert "lightning_config" not in third and third["bf16"] is False
    assert third["activation_checkpointing_kwargs"] == {"use_reentrant": False}
    assert trainer.args.eval_strategy == "steps" and trainer.args.activation_checkpointing_kwargs is None


def test_label_smoothing_reaches_the_loss(tmp_path):
    losses = []
    for factor in (0.0, 0.5):
        trainer = make_trainer(tmp_path)
        losses.append(trainer.hyperparameter_search(lambda trial, f=factor: {"label_smoothing_factor": f}, n_trials=1))
    assert losses[0].objective != losses[1].objective


def test_values_are_cast_but_not_cut_off(tmp_path):
    _, found = run_with(tmp_path, {"seed": 3.7, "warmup_steps": 0.5, "per_device_train_batch_size": "4"})
    args = found[0][0]
    assert (args["seed"], args["warmup_steps"], args["per_device_train_batch_size"]) == (3, 0.5, 4)


def test_best_batch_size_by_hand(tmp_path):
    trainer, _ = run_with(tmp_path, {"per_device_train_batch_size": 3})
    assert trainer.args.per_device_train_batch_size == 8
    trainer.args.per_device_train_batch_size = 5
    trainer.train()
    assert trainer.state.train_batch_size == 5


def test_a_dict_as_trial(tmp_path):
    given = []

    def model_init(trial):
        given.append(trial)
        return Plain()

    trainer = make_trainer(tmp_path, model_init=model_init, save_strategy="steps", save_steps=2)
    trainer.train(trial={"learning_rate": 0.25, "width": 3})
    assert trainer.args.learning_rate == 0.25
    assert given == [None, {"learning_rate": 0.25, "width": 3}]
    assert trainer.state.is_hyper_param_search and trainer.state.trial_params == given[1]
    assert (tmp_path / "checkpoint-2").is_dir()
    with pytest.raises(InvalidArgument, match="trial=3: give a trial of Optuna, or a dict"):
        trainer.train(trial=3)


def test_a_trial_goes_on_from_the_checkpoint_of_another(tmp_path):
    """The states come from the checkpoint, the settings of optimizer and schedule from the trial's arguments."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 1, "learning_rate": 0.1}
    trainer = make_trainer(tmp_path, **settings)
    checkpoint = str(tmp_path / "checkpoint-2")
    trainer.train()
    undisturbed = values(trainer, "loss")
    trainer.train(checkpoint, trial={"learning_rate": 0.1})
    assert values(trainer, "loss") == undisturbed
    trainer.train(checkpoint, trial={"learning_rate": 0.01, "weight_decay": 0.25, "adam_beta1": 0.5})
    assert values(trainer, "learning_rate") == pytest.approx([0.1, 0.075, 0.005, 0.0025])
    decayed, other = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.25, 0.0)
    assert decayed["betas"] == other["betas"] == (0.5, 0.999)
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {4}


def values(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def test_a_rate_that_follows_a_metric_stays(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    trainer = make_trainer(tmp_path, learning_rate=0.5, **settings)
    trainer.train()
    trainer.train(str(tmp_path / "checkpoint-2"), trial={"learning_rate": 0.25})
    assert "ReduceLROnPlateau keeps the checkpoint's learning rate 0.5 instead of the trial's 0.25" in caplog.text
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_default_objective():
    assert default_compute_objective({"eval_loss": 1.0, "epoch": 2, "eval_runtime": 3.0}) == 1.0
    assert default_compute_objective({"eval_loss": 1.0, "eval_a": 2.0, "eval_b": 3.0, "eval_a_per_second": 1}) == 5.0


def test_the_search_costs_no_import(processes):
    code = "import sys, hftrainer.trainer; assert 'optuna' not in sys.modules"
    done = processes.run("-c", code, fresh=True)
    assert done.returncode == 0, done.stderr
