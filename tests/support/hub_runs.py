"""Trainers of either library that push to a local Hub."""

import importlib
import os
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

from tests.support import processes
from tests.support.hub_server import HubServer
from tests.support.parity import build

TOKEN, READ_TOKEN = "hf_aVeryPrivateTokenIndeed", "hf_mayOnlyRead"
#: Optimizer steps of a run that uploads.
STEPS = 6


def environment(hub, home):
    """For fresh processes that use this Hub, with their cache below `home`: the client reads it when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {"HF_ENDPOINT": hub.url_for(""), "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
    return {**processes.environment(inherited), **variables, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process uses, with its cache in "home", nobody logged in, and short waits."""
    from transformers.utils import hub

    with HubServer({TOKEN: ("me", "write"), READ_TOKEN: ("me", "read")}) as server:
        places = {"HF_HUB_CACHE": str(tmp_path / "home" / "hub"), "HF_TOKEN_PATH": str(tmp_path / "home" / "token")}
        endpoint = server.url_for("").rstrip("/")
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        values = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False, **places}
        for name, value in {**values, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        # The first is what transformers keeps, the second what 4.48 uses, which keeps none.
        monkeypatch.setattr(hub, "_hf_api", None, raising=False)
        monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 1000)))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server


#: Arguments of a run that pushes every second step.
PUSHES = {"push_to_hub": True, "hub_token": TOKEN, "save_strategy": "steps", "save_steps": 2}


def make_pushing(name, folder, model="bert", trainer=None, **settings):
    """A Trainer of library `name` that waits for each push, and a callback that counts them."""
    library = importlib.import_module(name)

    class Waiting(library.TrainerCallback):
        begun = 0

        def on_push_begin(self, args, state, control, **kwargs):
            self.begun += 1

        def on_save(self, args, state, control, **kwargs):
            if built.push_in_progress is not None:
                built.push_in_progress.wait_until_done()

    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("for the repository")
    (folder / "_private.txt").write_text("not for the repository")
    callback = Waiting()
    trainer_kwargs = {"data_collator": library.default_data_collator, "callbacks": [callback], **(trainer or {})}
    built, _ = build(name, model, folder, trainer=trainer_kwargs, **{**PUSHES, "max_steps": 3, **settings})
    if name == "transformers":
        # It rotates checkpoints while a push lists them, and loses a push that finds one gone.
        push = built._push_from_checkpoint
        built._push_from_checkpoint = lambda checkpoint: (push(checkpoint), callback.on_save(None, None, None))
    return built, callback


def make_uploading(folder, callbacks=(), **settings):
    """A Trainer of ours that does not wait for its pushes."""
    trainer_kwargs = {"callbacks": list(callbacks), **settings.pop("trainer", {})}
    return build("hftrainer", "plain", folder, trainer=trainer_kwargs, **{**PUSHES, "max_steps": STEPS, **settings})[0]


def head(hub):
    return hub.repos["me/run"].at("main")


def messages(hub):
    return hub.repos["me/run"].messages()


def step_messages(*numbers, checkpoint=False):
    parts = ("", ", checkpoint") if checkpoint else ("",)
    return [f"Training in progress, step {number}{part}" for number in numbers for part in parts]
