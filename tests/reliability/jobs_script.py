"""A script that searches with `n_jobs`: what the tests start, and what it starts again itself."""

import json
import logging
import os
import sys
import time
from pathlib import Path

import optuna
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.search.jobs import WORKER
from hftrainer.search.studies import INTERRUPTED
from tests.reliability.job import Net, data


class Together(TrainerCallback):
    """Notes which processes take part, and waits in the first step until there are two."""

    def __init__(self, folder):
        self.folder = Path(folder, "taking-part")
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state, control, **kwargs):
        (self.folder / f"{'worker' if WORKER in os.environ else 'script'}-{os.getpid()}").touch()

    def on_step_end(self, args, state, control, **kwargs):
        deadline = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)


def rate(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)}


def main(folder, n_trials, mode):
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(logging.WARNING)
    settings = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = TrainingArguments(f"{folder}/out", disable_tqdm=True, use_cpu=True, **settings)
    given = {"train_dataset": data(), "eval_dataset": data(20), "callbacks": [Together(folder)]}
    trainer = Trainer(model_init=lambda: Net(), args=args, **given)

    def in_the_worker(study, trial):
        if WORKER in os.environ and mode == "fails":
            raise KeyError("in the worker")
        if WORKER in os.environ and mode == "stops":
            study.stop()

    settings = {"n_jobs": 2, "pruner": optuna.pruners.NopPruner(), "callbacks": [in_the_worker]}
    best = trainer.hyperparameter_search(rate, n_trials=int(n_trials), **settings)
    tell(best, trainer.hp_study)
    if mode == "twice":
        storage = f"sqlite:///{folder}/second.db"
        tell(trainer.hyperparameter_search(rate, n_trials=2, n_jobs=2, storage=storage), trainer.hp_study)


def tell(best, study):
    """Without the trials that were one too many: both processes may begin the last one at the same moment."""
    counted = [trial for trial in study.trials if "at the same time" not in trial.user_attrs.get(INTERRUPTED, "")]
    trials = [[trial.number, trial.state.name, int(trial.user_attrs["process"].split()[1])] for trial in counted]
    print("found", json.dumps([best.run_id, trials]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
