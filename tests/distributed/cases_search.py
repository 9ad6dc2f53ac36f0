"""Searches in two ranks."""

import logging
import math

import optuna

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from tests.support.small_models import make_plain, plain_data


def of_trial(trial):
    """A model with a dropout that the trial suggests; transformers cannot do so in several processes."""
    model = make_plain()
    model.layers[3].p = 0.2 if trial is None else trial.suggest_float("dropout", 0.0, 0.5)
    return model


#: Values that `rates` got in this process.
chosen = []


def rates(trial):
    rate = trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
    chosen.append({"learning_rate": rate, "seed": trial.suggest_int("seed", 2**31, 2**32 - 1)})
    return dict(chosen[-1])


def wrong_range(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1.0, 1e-4)}


def nan_at_first(trial):
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-2]), "seed": trial.number}


def find_all(folder):
    optuna.logging.set_verbosity(logging.WARNING)
    settings = {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
    args = TrainingArguments(str(folder / "out"), max_steps=6, disable_tqdm=True, use_cpu=True, **settings)
    data = plain_data()
    trainer = Trainer(model_init=of_trial, args=args, train_dataset=data, eval_dataset=data[:16])
    weights = []
    release = trainer._hftrainer.training_runner.release_trial

    def keep_weights():
        weights.append([value.tolist() for value in trainer.model.state_dict().values()])
        release()

    trainer._hftrainer.training_runner.release_trial = keep_weights
    sampler = optuna.samplers.TPESampler(seed=3)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2)
    best = trainer.hyperparameter_search(rates, n_trials=7, sampler=sampler, pruner=pruner)
    found = {"best": best, "weights": list(weights), "steps": trainer.state.global_step, "chosen": list(chosen)}
    found["params"] = trainer.state.trial_params
    found["folders"] = sorted(path.name for path in (folder / "out").glob("run-*"))
    if trainer.is_world_process_zero():
        found["states"] = [trial.state.name for trial in trainer.hp_study.trials]
        found["all params"] = [trial.params for trial in trainer.hp_study.trials]

    def objective(metrics):
        return math.nan if trainer.args.seed == 0 else metrics["eval_loss"]

    found["after a nan"] = trainer.hyperparameter_search(nan_at_first, objective, n_trials=2)
    found["refused"] = []
    for keywords, error in (
        ({"hp_space": lambda trial: {"learning_rte": 1.0}}, TypeError),
        ({"hp_space": nan_at_first, "compute_objective": lambda metrics: math.nan, "n_trials": 1}, SearchFailed),
        ({"catch": (ValueError,)}, UnsupportedArgument),
        ({"hp_space": wrong_range}, ValueError),
        ({"study_name": "a", "storage": f"sqlite:///{folder}/a.db"}, InvalidArgument),
    ):
        try:
            trainer.hyperparameter_search(**{"hp_space": rates, "n_trials": 1, **keywords})
            # Again, since the study exists now.
            trainer.hyperparameter_search(**{"hp_space": rates, "n_trials": 1, **keywords})
        except error as raised:
            found["refused"].append(str(raised))
    return found
