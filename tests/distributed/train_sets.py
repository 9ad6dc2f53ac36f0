"""Trains in many settings with one library and writes what came of it: run by two processes under torchrun.

python train_sets.py LIBRARY FOLDER
"""

import importlib
import os
import pickle
import sys
from pathlib import Path

import torch

from hftrainer import Trainer, TrainerCallback
from hftrainer.errors import CheckpointNotFound
from tests.support.parity import build, comparable, record
from tests.support.tiny import MODELS, plain_data

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
    "llama, accumulation 3": ("llama", {**SHARED, "save_steps": 1, "gradient_accumulation_steps": 3}),
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
    "files of its own": ("plain", {**SHARED, "trainer_class": lambda library: own_files(library)}),
    "files of its own, only the model": (
        "plain",
        {**SHARED, "trainer_class": lambda library: own_files(library), "save_only_model": True},
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


def own_files(library):
    """Each process writes into the checkpoint before it is one, and when it is."""

    class Own(library.Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            for when in ("before", "after"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{when}-{self.args.process_index}.txt").write_text(f"{when} {self.state.global_step}")
                if when == "before":
                    super()._save_checkpoint(model, trial)

    return Own


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
    trainer, recorder = build(library, model, folder, **settings)
    output = trainer.train(resume_from_checkpoint=resume)
    found = record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)
    return {**vars(found), "random": torch.get_rng_state()}


def main(library, folder):
    torch.set_num_threads(1)
    MODELS["batch norm"] = (make_batch_norm, plain_data)
    found = {name: run(library, name, folder / library / name.replace(", ", "-")) for name in CASES}
    for name, step in RESUMED:
        found[f"{name}, resumed"] = resumed(library, library, name, step, folder)
        if library == "hftrainer":
            found[f"{name}, resumed from theirs"] = resumed(library, "transformers", name, step, folder)
    if library == "hftrainer":
        found["agreed"] = dict(agreed(folder / "agreed"))
    (folder / f"{library}-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))


#: Runs that go on from a step.
RESUMED = (("plain", 4), ("plain", 6), ("llama, accumulation 3", 3))


class OnOne(TrainerCallback):
    """Sets a flag of the control at an event, in the second process alone."""

    def __init__(self, event, flag, step):
        self.flag, self.step = flag, step
        setattr(self, event, self.set_flag)

    def set_flag(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == self.step:
            setattr(control, self.flag, True)


class Full(Trainer):
    """Finds its disk full, which only the process that writes can see."""

    def _save(self, output_dir=None, state_dict=None):
        raise OSError(28, "No space left on device")


#: Name → event, flag, step.
FLAGS = {
    "stops": ("on_step_end", "should_training_stop", 3),
    "stops in the middle of an epoch": ("on_step_end", "should_training_stop", 1),
    "stops within a step": ("on_substep_end", "should_training_stop", 1),
    "stops when it has logged": ("on_log", "should_training_stop", 4),
    "ends the epoch": ("on_step_end", "should_epoch_stop", 2),
    "saves": ("on_step_end", "should_save", 5),
    "saves when it has logged": ("on_log", "should_save", 2),
    "evaluates": ("on_step_end", "should_evaluate", 3),
}


def agreed(folder):
    """What the processes do when only one of them is asked to."""
    settings = {"logging_steps": 2, "gradient_accumulation_steps": 2}
    for name, flag in FLAGS.items():
        trainer, _ = build("hftrainer", "plain", folder / name, trainer={"callbacks": [OnOne(*flag)]}, **settings)
        trainer.train()
        logs, state = comparable(trainer.state.log_history), trainer.state
        yield name, {"logs": logs, "step": state.global_step, "folders": sorted(os.listdir(folder / name))}
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, "save_steps": 2}
    trainer, _ = build("hftrainer", "plain", folder / "full", trainer_class=lambda _: Full, eval_steps=2, **best)
    trainer.train()
    yield "full", {"best": trainer.state.best_model_checkpoint, "folders": os.listdir(folder / "full")}
    try:
        trainer.train(resume_from_checkpoint=True)
    except CheckpointNotFound as error:
        yield "nothing to resume from", str(error)


def resumed(library, writer, name, step, folder):
    checkpoint = folder / writer / name.replace(", ", "-") / f"checkpoint-{step}"
    return run(library, name, folder / "resumed" / f"{library}-{writer}-{name}-{step}", str(checkpoint))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
