"""What two ranks train with either library, and what they agree on."""

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import LearningRateFinder

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import CheckpointNotFound
from tests.support.parity import EVALUATED, EVERY_STEP, build, comparable, train
from tests.support.rank_messages import error_of
from tests.support.small_models import MODELS, Plain, make_plain, plain_data


def own_files(library):
    """A Trainer that writes into the folder of a checkpoint before and after it is saved."""

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


def stopping_early(library):
    class Stopping(library.Trainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.add_callback(library.EarlyStoppingCallback(2))

    return Stopping


def make_batch_norm():
    torch.manual_seed(1)
    model = MODELS["plain"][0]()
    model.layers[1] = torch.nn.BatchNorm1d(16)
    return model


SAVED = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
BEST = {**EVERY_STEP, "load_best_model_at_end": True, "trainer": {"eval_dataset": plain_data(32)}}
OF_DDP = {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": False}
#: Name → model and settings. 38 samples in batches of 4 for two processes: the last round is completed.
CASES = {
    "plain": ("plain", SAVED),
    "plain, accumulation 3": ("plain", {**SAVED, "gradient_accumulation_steps": 3}),
    "plain, an incomplete round dropped": ("plain", {**SAVED, "dataloader_drop_last": True}),
    "plain, by epoch": ("plain", {"save_strategy": "epoch", "logging_strategy": "epoch", "max_steps": 7}),
    "plain, evaluation": ("plain", {**BEST, "logging_steps": 1, "save_total_limit": 2}),
    "llama": ("llama", {**SAVED, "per_device_train_batch_size": 5}),
    "llama, accumulation 3": ("llama", {**SAVED, "save_steps": 1, "gradient_accumulation_steps": 3}),
    "llama, tokens of each process": ("llama", {**SAVED, "average_tokens_across_devices": False}),
    "llama, ddp arguments": ("llama", {**OF_DDP, "include_num_input_tokens_seen": "all"}),
    "llama, a static graph": ("llama", {"ddp_static_graph": True}),
    "bert": ("bert", {**SAVED, "gradient_accumulation_steps": 3}),
    "batch norm": ("batch norm", {**EVALUATED, "trainer": {"eval_dataset": plain_data(32)}}),
    "batch norm, own training step": ("batch norm", {"trainer_class": own_step, "gradient_accumulation_steps": 2}),
    "own training step": ("plain", {"trainer_class": own_step, "gradient_accumulation_steps": 3}),
    "files of its own": ("plain", {**SAVED, "trainer_class": own_files}),
    "files of its own, only the model": ("plain", {**SAVED, "trainer_class": own_files, "save_only_model": True}),
    "data of its own": ("plain", {"trainer_class": own_loader, "gradient_accumulation_steps": 2}),
    "early stopping": ("plain", {**BEST, "trainer_class": stopping_early, "num_train_epochs": 9, "learning_rate": 0.1}),
}
#: Runs that are resumed, and the step.
RESUMED = (("plain", 4), ("plain", 6), ("llama, accumulation 3", 3))


def train_all(library, folder):
    MODELS["batch norm"] = (make_batch_norm, plain_data)

    def run(case, place, resume=None):
        model, settings = CASES[case]
        return train(library, model, place, resume, **settings), torch.get_rng_state()

    found = {case: run(case, folder / library / case.replace(", ", "-")) for case in CASES}
    for case, step in RESUMED:
        for writer in {library, "transformers"}:
            checkpoint = folder / writer / case.replace(", ", "-") / f"checkpoint-{step}"
            place = folder / f"{library} resumed from {writer}" / f"{case}-{step}"
            found[case, step, writer == library] = run(case, place, str(checkpoint))
    return found


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


def agree(folder, flags):
    """What both ranks do when a flag is set in one of them, by case; `flags` has event, flag and step."""
    found, settings = {}, {"logging_steps": 2, "gradient_accumulation_steps": 2}
    for name, flag in flags.items():
        trainer, _ = build("hftrainer", "plain", folder / name, trainer={"callbacks": [OnOne(*flag)]}, **settings)
        trainer.train()
        logs = comparable(trainer.state.log_history)
        found[name] = (trainer.state.global_step, sorted(os.listdir(folder / name)), logs)
    return found


def fill_the_disk(folder):
    """The best checkpoint, the folders that there are, and why the run cannot go on."""
    trainer, _ = build("hftrainer", "plain", folder, trainer_class=lambda _: Full, **BEST)
    trainer.train()
    error = error_of(CheckpointNotFound, trainer.train, resume_from_checkpoint=True)
    return trainer.state.best_model_checkpoint, os.listdir(folder), error


def refuse():
    found, cases = [], (({}, [], "some.ckpt"), ({"auto_find_batch_size": True}, []), ({}, [LearningRateFinder()]))
    for settings, callbacks, *resume in cases:
        args = TrainingArguments("out", use_cpu=True, disable_tqdm=True, max_steps=2, **settings)
        trainer = Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=callbacks)
        found.append(error_of(ValueError, trainer.train, *resume))
    return found


class FailsInOne(Plain):
    def forward(self, x, labels=None):
        if os.environ["RANK"] == "1":
            raise RuntimeError("only here")
        return super().forward(x, labels)


class FailsEverywhere(Plain):
    def forward(self, x, labels=None):
        warnings.warn("a warning of each rank", stacklevel=1)
        raise RuntimeError("everywhere")


def print_error(folder, model_class=FailsEverywhere):
    args = TrainingArguments(str(folder), use_cpu=True)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            Trainer(model_class(), args, train_dataset=plain_data()).train()
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
    return printed.getvalue()


def fail_in_one(folder, method):
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, ddp_timeout=120)
    getattr(Trainer(FailsInOne(), args, train_dataset=plain_data(), eval_dataset=plain_data()), method)()
