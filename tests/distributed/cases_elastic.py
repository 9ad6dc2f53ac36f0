"""A part of a run that changes its size: trains in ranks until it is killed, or to its end."""

import json
import os
import signal

import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
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


class Recording(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        indices = (inputs["x"][:, 0] * SAMPLES).round().int().tolist()
        with open(self.args.output_dir + f"/read-{self.args.process_index}", "a") as file:
            file.write(json.dumps([self.state.global_step + 1, self.args.run_name, indices]) + "\n")
        return loss


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_part(folder, part, size, accumulation, strategy, step):
    """Train from the newest checkpoint on, until the process kills itself after a step, if one is given."""
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    args = TrainingArguments(
        str(folder),
        **STRATEGIES[strategy],
        **{"run_name": str(part), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1},
        **{"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2},
        **{"per_device_train_batch_size": size, "elastic": True, "ddp_timeout": 60},
        gradient_accumulation_steps=accumulation,
    )
    callbacks = [] if step is None else [Kill(step)]
    trainer = Recording(without_dropout(make_plain)().double(), args, train_dataset=data(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint="auto")
    weights = trainer.accelerator.get_state_dict(trainer.model)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: value.clone() for name, value in weights.items()}, lines
