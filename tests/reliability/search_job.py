"""A search that the tests kill and start again, or run twice at once.

It prints a line when a trial begins and when the search is done.
"""

import json
import logging
import sys
from pathlib import Path

import optuna
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.search.studies import INTERRUPTED, RETRY_OF
from tests.reliability.job import Net, Reports, data, kill_at, say


def storage_of(folder):
    return f"sqlite:///{folder}/search.db"


def check(folder, wanted):
    """The finished study: as many completed trials as were asked for, and a mark on all others."""
    trials = optuna.load_study(study_name="search", storage=storage_of(folder)).trials
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    others = [trial for trial in trials if trial not in complete]
    assert len(complete) == wanted
    assert all(trial.state.name == "FAIL" and trial.user_attrs[INTERRUPTED] for trial in others)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len({trial.params["learning_rate"] for trial in complete}) == wanted
    assert all((folder / "out" / f"run-{trial.number}" / "checkpoint-4").is_dir() for trial in complete)
    assert not list((folder / "out").glob("checkpoint-*"))
    for trial in others:  # what was cut off has been tried again, unless it was itself another attempt
        again = [other for other in trials if other.user_attrs.get(RETRY_OF) == trial.number and other.params]
        assert RETRY_OF in trial.user_attrs or not trial.params or again[0].params == trial.params
    return complete, others


def make_trainer(folder, callback, **settings):
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(logging.WARNING)
    settings = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **settings}
    args = TrainingArguments(f"{folder}/out", disable_tqdm=True, use_cpu=True, **settings)
    datasets = {"train_dataset": data(), "eval_dataset": data(20)}
    return Trainer(model_init=lambda: Net(), args=args, callbacks=[callback], **datasets)


def rate(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)}


def main(folder, settings):
    say("resuming a search")
    kill_at(settings.get("kill_at", 0), folder)
    Path(folder).mkdir(exist_ok=True)
    trainer = make_trainer(folder, Reports(settings.get("pause", 0.01), settings.get("waits_at")), max_steps=5)
    study = {"storage": storage_of(folder), "study_name": "search", "load_if_exists": True}
    study |= {"pruner": optuna.pruners.NopPruner(), "hp_name": lambda trial: f"run-{trial.number}"}
    best = trainer.hyperparameter_search(rate, n_trials=settings["n_trials"], **study)
    say("done", best.run_id)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
