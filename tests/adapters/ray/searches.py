"""Searches with Ray, in modules that the processes of the trials can import."""

import json
import threading
from pathlib import Path

from ray import tune

from hftrainer import TrainerCallback
from tests.support.searches import OneProcessBackend, make_search_trainer, plain_of_width


class RayBackend(OneProcessBackend):
    name, keyword = "ray", "scheduler"
    several = "a launcher has started 2. Start the script without a launcher"

    def grid(self, **values):
        return {"hp_space": lambda trial: {name: tune.grid_search(choices) for name, choices in values.items()}}

    def keywords(self, trainer):
        results = Path(trainer.args.output_dir).absolute().parent / "results"
        return {"n_trials": 1, "verbose": 0, "reuse_actors": True, "storage_path": str(results)}


def make_saving(folder, trainer=(), **settings):
    often = {"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    return make_search_trainer(folder, trainer, **{**often, **settings})


def space(trial):
    return {
        "learning_rate": tune.loguniform(1e-4, 1e-1),
        "gradient_accumulation_steps": tune.choice([1, 2]),
        "lr_scheduler_type": tune.choice(["linear", "cosine"]),
        "width": tune.choice([8, 16]),
    }


class Diary(TrainerCallback):
    """Writes down which trial has begun and ended, and at which step, for the process that searches."""

    def __init__(self, path):
        self.path = str(path)

    def write(self, event, state):
        with open(self.path, "a") as file:
            file.write(json.dumps([event, state.trial_name, state.global_step]) + "\n")

    def on_train_begin(self, args, state, control, **kwargs):
        self.write("begin", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.write("end", state)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Waits(TrainerCallback):
    """Within its seventh step, the second trial waits until its process is killed."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.learning_rate == 2e-3 and state.global_step == 7:
            threading.Event().wait()


def worse_later(metrics):
    """The loss, which is to be high, and from the second evaluation on low."""
    return metrics["eval_loss"] * (1 if metrics["epoch"] < 0.5 else -1)


def make_of_trial(trial):
    return plain_of_width(16 if trial is None else trial["width"])


def lower_rate(config):
    """What a trial of PBT changes when it goes on from another one's checkpoint."""
    return {**config, "learning_rate": 0.005, "weight_decay": 0.25}
