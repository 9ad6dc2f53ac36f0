"""Checkpoints with contents that somebody made up: a clear error or a run that resumes; no code of theirs is run.

`make fuzz` tries many more (`FUZZ=1000`); a failure prints the seed of its case.
"""

import copy
import json
import os
import random
import shutil
import struct
import time

import numpy as np
import pytest
import torch

import hftrainer.errors
from hftrainer import Trainer, TrainingArguments
from hftrainer.checkpointing.manifest import _crc32_of_list
from hftrainer.checkpointing.names import MANIFEST_NAME
from tests.tiny import make_plain, plain_data

TRIED = int(os.environ.get("FUZZ", "12"))
#: Errors that say what is wrong with a file or an argument.
CLEAR = tuple(kind for kind in vars(hftrainer.errors).values() if isinstance(kind, type))
SECONDS = 20
lightning = pytest.importorskip("lightning.pytorch")


class Mischief:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class KeepsState(lightning.Callback):
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def make_trainer(folder, **settings):
    steps = {"max_steps": 5, "save_steps": 3, "logging_steps": 2, "save_strategy": "steps"}
    args = TrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **{**steps, **settings})
    return Trainer(make_plain(), args, train_dataset=plain_data(24), callbacks=[KeepsState()])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_trainer(folder, max_steps=3).train()
    return folder / "checkpoint-3"


def anything(rng):
    """A value that a writer of JSON or of torch.save might have put there."""
    return rng.choice(
        [
            *(None, True, -1, 0, 10**12, -(10**30), 2.5, float("nan"), float("inf"), "", "x" * 300, "../../outside"),
            *([], {}, [1, "2", None], {"a": {"b": []}}, [[[[]]]], {"0": 1}),
        ]
    )


def tensors(rng):
    return rng.choice(
        [torch.zeros(0), torch.zeros(3, 5), torch.full((2,), float("nan")), torch.tensor(7), anything(rng)]
    )


def mutate(value, rng, make):
    """A copy in which one part, anywhere, is another value, gone, or there under another name."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        value = copy.copy(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        how = rng.random()
        if how < 0.15:
            del value[key]
        elif how < 0.25 and isinstance(value, dict):
            value[rng.choice(["more", 7, "../x"])] = make(rng)
        else:
            value[key] = mutate(value[key], rng, make)
        return value
    return make(rng)


def scramble(path, rng):
    """Other bytes: flipped, cut, or in between."""
    data = bytearray(path.read_bytes())
    how = rng.random()
    if how < 0.3:
        del data[rng.randrange(len(data)) :]
    elif how < 0.8:
        for _ in range(rng.choice([1, 8, 200])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:
        place = rng.randrange(len(data))
        data[place:place] = rng.randbytes(rng.choice([1, 64]))
    path.write_bytes(bytes(data))


def change_json(path, rng, trace):
    path.write_text(json.dumps(mutate(json.loads(path.read_text()), rng, anything)))


def change_torch(path, rng, trace):
    held = torch.load(path, weights_only=False)
    changed = mutate(held, rng, tensors)
    if rng.random() < 0.1:
        changed = {"all": changed, "more": Mischief(trace)}
    torch.save(changed, path)


def change_header(path, rng, trace):
    """A header of safetensors that lies about its length, or about the tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.3:
        path.write_bytes(struct.pack("<Q", rng.choice([0, 7, 2**40, 2**63])) + data[8:])
        return
    header = json.dumps(mutate(json.loads(data[8 : 8 + length]), rng, anything)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


KINDS = {
    "trainer_state.json": change_json,
    MANIFEST_NAME: change_json,
    "progress.pt": change_torch,
    "rng_state.pth": change_torch,
    "optimizer.pt": change_torch,
    "scheduler.pt": change_torch,
    "lightning_callbacks.pt": change_torch,
    "training_args.bin": change_torch,
    "model.safetensors": change_header,
}


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/tmp/outside.safetensors", 7, None])
def test_no_way_out_of_the_folder_by_an_index(source, tmp_path, shard):
    folder = tmp_path / "run" / "checkpoint-3"
    shutil.copytree(source, folder)
    (folder / MANIFEST_NAME).unlink()
    (folder / "model.safetensors").rename(tmp_path / "run" / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CLEAR, match=r"model\.safetensors\.index\.json"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_no_way_out_of_the_folder_by_a_manifest(source, tmp_path, name):
    folder = tmp_path / "run" / "checkpoint-3"
    shutil.copytree(source, folder)
    files = {name: {"size": 1, "crc32": 1}}
    (folder / MANIFEST_NAME).write_text(json.dumps({"files": files, "crc32": _crc32_of_list(files)}))
    with pytest.raises(CLEAR, match=rf"{MANIFEST_NAME} cannot be read"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(folder))


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["values", "bytes"])
def test_made_up_contents(source, tmp_path, name, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace, before = tmp_path / "trace", memory()
    outcomes = {"resumed": 0, "refused": 0}
    first = int(os.environ.get("FUZZ_FIRST", "0"))
    for seed in range(first, first + TRIED):
        rng = random.Random(f"{name} {way} {seed}")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        folder = tmp_path / "run" / "checkpoint-3"
        shutil.copytree(source, folder)
        if name != MANIFEST_NAME:
            (folder / MANIFEST_NAME).unlink()  # somebody who means harm would mend it
        KINDS[name](folder / name, rng, trace) if way == "values" else scramble(folder / name, rng)
        start = time.monotonic()
        try:
            trainer = make_trainer(tmp_path / "run")
            trainer.train(resume_from_checkpoint=str(folder))
            outcomes["resumed"] += 1
        except CLEAR:
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"{name} {way} {seed}: {type(error).__name__}: {error}")
        assert time.monotonic() - start < SECONDS, seed
        assert not trace.exists(), f"{seed}: code of the checkpoint was run"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], seed
    assert memory() - before < 500 * 2**20
    assert sum(outcomes.values()) == TRIED
    np.random.seed(0)  # what the checkpoints have set
