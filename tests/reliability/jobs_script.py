"""A script that searches with `n_jobs`, which the tests start."""

import json
import os
import sys
import threading

import optuna

from hftrainer import TrainerCallback
from hftrainer.search.studies import INTERRUPTED
from tests.reliability.job import say
from tests.reliability.search_job import make_trainer, rate


class Together(TrainerCallback):
    """Within its first trial, each process waits for the other one: a named pipe opens when both ends are there."""

    def __init__(self, folder, mode):
        self.pipe, self.mode, self.script, self.waits = f"{folder}/together", mode, os.getpid(), True

    def on_step_end(self, args, state, control, **kwargs):
        if not self.waits:
            return
        self.waits, is_worker = False, os.getpid() != self.script
        with open(self.pipe, "w" if is_worker else "r") as pipe:
            pipe.write(str(os.getpid())) if is_worker else say("worker", pipe.read())
        if is_worker and self.mode == "waits":
            threading.Event().wait()  # until it is killed


def tell(best, study):
    """Without the trials that were one too many: both processes may begin the last one at the same moment."""
    counted = [trial for trial in study.trials if "at the same time" not in trial.user_attrs.get(INTERRUPTED, "")]
    trials = [[trial.number, trial.state.name, int(trial.user_attrs["process"].split()[1])] for trial in counted]
    say("found", json.dumps([best.run_id, trials]))


# Without `if __name__ == "__main__"`: a worker does not run the script.
folder, n_trials, mode = sys.argv[1:]
script = os.getpid()
trainer = make_trainer(folder, Together(folder, mode))


def in_the_worker(study, trial):
    if os.getpid() != script and mode == "fails":
        raise KeyError("in the worker")
    if os.getpid() != script and mode == "stops":
        study.stop()


settings = {"n_jobs": 2, "pruner": optuna.pruners.NopPruner(), "callbacks": [in_the_worker]}
best = trainer.hyperparameter_search(rate, n_trials=int(n_trials), **settings)
tell(best, trainer.hp_study)
if mode == "twice":
    storage = f"sqlite:///{folder}/second.db"
    tell(trainer.hyperparameter_search(rate, n_trials=2, n_jobs=2, storage=storage), trainer.hp_study)
