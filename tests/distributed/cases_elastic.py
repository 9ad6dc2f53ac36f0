"""A part of a run that changes its size: trains in ranks until it is killed, or to its end."""

import importlib
import json
import os
import signal

import torch

from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.tiny import make_plain, plain_data, without_dropout

SAMPLES = 40
STRATEGIES = {"replicas": {}, "fsdp": {"fsdp": True}}


def data():
    """Samples in float64, whose first feature is their index."""
    rows = plain_data(SAMPLES)
    for index, row in enumerate(rows):
        row["x"] = row["x"].double()
        row["x"][0] = index / SAMPLES
    return rows


def record_samples(trainer):
    """Write which samples each step has."""
    train = trainer.training_step

    def training_step(model, inputs, *given, **keywords):
        indices = (inputs["x"][:, 0] * SAMPLES).round().int().tolist()
        with open(f"{trainer.args.output_dir}/read-{trainer.args.process_index}", "a") as file:
            file.write(json.dumps([trainer.state.global_step + 1, trainer.args.run_name, indices]) + "\n")
        return train(model, inputs, *given, **keywords)

    trainer.training_step = training_step


def make_kill(library, step):
    class Kill(library.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def train_part(folder, part, size, accumulation, strategy, step, name="hftrainer"):
    """Train from the newest checkpoint on, until the process kills itself after a step, if one is given."""
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    library = importlib.import_module(name)
    elastic = {"elastic": True} if name == "hftrainer" else {}
    args = library.TrainingArguments(
        str(folder),
        **STRATEGIES[strategy],
        **{"run_name": str(part), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1},
        **{"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2},
        **{"per_device_train_batch_size": size, "ddp_timeout": 60, **elastic},
        gradient_accumulation_steps=accumulation,
    )
    callbacks = [] if step is None else [make_kill(library, step)]
    model = without_dropout(make_plain)().double()
    trainer = library.Trainer(model, args, train_dataset=data(), callbacks=callbacks)
    record_samples(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    weights = trainer.accelerator.get_state_dict(trainer.model)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: value.clone() for name, value in weights.items()}, lines
