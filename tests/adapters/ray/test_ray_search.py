"""Real searches with Ray Tune: against transformers, with schedulers, killed and started again, and with failures."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from hftrainer import TrainerCallback, TrainingArguments
from hftrainer.callbacks.notebook import NotebookProgressCallback
from hftrainer.callbacks.progress import ProgressCallback
from hftrainer.checkpointing import names
from hftrainer.errors import DamagedCheckpoint, InvalidArgument, SearchFailed, UnknownArgument, UnsupportedArgument
from hftrainer.search import ray_search
from hftrainer.search.packing import pack
from hftrainer.search.ray_search import RaySearch
from tests.adapters.ray.searches import (
    QUIETLY,
    Diary,
    Failing,
    lower_rate,
    make_of_trial,
    make_trainer,
    nan_when_bad,
    nothing,
    rates,
    read,
    space,
    worse_later,
)
from tests.support.differences import OWN_FILES
from tests.support.parity import LIBRARIES, accuracy, build


def summary(best):
    """What can be compared of all trials of a search, in order."""
    return [
        (trial.status, trial.config, trial.metric_analysis.get("objective", {}).get("last"))
        for trial in best.run_summary.trials
    ]


# ---- Against transformers --------------------------------------------------------------------------------------


SETTINGS = {
    "evaluated": {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1},
    "after training": {"save_strategy": "epoch"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_same_search(tmp_path, case):
    found = {}
    for library in LIBRARIES:
        given = {"model_init": make_of_trial, "compute_metrics": accuracy}
        trainer, _ = build(library, "plain", tmp_path / library, trainer=given, **SETTINGS[case])
        best = trainer.hyperparameter_search(
            space,
            **{**QUIETLY, "n_trials": 3},
            direction="maximize",
            search_alg=BasicVariantGenerator(random_state=3),
            storage_path=str(tmp_path / f"{library}-results"),
        )
        ids = [trial.trial_id for trial in best.run_summary.trials]
        found[library] = {
            "trials": summary(best),
            "best": (ids.index(best.run_id), best.objective, best.hyperparameters),
            "reports": [trial.last_result["training_iteration"] for trial in best.run_summary.trials],
            "files": {
                (ids.index(path.parent.name.removeprefix("run-")), path.name): contents(path)
                for path in (tmp_path / library).glob("run-*/checkpoint-*")
            },
        }
    assert found["hftrainer"] == found["transformers"]
    assert len({str(config) for _, config, _ in found["hftrainer"]["trials"]}) == 3


def contents(folder):
    return sorted({file.name for file in folder.iterdir()} - OWN_FILES)


# ---- Schedulers and search algorithms --------------------------------------------------------------------------


def test_asha_stops_bad_trials(tmp_path, monkeypatch):
    """Four trials one after the other; those that are plainly worse than the ones before end at their first report."""
    monkeypatch.chdir(tmp_path)
    given = {"callbacks": [Diary(tmp_path / "diary"), Timer()], "loggers": [CSVLogger("csv")]}
    trainer = make_trainer("out", given, max_steps=8, report_to="tensorboard")
    callbacks, arguments = list(trainer.callback_handler.callbacks), trainer.args.to_dict()
    best = trainer.hyperparameter_search(
        rates(1e-3, 1e-4, 1.0, 2.0),
        **QUIETLY,
        scheduler=ASHAScheduler(time_attr="training_iteration", max_t=4, grace_period=1, reduction_factor=2),
        max_concurrent_trials=1,
        storage_path=str(tmp_path / "results"),
    )
    trials = best.run_summary.trials
    assert [trial.status for trial in trials] == ["TERMINATED"] * 4
    reports = [trial.last_result["training_iteration"] for trial in trials]
    assert reports[0] == 4 and reports[2:] == [1, 1]
    assert best.run_id == min(trials[:2], key=lambda trial: trial.last_result["objective"]).trial_id
    for trial, count in zip(trials, reports, strict=True):  # in the folder from which the search was started
        written = {path.name for path in (tmp_path / "out" / f"run-{trial.trial_id}").iterdir()}
        assert written == {f"checkpoint-{step}" for step in range(2, 2 * count + 1, 2)}
        state = json.loads((tmp_path / "out" / f"run-{trial.trial_id}" / "checkpoint-2/trainer_state.json").read_text())
        assert state["is_hyper_param_search"] and state["trial_params"] == trial.config
    runs = [f"run-{trial.trial_id}" for trial in trials]
    ended = [trial for event, trial, _ in read(tmp_path / "diary") if event == "end"]
    assert ended[:3] == runs[:3]  # Ray ends the last one's process
    assert {path.parent.name for path in tmp_path.glob("out/runs/*/*/events*")} == set(runs)
    # The Trainer of the process that searches is as it was.
    assert trainer.callback_handler.callbacks == callbacks and trainer.args.to_dict() == arguments
    assert trainer.hp_search_backend is None and trainer.hp_name is None
    trainer.train()
    assert trainer.state.global_step == 8


def test_population_based_training(tmp_path):
    """The worse trial goes on from the better one's checkpoint, at its step, with hyperparameters of its own."""
    given = {"callbacks": [Diary(tmp_path / "diary")]}
    trainer = make_trainer(tmp_path / "out", given, max_steps=6, logging_steps=1, lr_scheduler_type="linear")
    best = trainer.hyperparameter_search(
        rates(2.0, 1e-3),
        **QUIETLY,
        scheduler=PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=2,
            quantile_fraction=0.5,
            resample_probability=0,
            hyperparam_mutations={"learning_rate": [2.0, 1e-3]},
            custom_explore_fn=lower_rate,
            synch=True,
        ),
        storage_path=str(tmp_path / "results"),
    )
    worse, better = best.run_summary.trials
    assert worse.config == {"learning_rate": 0.005, "weight_decay": 0.25} and better.config == {"learning_rate": 1e-3}
    begun = [(trial, step) for event, trial, step in read(tmp_path / "diary") if event == "begin"]
    assert sorted(begun) == [(f"run-{trial.trial_id}", step) for trial in (worse, better) for step in (0, 4)]
    logs = {}
    for trial in (worse, better):
        folder = tmp_path / "out" / f"run-{trial.trial_id}" / "checkpoint-6"
        logs[trial] = json.loads((folder / names.TRAINER_STATE_NAME).read_text())["log_history"]
        optimizer = torch.load(folder / names.OPTIMIZER_NAME)
        assert {state["step"].item() for state in optimizer["state"].values()} == {6}
        assert optimizer["param_groups"][0]["weight_decay"] == trial.config.get("weight_decay", 0.0)
    assert lines(logs[worse], 1, 4) == lines(logs[better], 1, 4)
    rate = [line["learning_rate"] for line in lines(logs[worse], 5, 6) if "learning_rate" in line]
    assert rate == pytest.approx([0.005 * 2 / 6, 0.005 * 1 / 6])


def lines(log, first, last):
    return [line for line in log if first <= line["step"] <= last]


def test_search_algorithms_are_passed_through(tmp_path):
    """One of Ray's, with its own space of floats, a name of a run, and an argument of the model."""
    algorithm = OptunaSearch(metric="objective", mode="min", seed=1)
    trainer = make_trainer(tmp_path, model_init=make_of_trial)
    best = trainer.hyperparameter_search(
        space,
        **{**QUIETLY, "n_trials": 2},
        search_alg=algorithm,
        hp_name=lambda trial: f"width-{trial['width']}-{trial['learning_rate']}",
        storage_path=str(tmp_path / "results"),
    )
    assert len(algorithm._ot_study.trials) == len(best.run_summary.trials) == 2
    for trial in best.run_summary.trials:
        folder = tmp_path / f"width-{trial.config['width']}-{trial.config['learning_rate']}" / "checkpoint-4"
        assert folder.is_dir() and not (tmp_path / f"run-{trial.trial_id}").exists()


# ---- Ended and started again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_off", [False, True])
def test_killed_and_resumed(tmp_path, cut_off):
    """A search that is killed in its second trial: the first is not trained again, the second goes on."""
    command = [sys.executable, "-m", "tests.adapters.ray.killed", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TUNE_GLOBAL_CHECKPOINT_S": "0"}
    diary = tmp_path / "diary"
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not [line for line in read(diary) if line[0] == "save" and line[2] == 6 and line[1].endswith("1")]:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    if cut_off:  # as by a kill while it was written
        (state,) = (tmp_path / "results" / "search").glob("experiment_state-*.json")
        os.truncate(state, state.stat().st_size // 2)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert again.returncode == 0, again.stderr
    trials = sorted(json.loads(again.stdout.splitlines()[-1]))
    assert [status for _, status, _ in trials] == ["TERMINATED"] * 3
    assert [rate for _, _, rate in trials] == [1e-3, 2e-3, 3e-3]
    begun = [(trial, step) for event, trial, step in read(diary) if event == "begin"]
    runs = [f"run-{trial}" for trial, _, _ in trials]
    assert [trial for trial, _ in begun] == [runs[0], runs[1], runs[1], runs[2]]
    assert begun[2][1] in (4, 6) and [step for _, step in begun].count(0) == 3


def test_a_state_that_was_cut_off_is_no_reason_to_begin_anew(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "experiment_state-2026-01-01_00-00-00.json").write_text("")
    trainer = make_trainer(tmp_path)
    with pytest.raises(
        DamagedCheckpoint, match=r"experiment_state-.*json is truncated: .* resume='AUTO' would start a new search"
    ):
        trainer.hyperparameter_search(rates(1e-3), **QUIETLY, name="search", storage_path=str(tmp_path), resume="AUTO")


# ---- Trials that fail ------------------------------------------------------------------------------------------


def test_failed_trials_are_no_candidates(tmp_path, caplog):
    """The best objective is of a trial that failed afterwards, and the next is NaN."""
    trainer = make_trainer(tmp_path, {"callbacks": [Failing]})
    keywords = {**QUIETLY, "direction": "maximize", "storage_path": str(tmp_path / "results")}
    best = trainer.hyperparameter_search(rates(0.5, 1e3, 1e-3), nan_when_bad, **keywords)
    assert [trial.status for trial in best.run_summary.trials] == ["ERROR", "TERMINATED", "TERMINATED"]
    failed, without_number, good = best.run_summary.trials
    assert failed.last_result["objective"] > good.last_result["objective"] == best.objective
    assert without_number.last_result["objective"] != without_number.last_result["objective"]
    assert best.run_id == good.trial_id and best.hyperparameters == {"learning_rate": 1e-3}
    best.run_summary.trials.remove(good)
    with pytest.raises(SearchFailed) as told:
        choose(best.run_summary, "last")
    assert "No trial was completed (1 error, 1 terminated)" in str(told.value)
    assert "\n- RuntimeError: CUDA out of memory: as asked" in str(told.value)
    assert "\n- compute_objective returned nan" in str(told.value)


def test_mistakes_end_the_search(tmp_path):
    """What every other trial would find too reaches the user as it is."""
    trainer = make_trainer(tmp_path)
    keywords = {**QUIETLY, "max_concurrent_trials": 1, "storage_path": str(tmp_path / "results")}
    with pytest.raises(InvalidArgument, match=r"compute_objective returned None: it must return a number\.$"):
        trainer.hyperparameter_search(rates(1e-3, 1e-2), nothing, **keywords)
    assert trainer.hp_search_backend is None


def choose(analysis, scope):
    """The best for the larger objective."""
    search = RaySearch(context=None)  # which reading results does not need
    search.directions = ["maximize"]
    return search._best(analysis, scope).hyperparameters["learning_rate"]


def test_which_objectives_count(tmp_path, monkeypatch):
    """The last of a trial, or with ray_scope='all' the best: here that of a trial which gets worse afterwards."""
    trainer = make_trainer(tmp_path, ray_scope="all")
    keywords = {**QUIETLY, "direction": "maximize", "storage_path": str(tmp_path / "results")}
    best = trainer.hyperparameter_search(rates(2.0, 1e-5), worse_later, **keywords)
    assert best.hyperparameters["learning_rate"] == choose(best.run_summary, "all") == 2.0
    assert choose(best.run_summary, "last") == 1e-5
    assert ray_search._scope(trainer.args) == "all"
    assert ray_search._scope(TrainingArguments(str(tmp_path))) == "last"
    monkeypatch.setenv("RAY_SCOPE", "avg")  # where v5 has it
    assert ray_search._scope(TrainingArguments(str(tmp_path))) == "avg"


# ---- Bad input -------------------------------------------------------------------------------------------------


def refused(error, words, trainer=(), **keywords):
    return error, words, dict(trainer), {"hp_space": rates(1e-3), **QUIETLY, **keywords}


REFUSED = {
    "keyword": refused(UnknownArgument, "Ray Tune has no argument 'schedular'; did you mean 'scheduler'", schedular=1),
    "one of ours": refused(UnknownArgument, "has no argument 'num_samples'; did you mean 'n_trials'", num_samples=3),
    "internal": refused(UnknownArgument, "has no argument '_remote'", _remote=True),
    "misspelled": refused(
        UnknownArgument,
        "TrainingArguments has no argument 'learning_rte'; did you mean 'learning_rate'",
        hp_space=lambda trial: {"learning_rte": tune.uniform(0, 1)},
    ),
    "read once": refused(InvalidArgument, "report_to: read only when", hp_space=lambda trial: {"report_to": "none"}),
    "no dict": refused(InvalidArgument, "hp_space returned None", hp_space=lambda trial: None),
    "objectives": refused(UnsupportedArgument, "one objective; use backend='optuna'", direction=["minimize"] * 2),
    "direction": refused(InvalidArgument, "direction='down': give 'minimize' or 'maximize'", direction="down"),
    "no end": refused(
        InvalidArgument, "n_trials=None: the search would never end. .* or time_budget_s in seconds", n_trials=None
    ),
    "no trials": refused(InvalidArgument, "n_trials=0", n_trials=0),
    "scope": refused(InvalidArgument, "ray_scope='best': give one of 'last', 'all'", {"ray_scope": "best"}),
    "no name": refused(InvalidArgument, "resume='AUTO' needs the name", resume="AUTO"),
    "GPUs": refused(UnsupportedArgument, "a trial trains in one process", resources_per_trial={"gpu": 2}),
    "unevaluated": refused(
        InvalidArgument,
        "scheduler=AsyncHyperBandScheduler compares trials during training, and eval_strategy='no'",
        {"eval_strategy": "no"},
        scheduler=ASHAScheduler(),
    ),
    "by name": refused(InvalidArgument, "scheduler=hyperband", {"eval_strategy": "no"}, scheduler="hyperband"),
    "incomplete checkpoints": refused(
        InvalidArgument, "and save_only_model=False", {"save_only_model": True}, scheduler="hyperband"
    ),
    "no checkpoints": refused(
        InvalidArgument,
        "PopulationBasedTraining resumes trials from checkpoints, which need the optimizer's state",
        {"save_strategy": "no"},
        scheduler=PopulationBasedTraining(hyperparam_mutations={"learning_rate": [1, 2]}),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    error, words, settings, keywords = REFUSED[case]
    trainer = make_trainer(tmp_path, **settings)
    with pytest.raises(error, match=words):
        trainer.hyperparameter_search(**keywords)
    assert trainer.hp_search_backend is None and trainer.model is not None


def test_several_processes_are_refused(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(UnsupportedArgument, match=r"a launcher has started 2. Start the script without a launcher"):
        trainer.hyperparameter_search(rates(1e-3), **QUIETLY)


# ---- On the way into another process ---------------------------------------------------------------------------


class Holding(TrainerCallback):
    """Holds the Trainer, as callbacks do, and something else."""

    def __init__(self, trainer, other=None):
        self.trainer, self.other = trainer, other


def test_packed(tmp_path, monkeypatch):
    """References to the Trainer are to the new one, which has an engine of its own and no bar of a notebook's."""
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.add_callback(Holding(trainer))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    trainer.add_callback(NotebookProgressCallback)
    there = pack(trainer._hftrainer).unpack().trainer
    *_, holding, progress = there.callback_handler.callbacks
    assert there is not trainer and holding.trainer is there and isinstance(progress, ProgressCallback)
    assert (
        there._hftrainer.engine is not trainer._hftrainer.engine
        and there.accelerator._engine is there._hftrainer.engine
    )
    there.train()
    assert there.state.log_history[0]["eval_loss"] == trainer.state.log_history[0]["eval_loss"]
    assert any(isinstance(callback, NotebookProgressCallback) for callback in trainer.callback_handler.callbacks)


@pytest.mark.parametrize("name", ["Trainer.lock", "The callback Holding"])
def test_what_cannot_be_sent_is_named(tmp_path, name):
    trainer = make_trainer(tmp_path)
    if name == "Trainer.lock":
        trainer.lock = threading.Lock()
    else:
        trainer.add_callback(Holding(trainer, threading.Lock()))
    with pytest.raises(InvalidArgument, match=rf"^{name} cannot be pickled for Ray's processes .*on_train_begin"):
        trainer.hyperparameter_search(rates(1e-3), **QUIETLY)
