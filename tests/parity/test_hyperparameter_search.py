"""Searches by both libraries on the same seeded sampler: same trials, values, events, logs, folders, and best."""

import functools

import optuna
import pytest
import torch

from tests.support.known_differences import OWN_FILES
from tests.support.parity import accuracy, assert_agree, build, callback, comparable
from tests.support.searches import plain_of_width
from tests.support.small_models import Plain
from tests.support.tracking import scalars


def make_of_trial(trial):
    return plain_of_width(16 if trial is None else trial.suggest_categorical("width", [8, 16, 32]))


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 3),
        "lr_scheduler_type": trial.suggest_categorical("lr_scheduler_type", ["linear", "cosine"]),
        "weight_decay": trial.suggest_categorical("weight_decay", [0, 1]),
    }


def rates(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)}


def loss_and_accuracy(metrics):
    return [metrics["eval_loss"], metrics["eval_accuracy"]]


EACH_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}
#: Case → settings of the Trainer, and keywords of the search.
CASES = {
    "defaults": (EACH_EPOCH, {}),
    "own space": (EACH_EPOCH, {"hp_space": space}),
    "no evaluation in training": ({}, {"hp_space": rates, "n_trials": 3}),
    "accuracy": (
        {**EACH_EPOCH, "trainer": {"compute_metrics": accuracy}, "load_best_model_at_end": True, "save_total_limit": 1},
        {"hp_space": space, "direction": "maximize"},
    ),
    "several objectives": (
        {**EACH_EPOCH, "trainer": {"compute_metrics": accuracy}},
        {"hp_space": space, "direction": ["minimize", "maximize"], "compute_objective": loss_and_accuracy},
    ),
    "the model of a trial": ({**EACH_EPOCH, "trainer": {"model_init": make_of_trial}}, {"hp_space": rates}),
    "pruned": (
        {"eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4},
        {"hp_space": rates, "n_trials": 8, "pruner": optuna.pruners.MedianPruner(2, 1)},
    ),
    "names": (EACH_EPOCH, {"hp_space": rates, "n_trials": 3, "hp_name": lambda trial: f"rate-{trial.number}"}),
}


def search(library, folder, settings, keywords):
    torch.manual_seed(0)
    logs, studies, create_study = [], [], optuna.create_study

    def on_train_end(self, args, state, control, **kwargs):
        """The log and the trial's name and hyperparameters of each run, when it ends."""
        logs.append((comparable(state.log_history), state.is_hyper_param_search, state.trial_name, state.trial_params))
        logs.append({name: getattr(args, name) for name in state.trial_params or () if hasattr(args, name)})

    def create(*args, **kwargs):
        studies.append(create_study(*args, **kwargs))
        return studies[-1]

    trainer_kwargs = {"model_init": Plain, **settings.get("trainer", {})}
    settings = {**settings, "trainer": trainer_kwargs, "callback": callback(on_train_end=on_train_end)}
    trainer, recorder = build(library, "plain", folder, **settings)
    keywords = {"n_trials": 4, **keywords, "sampler": optuna.samplers.TPESampler(seed=3, n_startup_trials=3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna, "create_study", functools.wraps(create_study)(create))
        best = trainer.hyperparameter_search(**keywords)
    (study,) = studies
    found = {
        "best": best,
        "trials": [(trial.state, trial.params, trial.values, trial.intermediate_values) for trial in study.trials],
        "events": recorder.events,
        "logs": logs,
        "files": {
            str(path.relative_to(folder)): sorted({file.name for file in path.iterdir()} - OWN_FILES)
            for path in folder.glob("*/checkpoint-*")
        },
    }
    return found, trainer, study


@pytest.mark.parametrize("case", CASES)
def test_trials_logs_files_and_best_are_those_of_transformers(tmp_path, case):
    ours, trainer, study = search("hftrainer", tmp_path / "hftrainer", *CASES[case])
    theirs, _, _ = search("transformers", tmp_path / "transformers", *CASES[case])
    for what in theirs:
        assert ours[what] == theirs[what], what
    assert trainer.hp_study is study and trainer.hp_search_backend is None and trainer.model is None
    states = [state.name for state, *_ in ours["trials"]]
    assert ("PRUNED" in states and "COMPLETE" in states) if case == "pruned" else set(states) == {"COMPLETE"}
    assert len({str(params) for _, params, *_ in ours["trials"]}) == len(states)  # no trial twice


def test_training_with_the_best_values_set_by_hand(tmp_path):
    """As the documentation of transformers shows."""

    def run(library):
        found, trainer, _ = search(library, tmp_path / library, EACH_EPOCH, {"hp_space": rates})
        for name, value in found["best"].hyperparameters.items():
            setattr(trainer.args, name, value)
        trainer.train()
        assert trainer.state.trial_params is None
        return comparable(trainer.state.log_history)

    assert_agree(run)


def test_tensorboard_has_a_run_for_each_trial(tmp_path):
    def run(library):
        names = {"hp_name": lambda trial: f"trial-{trial.number}", "hp_space": rates, "n_trials": 2}
        search(library, tmp_path / library, {**EACH_EPOCH, "report_to": "tensorboard"}, names)
        return {folder.name: scalars(folder) for folder in sorted((tmp_path / library).glob("runs/*/*"))}

    ours = assert_agree(run)
    assert list(ours) == ["trial-0", "trial-1"]
    assert len(ours["trial-1"]["eval/loss"]) == 2
