"""Real searches with Ray Tune: against transformers, with schedulers, killed and started again, and with failures."""

import csv
import json
import os
import signal
import threading

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from hftrainer import TrainerCallback, TrainingArguments
from hftrainer.callbacks.notebook import NotebookProgressCallback
from hftrainer.callbacks.progress_bar import ProgressCallback
from hftrainer.checkpointing import layout
from hftrainer.errors import DamagedCheckpoint, InvalidArgument, UnknownArgument, UnsupportedArgument
from hftrainer.search.workers import pickle_trainer
from hftrainer_ray import search as ray_search
from hftrainer_ray.search import RaySearch
from tests.adapters.ray import searches
from tests.adapters.ray.searches import Diary, RayBackend, make_of_trial, make_saving, read, space
from tests.support.known_differences import OWN_FILES
from tests.support.parity import accuracy, assert_agree, build
from tests.support.searches import return_none


class TestRay(RayBackend):
    def failures(self, trainer, best, caplog):
        trials = best.run_summary.trials
        assert [trial.status for trial in trials] == ["ERROR", "TERMINATED", "TERMINATED"]
        assert trials[0].last_result["objective"] > trials[2].last_result["objective"] == best.objective
        assert best.run_id == trials[2].trial_id
        return "\n".join(map(ray_search._explain_failure, trials[:2]))


backend = TestRay()
search, grid = backend.search, backend.grid


@pytest.mark.parametrize("settings", [{"eval_strategy": "epoch", "save_total_limit": 1}, {}], ids=str)
def test_trials_and_best_are_those_of_transformers(tmp_path, settings):
    def run(library):
        trainer_kwargs = {"model_init": make_of_trial, "compute_metrics": accuracy}
        options = {"save_strategy": "epoch", "trainer": trainer_kwargs, **settings}
        trainer, _ = build(library, "plain", tmp_path / library, **options)
        generator = BasicVariantGenerator(random_state=3)
        best = search(trainer, hp_space=space, n_trials=3, direction="maximize", search_alg=generator)
        trials = best.run_summary.trials
        ids = [trial.trial_id for trial in trials]
        assert len({str(trial.config) for trial in trials}) == 3
        return {
            "trials": [
                (trial.status, trial.config, trial.metric_analysis.get("objective", {}).get("last")) for trial in trials
            ],
            "best": (ids.index(best.run_id), best.objective, best.hyperparameters),
            "reports": [trial.last_result["training_iteration"] for trial in trials],
            "files": {
                (ids.index(path.parent.name.removeprefix("run-")), path.name): set(os.listdir(path)) - OWN_FILES
                for path in (tmp_path / library).glob("run-*/checkpoint-*")
            },
        }

    assert_agree(run)


def test_asha_stops_bad_trials(tmp_path, monkeypatch):
    """The last two of four trials are worse, and end at their first report."""
    monkeypatch.chdir(tmp_path)
    trainer_kwargs = {"callbacks": [Diary(tmp_path / "diary"), Timer()], "loggers": [CSVLogger("csv")]}
    trainer = make_saving("out", trainer_kwargs, max_steps=8, report_to="tensorboard")
    callbacks, arguments = list(trainer.callback_handler.callbacks), trainer.args.to_dict()
    asha = ASHAScheduler(time_attr="training_iteration", max_t=4, grace_period=1, reduction_factor=2)
    rates = grid(learning_rate=[1e-3, 1e-4, 1.0, 2.0])
    best = search(trainer, **rates, scheduler=asha, max_concurrent_trials=1)
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


def test_population_based_training_resumes_the_better_trial(tmp_path):
    """The worse trial goes on from the better one's checkpoint, at its step, with hyperparameters of its own."""
    trainer_kwargs = {"callbacks": [Diary(tmp_path / "diary")]}
    trainer = make_saving(tmp_path / "out", trainer_kwargs, max_steps=6, logging_steps=1, lr_scheduler_type="linear")
    explored = {"hyperparam_mutations": {"learning_rate": [2.0, 1e-3]}, "custom_explore_fn": searches.lower_rate}
    often = {"time_attr": "training_iteration", "perturbation_interval": 2, "quantile_fraction": 0.5, "synch": True}
    scheduler = PopulationBasedTraining(**explored, **often, resample_probability=0)
    best = search(trainer, **grid(learning_rate=[2.0, 1e-3]), scheduler=scheduler)
    worse, better = best.run_summary.trials
    assert worse.config == {"learning_rate": 0.005, "weight_decay": 0.25} and better.config == {"learning_rate": 1e-3}
    begun = [(trial, step) for event, trial, step in read(tmp_path / "diary") if event == "begin"]
    assert sorted(begun) == [(f"run-{trial.trial_id}", step) for trial in (worse, better) for step in (0, 4)]
    logs = {}
    for trial in (worse, better):
        folder = tmp_path / "out" / f"run-{trial.trial_id}" / "checkpoint-6"
        logs[trial] = json.loads((folder / layout.TRAINER_STATE_NAME).read_text())["log_history"]
        optimizer = torch.load(folder / layout.OPTIMIZER_NAME)
        assert {state["step"].item() for state in optimizer["state"].values()} == {6}
        assert optimizer["param_groups"][0]["weight_decay"] == trial.config.get("weight_decay", 0.0)
    assert lines(logs[worse], 1, 4) == lines(logs[better], 1, 4)
    rate = [line["learning_rate"] for line in lines(logs[worse], 5, 6) if "learning_rate" in line]
    assert rate == pytest.approx([0.005 * 2 / 6, 0.005 * 1 / 6])


def lines(log, first, last):
    return [line for line in log if first <= line["step"] <= last]


def test_search_algorithm_of_ray_chooses_the_trials(tmp_path):
    """With a space of Ray, a name for each run, and an argument of the model."""
    algorithm = OptunaSearch(metric="objective", mode="min", seed=1)
    trainer = make_saving(tmp_path / "out", model_init=make_of_trial)
    names = {"hp_name": lambda trial: f"width-{trial['width']}-{trial['learning_rate']}"}
    best = search(trainer, hp_space=space, n_trials=2, search_alg=algorithm, **names)
    assert len(algorithm._ot_study.trials) == len(best.run_summary.trials) == 2
    for trial in best.run_summary.trials:
        folder = tmp_path / "out" / f"width-{trial.config['width']}-{trial.config['learning_rate']}" / "checkpoint-4"
        assert folder.is_dir() and not (tmp_path / "out" / f"run-{trial.trial_id}").exists()


def test_killed_search_resumes_its_second_trial(tmp_path, processes):
    """The first trial is not trained again."""
    how = {"env": {**processes.environment(), "TUNE_GLOBAL_CHECKPOINT_S": "0"}, "cwd": processes.ROOT}
    first = processes.run("-m", "tests.adapters.ray.killed_search", tmp_path, **how)
    assert first.returncode == -signal.SIGKILL, first.stderr
    again = processes.run("-m", "tests.adapters.ray.killed_search", tmp_path, **how)
    assert again.returncode == 0, again.stderr
    trials = sorted(json.loads(again.stdout.splitlines()[-1]))
    assert [status for _, status, _ in trials] == ["TERMINATED"] * 3
    assert [rate for _, _, rate in trials] == [1e-3, 2e-3, 3e-3]
    one, two, three = (f"run-{trial}" for trial, _, _ in trials)
    begun = [(trial, step) for event, trial, step in read(tmp_path / "diary") if event == "begin"]
    resumed_from = begun[2][1]
    assert begun == [(one, 0), (two, 0), (two, resumed_from), (three, 0)]
    assert resumed_from in (4, 6)  # Ray registers a checkpoint after its report, and before the next report
    tables = [path.read_text().splitlines() for path in tmp_path.glob("out/runs/*/*/csv/version_0/metrics.csv")]
    steps = [[row["step"] for row in csv.DictReader(table) if row["train/loss"]] for table in tables]
    assert steps == [list(map(str, range(1, 11)))] * 3


def test_truncated_state_does_not_start_a_new_search(tmp_path):
    state = tmp_path / "results" / "search" / "experiment_state-2026-01-01_00-00-00.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"trial_data": [')
    words = r"experiment_state-.*json is truncated: .* resume='AUTO' would start a new search"
    with pytest.raises(DamagedCheckpoint, match=words):
        search(make_saving(tmp_path / "out"), name="search", resume="AUTO")


def test_error_that_every_trial_would_have_ends_the_search(tmp_path):
    """The user gets that error itself."""
    trainer, rates = make_saving(tmp_path / "out"), grid(learning_rate=[1e-3, 1e-2])
    with pytest.raises(InvalidArgument, match=r"compute_objective returned None: it must return a number\."):
        search(trainer, **rates, compute_objective=return_none, max_concurrent_trials=1)
    assert trainer.hp_search_backend is None


def test_ray_scope_chooses_the_last_or_best_objective(tmp_path, monkeypatch):
    """'all' chooses a trial that gets worse afterwards."""
    trainer = make_saving(tmp_path / "out", ray_scope="all")
    best = search(
        trainer, **grid(learning_rate=[2.0, 1e-5]), compute_objective=searches.worse_later, direction="maximize"
    )
    results = RaySearch(parts=None)  # which reading results does not need
    results.directions = ["maximize"]
    chosen = [results._best_run(best.run_summary, scope).hyperparameters for scope in ("all", "last")]
    assert chosen == [best.hyperparameters, {"learning_rate": 1e-5}] and best.hyperparameters["learning_rate"] == 2.0
    assert ray_search._objective_scope(trainer.args) == "all"
    assert ray_search._objective_scope(TrainingArguments(str(tmp_path))) == "last"
    monkeypatch.setenv("RAY_SCOPE", "avg")  # where v5 has it
    assert ray_search._objective_scope(TrainingArguments(str(tmp_path))) == "avg"


PBT = PopulationBasedTraining(hyperparam_mutations={"learning_rate": [1, 2]})
#: What the search is given → the error, its words, and arguments of the Trainer.
REFUSED = {
    "one of ours": ({"num_samples": 3}, UnknownArgument, "has no argument 'num_samples'; did you mean 'n_trials'", {}),
    "internal": ({"_remote": True}, UnknownArgument, "has no argument '_remote'", {}),
    "no end": ({"n_trials": None}, InvalidArgument, "the search would never end. .* or time_budget_s in seconds", {}),
    "no trials": ({"n_trials": 0}, InvalidArgument, "n_trials=0", {}),
    "scope": ({}, InvalidArgument, "ray_scope='best' is unknown: use one of 'last', 'all'", {"ray_scope": "best"}),
    "no name": ({"resume": "AUTO"}, InvalidArgument, "resume='AUTO' needs the name", {}),
    "GPUs": ({"resources_per_trial": {"gpu": 2}}, UnsupportedArgument, "a trial uses one GPU or a fraction of one", {}),
    "unevaluated": (
        {"scheduler": ASHAScheduler()},
        InvalidArgument,
        "scheduler=AsyncHyperBandScheduler compares trials during training, but eval_strategy='no'",
        {"eval_strategy": "no"},
    ),
    "by name": ({"scheduler": "hyperband"}, InvalidArgument, "scheduler=hyperband", {"eval_strategy": "no"}),
    "incomplete checkpoints": (
        {"scheduler": "hyperband"},
        InvalidArgument,
        "and save_only_model=False",
        {"save_strategy": "steps", "save_only_model": True},
    ),
    "no checkpoints": (
        {"scheduler": PBT},
        InvalidArgument,
        "PopulationBasedTraining resumes trials from checkpoints, which need the optimizer's state",
        {"save_strategy": "no"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_of_ray_are_refused(tmp_path, case):
    *refused, settings = REFUSED[case]
    backend.assert_refused(tmp_path, *refused, **settings)


class Holding(TrainerCallback):
    def __init__(self, trainer, other=None):
        self.trainer, self.other = trainer, other


def test_pickled_trainer_refers_to_itself_and_trains_alike(tmp_path):
    """It has an engine of its own, and no progress bar of a notebook."""
    trainer = make_saving(tmp_path / "out")
    trainer.train()
    trainer.add_callback(Holding(trainer))
    trainer.add_callback(NotebookProgressCallback)
    there = pickle_trainer(trainer._hftrainer).unpack().trainer
    *_, holding, progress = there.callback_handler.callbacks
    assert there is not trainer and holding.trainer is there and isinstance(progress, ProgressCallback)
    engine = there._hftrainer.engine
    assert engine is not trainer._hftrainer.engine and there.accelerator._engine is engine
    there.train()
    assert there.state.log_history[0]["eval_loss"] == trainer.state.log_history[0]["eval_loss"]
    assert any(isinstance(callback, NotebookProgressCallback) for callback in trainer.callback_handler.callbacks)


@pytest.mark.parametrize("name", ["Trainer.lock", "The callback Holding"])
def test_what_cannot_be_pickled_is_named(tmp_path, name):
    trainer = make_saving(tmp_path / "out")
    if name == "Trainer.lock":
        trainer.lock = threading.Lock()
    else:
        trainer.add_callback(Holding(trainer, threading.Lock()))
    with pytest.raises(
        InvalidArgument, match=rf"^{name} cannot be pickled for the processes of the search .*on_train_begin"
    ):
        search(trainer)
