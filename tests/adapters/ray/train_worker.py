"""What the workers of Ray Train run: as its documentation of transformers shows, with our import."""

import json
import os
import signal
from pathlib import Path

import ray.train
import torch
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.small_models import make_plain, plain_data


class Falls(TrainerCallback):
    def __init__(self, mark, step):
        self.mark, self.step = Path(mark), step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stops(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def make_trainer(folder, data=(), **settings):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2}
    often = {"max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 1}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = TrainingArguments(str(folder / "out"), **quiet, **often, **{**evaluated, **settings})
    trainer_kwargs = {"train_dataset": plain_data(), "eval_dataset": plain_data(8), **dict(data)}
    return Trainer(make_plain(), args, **trainer_kwargs)


def weights(trainer):
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


def train_alone(folder):
    torch.set_num_threads(1)
    trainer = make_trainer(folder, save_strategy="no")
    trainer.train()
    return weights(trainer)


def train(config):
    """The training function of the documentation: makes a Trainer, adds the callback, prepares it and trains."""
    torch.set_num_threads(1)
    folder, data = Path(config["folder"]), {}
    if config.get("shards"):
        for name in ("train", "eval"):
            shard = ray.train.get_dataset_shard(name)
            data[f"{name}_dataset"] = shard.iter_torch_batches(batch_size=4)
    trainer = make_trainer(folder, data, **config.get("settings", {}))
    if "dropout" in config:
        trainer.model.apply(lambda module: setattr(module, "p", config["dropout"]))
    if "stops_at" in config:
        trainer.add_callback(Stops(config["stops_at"]))
    if "falls_at" in config:
        trainer.add_callback(Falls(folder / "fallen", config["falls_at"]))
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.train(resume_from_checkpoint=config.get("resume"))
    else:
        with checkpoint.as_directory() as path:
            trainer.train(resume_from_checkpoint=os.path.join(path, RayTrainReportCallback.CHECKPOINT_NAME))
    args = trainer.args
    found = {
        "place": [args.world_size, args.process_index],
        "from": None if checkpoint is None else checkpoint.path,
        "weights": weights(trainer),
        "logs": [line for line in trainer.state.log_history if "loss" in line],
    }
    (folder / f"{args.process_index}.json").write_text(json.dumps(found))
