"""Configurations and references to the Hub that somebody made up: a clear error or a valid value, and no other file.

`make fuzz` tries many more, as with `test_fuzz.py`.
"""

import json
import os
import random
import time

import pytest
import torch

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.errors import CheckpointNotFound
from hftrainer.hub.download import download_checkpoint
from tests.hub_server import Commit, HubServer, Repo
from tests.reliability.test_fuzz import CLEAR, SECONDS, TRIED, anything, mutate, scramble
from tests.tiny import make_plain, plain_data

ARGUMENTS = {
    **{"output_dir": "out", "learning_rate": 0.1, "max_steps": 3, "logging_steps": 2, "optim": "adamw_torch"},
    **{"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "report_to": ["none"], "use_cpu": True, "seed": 7},
    **{"eval_strategy": "steps", "eval_steps": 2, "label_names": ["labels"], "warmup_steps": 0.1, "run_name": "run"},
}
LIGHTNING = {
    "devices": 1,
    "async_checkpoint": True,
    "max_time": {"minutes": 1},
    "limit_val_batches": 2,
    "profiler": "simple",
}
ACCELERATOR = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}


def parsed(path):
    read = HfArgumentParser(TrainingArguments)
    (read.parse_json_file if path.suffix == ".json" else read.parse_yaml_file)(str(path))


def constructed(argument):
    def construct(path):
        args = TrainingArguments("out", use_cpu=True, report_to="none", max_steps=1, **{argument: str(path)})
        Trainer(make_plain(), args, train_dataset=plain_data(8))

    return construct


#: Name of a file → its contents, and what reads it.
FILES = {
    "arguments.json": (ARGUMENTS, parsed),
    "arguments.yaml": (ARGUMENTS, parsed),
    "lightning.json": (LIGHTNING, constructed("lightning_config")),
    "lightning.yaml": (LIGHTNING, constructed("lightning_config")),
    "accelerator.json": (ACCELERATOR, constructed("accelerator_config")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["values", "bytes"])
def test_made_up_files(tmp_path, name, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, read = FILES[name]
    path = tmp_path / name
    for seed in range(TRIED):
        rng = random.Random(f"{name} {way} {seed}")
        path.write_text(json.dumps(mutate(content, rng, anything) if way == "values" else content))  # YAML reads JSON
        if way == "bytes":
            scramble(path, rng)
        start = time.monotonic()
        try:
            read(path)
        except CLEAR:
            pass
        except Exception as error:
            pytest.fail(f"{name} {way} {seed}: {type(error).__name__}: {error}: {path.read_bytes()!r}")
        assert time.monotonic() - start < SECONDS, seed
        assert {each.name for each in tmp_path.iterdir()} <= {name, "out"}, seed
    torch.manual_seed(0)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "", "\x00", "é".encode("latin-1").decode("latin-1") * 3, "a: &a [x, x]\nb: *c", '{"a": 1' * 50_000],
    ids=["deep", "empty", "zero", "letters", "no anchor", "deep keys"],
)
def test_odd_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CLEAR, match=name.replace(".", r"\.") if text else None):
        FILES[name][1](path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_utf_8(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"devices": "\xff\xfe"}')
    with pytest.raises(CLEAR, match=name.replace(".", r"\.")):
        FILES[name][1](tmp_path / name)


# ---- References to the Hub ------------------------------------------------------------------------------------------

TOKEN = "hf_ofTheFuzzer"
PARTS = (
    "me",
    "run",
    "..",
    ".",
    "",
    "checkpoint-2",
    "@",
    "@main",
    "/",
    "\\",
    "%2e%2e",
    "*",
    "~",
    "\0",
    "é",
    "x" * 200,
    " ",
)
#: Names of files in a repository that somebody made up.
PATHS = (
    "../outside",
    "checkpoint-2/../../outside",
    "/tmp/hftrainer-outside",
    "checkpoint-2/trainer_state.json",
    "a\\..\\b",
)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer({TOKEN: ("me", "write")}).running() as server:
        server.serve(monkeypatch, tmp_path / "home")
        server.repos["me/run"] = Repo()
        files = dict.fromkeys(PATHS, b'{"global_step": 2}')
        server.repos["me/run"].branches["main"].append(Commit("made up", files, tuple(files)))
        yield server


def files_below(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def test_made_up_references(hub, tmp_path):
    """What is downloaded stays in the cache, whatever is asked for and whatever the repository lists."""
    home = tmp_path / "home" / "hub"
    for seed in range(TRIED * 5):
        rng = random.Random(f"reference {seed}")
        reference = (
            "hub:me/run" * (rng.random() < 0.7)
            + rng.choice(["", "/", "hub:"])
            + "/".join(rng.choice(PARTS) for _ in range(rng.randrange(4)))
        )
        try:
            found = download_checkpoint(reference, TOKEN)
        except CheckpointNotFound as refused:
            found, message = None, str(refused)
        except Exception as error:
            pytest.fail(f"{seed}: {reference!r}: {type(error).__name__}: {error}")
        if found is None:
            assert TOKEN not in message
        else:
            assert os.path.realpath(found).startswith(str(home)), reference
        assert files_below(tmp_path) == files_below(home), reference
        assert not os.path.exists("/tmp/hftrainer-outside")


@pytest.mark.parametrize("folder", ["..", "../..", "checkpoint-2/../../../.."])
def test_a_reference_that_leads_out_of_the_cache(hub, folder):
    with pytest.raises(CheckpointNotFound, match="give 'hub:owner/name'"):
        download_checkpoint(f"hub:me/run/{folder}", TOKEN)
