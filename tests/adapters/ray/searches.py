"""Searches that are small enough for two cores, in modules that the processes of the trials can import."""

import json
import math
import time
from pathlib import Path

import torch
from ray import tune

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.tiny import make_plain, plain_data

#: Quiet, and one process for all trials that come after one another.
QUIETLY = {"backend": "ray", "n_trials": 1, "verbose": 0, "reuse_actors": True}


def make_trainer(folder, trainer=None, model_init=make_plain, **settings):
    defaults = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = TrainingArguments(
        **{"output_dir": str(folder), "disable_tqdm": True, "use_cpu": True, **defaults, **settings}
    )
    given = {"train_dataset": plain_data(), "eval_dataset": plain_data(8), **(trainer or {})}
    return Trainer(model_init=model_init, args=args, **given)


def rates(*values):
    return lambda trial: {"learning_rate": tune.grid_search(list(values))}


def space(trial):
    return {
        "learning_rate": tune.loguniform(1e-4, 1e-1),
        "gradient_accumulation_steps": tune.choice([1, 2]),
        "lr_scheduler_type": tune.choice(["linear", "cosine"]),
        "width": tune.choice([8, 16]),
    }


class Diary(TrainerCallback):
    """Writes down which trial has begun and ended, and at which step, for the process that searches.

    Args:
        path: the file, a line for each.
        seconds: how long each step takes at least.
    """

    def __init__(self, path, seconds=0.0):
        self.path = str(path)
        self.seconds = seconds

    def write(self, event, state):
        with open(self.path, "a") as file:
            file.write(json.dumps([event, state.trial_name, state.global_step]) + "\n")

    def on_train_begin(self, args, state, control, **kwargs):
        self.write("begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.seconds)

    def on_save(self, args, state, control, **kwargs):
        self.write("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.write("end", state)


def read(path):
    """What a diary holds."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


class Failing(TrainerCallback):
    """Fails at a learning rate of 0.5, as a GPU does whose memory is full, after one evaluation."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.learning_rate == 0.5 and state.global_step == 3:
            raise RuntimeError("CUDA out of memory: as asked")


def nan_when_bad(metrics):
    return math.nan if metrics["eval_loss"] > 5 else metrics["eval_loss"]


def nothing(metrics):
    """No objective."""


def worse_later(metrics):
    """The loss, which is to be high, and from the second evaluation on low."""
    return metrics["eval_loss"] * (1 if metrics["epoch"] < 0.5 else -1)


def make_of_trial(trial):
    """A model whose width is searched; the Trainer makes one without a trial first."""
    model = make_plain()
    width = 16 if trial is None else trial["width"]
    model.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
    return model


def lower_rate(config):
    """What a trial of PBT changes when it goes on from another one's checkpoint."""
    return {**config, "learning_rate": 0.005, "weight_decay": 0.25}
