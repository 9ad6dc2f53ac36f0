"""A script that searches with `n_jobs`: what the tests start, and what it starts again itself."""

import json
import os
import sys
import threading

import optuna

from hftrainer import TrainerCallback
from hftrainer.search.jobs import WORKER
from hftrainer.search.studies import INTERRUPTED
from tests.reliability.job import say
from tests.reliability.search_job import make_trainer, rate

#: None in the script itself.
ASSIGNMENT = json.loads(os.environ.get(WORKER, "null"))


class Together(TrainerCallback):
    """Within its first trial, each process waits for the other one: a named pipe opens when both ends are there."""

    def __init__(self, folder, mode):
        self.pipe, self.mode = f"{folder}/together", mode
        self.waits = ASSIGNMENT is None or len(ASSIGNMENT["searches"]) == 1  # of a later search the worker is alone

    def on_step_end(self, args, state, control, **kwargs):
        if not self.waits:
            return
        self.waits = False
        with open(self.pipe, "w" if ASSIGNMENT else "r") as pipe:
            pipe.write(str(os.getpid())) if ASSIGNMENT else say("worker", pipe.read())
        if ASSIGNMENT and self.mode == "waits":
            threading.Event().wait()  # until it is killed


def tell(best, study):
    """Without the trials that were one too many: both processes may begin the last one at the same moment."""
    counted = [trial for trial in study.trials if "at the same time" not in trial.user_attrs.get(INTERRUPTED, "")]
    trials = [[trial.number, trial.state.name, int(trial.user_attrs["process"].split()[1])] for trial in counted]
    say("found", json.dumps([best.run_id, trials]))


def main(folder, n_trials, mode):
    trainer = make_trainer(folder, Together(folder, mode))

    def in_the_worker(study, trial):
        if ASSIGNMENT and mode == "fails":
            raise KeyError("in the worker")
        if ASSIGNMENT and mode == "stops":
            study.stop()

    settings = {"n_jobs": 2, "pruner": optuna.pruners.NopPruner(), "callbacks": [in_the_worker]}
    best = trainer.hyperparameter_search(rate, n_trials=int(n_trials), **settings)
    tell(best, trainer.hp_study)
    if mode == "twice":
        storage = f"sqlite:///{folder}/second.db"
        tell(trainer.hyperparameter_search(rate, n_trials=2, n_jobs=2, storage=storage), trainer.hp_study)


if __name__ == "__main__":
    main(*sys.argv[1:])
