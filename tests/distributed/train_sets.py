"""Trains in many settings with one library and writes what came of it: run by two processes under torchrun.

python train_sets.py LIBRARY FOLDER
"""

import importlib
import os
import pickle
import sys
from pathlib import Path

import torch

from tests.parity.support import train
from tests.tiny import MODELS, plain_data

SHARED = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
#: Name → model and settings. 38 samples in batches of 4 for two processes: the last round is completed.
CASES = {
    "plain": ("plain", SHARED),
    "plain, accumulation 3": ("plain", {**SHARED, "gradient_accumulation_steps": 3}),
    "plain, an incomplete round dropped": ("plain", {**SHARED, "dataloader_drop_last": True}),
    "plain, by epoch": ("plain", {"save_strategy": "epoch", "logging_strategy": "epoch", "max_steps": 7}),
    "plain, evaluation": (
        "plain",
        {
            **SHARED,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "save_total_limit": 2,
            "trainer": {"eval_dataset": plain_data(32)},
        },
    ),
    "llama": ("llama", {**SHARED, "per_device_train_batch_size": 5}),
    "llama, accumulation 3": ("llama", {**SHARED, "gradient_accumulation_steps": 3}),
    "llama, tokens of each process": ("llama", {**SHARED, "average_tokens_across_devices": False}),
    "llama, ddp arguments": (
        "llama",
        {
            "ddp_find_unused_parameters": False,
            "ddp_bucket_cap_mb": 1,
            "ddp_broadcast_buffers": False,
            "include_num_input_tokens_seen": "all",
        },
    ),
    "bert": ("bert", {**SHARED, "gradient_accumulation_steps": 3}),
    "batch norm": (
        "batch norm",
        {"eval_strategy": "steps", "eval_steps": 2, "trainer": {"eval_dataset": plain_data(32)}},
    ),
    "own training step": (
        "plain",
        {"trainer_class": lambda library: own_step(library), "gradient_accumulation_steps": 3},
    ),
    "data of its own": (
        "plain",
        {"trainer_class": lambda library: own_loader(library), "gradient_accumulation_steps": 2},
    ),
    "early stopping": (
        "plain",
        {
            "num_train_epochs": 9,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "learning_rate": 0.1,
            "trainer": {"eval_dataset": plain_data(32)},
            "stops_early": True,
        },
    ),
}


def own_step(library):
    class Own(library.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


def own_loader(library):
    class Own(library.Trainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=3, shuffle=True)
            return self.accelerator.prepare(loader)

    return Own


def make_batch_norm():
    torch.manual_seed(1)
    model = MODELS["plain"][0]()
    model.layers[1] = torch.nn.BatchNorm1d(16)
    return model


def run(library, name, folder, resume=None):
    model, settings = CASES[name]
    settings = {key: dict(value) if key == "trainer" else value for key, value in settings.items()}
    if settings.pop("stops_early", False):
        settings["trainer"]["callbacks"] = [importlib.import_module(library).EarlyStoppingCallback(2)]
        record = with_recorder_left_out(library, model, folder, settings)
    else:
        record = train(library, model, folder, resume, **settings)
    return {
        "logs": record.logs,
        "weights": record.weights,
        "files": record.files,
        "extra": record.extra,
        "random": torch.get_rng_state(),
        "events": record.events,
    }


def with_recorder_left_out(library, model, folder, settings):
    from tests.parity.support import build, record

    trainer, recorder = build(library, model, folder, **settings)
    output = trainer.train()
    return record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)


def main(library, folder):
    torch.set_num_threads(1)
    MODELS["batch norm"] = (make_batch_norm, plain_data)
    found = {name: run(library, name, folder / library / name.replace(", ", "-")) for name in CASES}
    for name, step in RESUMED:
        found[f"{name}, resumed"] = resumed(library, library, name, step, folder)
        if library == "hftrainer":
            found[f"{name}, resumed from theirs"] = resumed(library, "transformers", name, step, folder)
    (folder / f"{library}-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))


#: Runs that go on from a step.
RESUMED = (("plain", 4), ("plain", 6), ("llama, accumulation 3", 2))


def resumed(library, writer, name, step, folder):
    checkpoint = folder / writer / name.replace(", ", "-") / f"checkpoint-{step}"
    return run(library, name, folder / "resumed" / f"{library}-{writer}-{name}-{step}", str(checkpoint))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
