"""A part of a run that changes its size: trains in ranks until it is killed, or to its end."""

import importlib
import json
import os
import signal

import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.small_models import make_plain, plain_data, without_dropout

SAMPLES = 40
STRATEGIES = {"replicas": {}, "fsdp": {"fsdp": True}}


#: Kind of data → the arguments that it needs. The streams have three shards.
KINDS = {
    "map-style": {},
    "stream": {"max_steps": 15},
    "split stream": {"max_steps": 15, "accelerator_config": {"dispatch_batches": False}},
    "stream in two loading processes": {"max_steps": 15, "dataloader_num_workers": 2},
}


def data(kind, args):
    """Samples whose first feature is their index. A script may have split a stream among its processes."""
    rows = [{"x": row["x"].tolist(), "labels": row["labels"].item()} for row in plain_data(SAMPLES)]
    for index, row in enumerate(rows):
        row["x"][0] = index / SAMPLES
    if kind == "map-style":
        return rows
    stream = Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return split_dataset_by_node(stream, args.process_index, args.world_size) if kind == "split stream" else stream


def collate(rows):
    x = torch.tensor([row["x"] for row in rows], dtype=torch.float64)
    return {"x": x, "labels": torch.tensor([row["labels"] for row in rows])}


def record_samples(trainer):
    """Write which samples each step has."""
    train = trainer.training_step

    def training_step(model, inputs, *args, **keywords):
        indices = (inputs["x"][:, 0] * SAMPLES).round().int().tolist()
        with open(f"{trainer.args.output_dir}/read-{trainer.args.process_index}", "a") as file:
            file.write(json.dumps([trainer.state.global_step + 1, trainer.args.run_name, indices]) + "\n")
        return train(model, inputs, *args, **keywords)

    trainer.training_step = training_step


def make_kill(library, step, event="on_step_end", rank=None):
    """A callback that kills its process at an event of a step, in all ranks or in one, whose loss ends the others."""

    def kill(self, args, state, control, **kwargs):
        if state.global_step == step and rank in (None, args.process_index):
            os.kill(os.getpid(), signal.SIGKILL)

    return type("Kill", (library.TrainerCallback,), {event: kill})()


def train_part(folder, part, size, accumulation, strategy, killed, name="hftrainer", kind="map-style"):
    """Train from the newest checkpoint on, to the end or until the process kills itself: see `make_kill`."""
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    library = importlib.import_module(name)
    elastic = {"elastic": True} if name == "hftrainer" else {}
    args = library.TrainingArguments(
        str(folder),
        **STRATEGIES[strategy],
        **{"run_name": str(part), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1},
        **{"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2},
        **{"per_device_train_batch_size": size, "ddp_timeout": 60, **elastic, **KINDS[kind]},
        gradient_accumulation_steps=accumulation,
    )
    callbacks = [] if killed is None else [make_kill(library, *killed)]
    model = without_dropout(make_plain)().double()
    trainer = library.Trainer(model, args, collate, data(kind, args), callbacks=callbacks)
    record_samples(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    weights = trainer.accelerator.get_state_dict(trainer.model)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: value.clone() for name, value in weights.items()}, lines
