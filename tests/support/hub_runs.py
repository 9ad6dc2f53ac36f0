"""Trainers of either library that push to a local Hub."""

import importlib

import pytest

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.hub_server import HubServer
from tests.support.parity import build
from tests.support.tiny import make_plain, plain_data

TOKEN = "hf_aVeryPrivateTokenIndeed"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer({TOKEN: ("me", "write")}).running() as server:
        server.serve(monkeypatch, tmp_path / "home")
        yield server


def waiting(library):
    """A callback that keeps each save until the one before is up, and counts the pushes that begin."""

    class Waiting(library.TrainerCallback):
        trainer, begun = None, 0

        def on_push_begin(self, args, state, control, **kwargs):
            Waiting.begun += 1

        def on_save(self, args, state, control, **kwargs):
            if self.trainer.push_in_progress is not None:
                self.trainer.push_in_progress.wait_until_done()

    return Waiting()


def make_pushing(name, folder, model="bert", trainer=None, **settings):
    """A Trainer of library `name` that pushes each save and waits for it."""
    library = importlib.import_module(name)
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("for the repository")
    (folder / "_private.txt").write_text("not for the repository")
    callback = waiting(library)
    given = {"data_collator": library.default_data_collator, "callbacks": [callback], **(trainer or {})}
    defaults = {"push_to_hub": True, "hub_token": TOKEN, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    built, _ = build(name, model, folder, trainer=given, **{**defaults, **settings})
    callback.trainer = built
    return built, callback


READS = "hf_mayOnlyRead"


#: Of a run that uploads.
STEPS = 6


def make_uploading(folder, callbacks=(), **settings):
    defaults = {
        "max_steps": STEPS,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "push_to_hub": True,
        "hub_token": TOKEN,
    }
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data()}
    return Trainer(make_plain(), args, callbacks=[*callbacks], **data)


class At(TrainerCallback):
    """Does something when a step ends."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()
