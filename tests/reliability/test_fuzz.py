"""Checkpoints with contents that somebody made up: a clear error or a run that resumes; no code of theirs is run."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.checkpointing.manifest import _crc32_of_list
from hftrainer.checkpointing.names import MANIFEST_NAME
from hftrainer.errors import DamagedCheckpoint
from tests.support import fuzz
from tests.support.tiny import make_plain, plain_data

lightning = pytest.importorskip("lightning.pytorch")


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


def change_json(path, rng, trace):
    path.write_text(json.dumps(fuzz.mutate(json.loads(path.read_text()), rng)))


def change_torch(path, rng, trace):
    held = torch.load(path, weights_only=False)
    changed = fuzz.mutate(held, rng, fuzz.tensors)
    if rng.random() < 0.1:
        changed = {"all": changed, "more": fuzz.Mischief(trace)}
    torch.save(changed, path)


def change_header(path, rng, trace):
    """A header of safetensors that lies about its length, or about the tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.3:
        path.write_bytes(struct.pack("<Q", rng.choice([0, 7, 2**40, 2**63])) + data[8:])
        return
    header = json.dumps(fuzz.mutate(json.loads(data[8 : 8 + length]), rng)).encode()
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
    with pytest.raises(fuzz.CLEAR, match=r"model\.safetensors\.index\.json"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_no_way_out_of_the_folder_by_a_manifest(source, tmp_path, name):
    folder = tmp_path / "run" / "checkpoint-3"
    shutil.copytree(source, folder)
    files = {name: {"size": 1, "crc32": 1}}
    (folder / MANIFEST_NAME).write_text(json.dumps({"files": files, "crc32": _crc32_of_list(files)}))
    with pytest.raises(fuzz.CLEAR, match=rf"{MANIFEST_NAME} cannot be read"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(folder))


STEPS = {
    "epoch": ("progress.pt", lambda held: held.update(epoch=10**30)),
    "metric": ("progress.pt", lambda held: held["metrics"].update(loss_a=torch.tensor(0.5))),
    "setting": ("progress.pt", lambda held: held["settings"]["accelerator_config"].update(even_batches=torch.ones(2))),
    "flag": ("optimizer.pt", lambda held: held["param_groups"][0].update(amsgrad=1)),
    "moment": ("optimizer.pt", lambda held: held["param_groups"][0].update(amsgrad=True)),
    "two flags": ("optimizer.pt", lambda held: held["param_groups"][0].update(differentiable=True)),
    "rates": ("scheduler.pt", lambda held: held.update(_last_lr=None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_values_that_a_step_of_training_would_refuse(source, tmp_path, name):
    file, change = STEPS[name]
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(source, folder)
    (folder / MANIFEST_NAME).unlink()
    held = torch.load(folder / file, weights_only=False)
    change(held)
    torch.save(held, folder / file)
    with pytest.raises(DamagedCheckpoint, match=f"{file} does not hold what"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(folder))


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resume(source, tmp_path, kind, name, change, tried=fuzz.TRIED, **settings):
    """Resume from a checkpoint with another content in one of its files, for each seed."""
    trace, before = tmp_path / "trace", memory()
    for seed, rng in fuzz.seeds(kind, tried):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        folder = tmp_path / "run" / "checkpoint-3"
        shutil.copytree(source, folder)
        if name != MANIFEST_NAME:
            (folder / MANIFEST_NAME).unlink()  # somebody who means harm would mend it
        change(folder / name, rng, trace)
        with fuzz.clear(kind, seed):
            make_trainer(tmp_path / "run", **settings).train(resume_from_checkpoint=str(folder))
        assert not trace.exists(), f"{seed}: code of the checkpoint was run"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], seed
    assert memory() - before < 500 * 2**20
    np.random.seed(0)  # what the checkpoints have set


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["values", "bytes"])
def test_made_up_contents(source, tmp_path, name, way, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change = KINDS[name] if way == "values" else lambda path, rng, trace: fuzz.scramble(path, rng)
    resume(source, tmp_path, f"{name}: {way}", name, change)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["workers", "metrics"])
def test_made_up_parts_of_the_progress(tmp_path_factory, tmp_path, part, monkeypatch):
    """Of runs in whose progress there is more."""
    monkeypatch.chdir(tmp_path)
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True} if part == "workers" else {}
    source = tmp_path_factory.mktemp("source")
    make_trainer(source, max_steps=3, **settings).train()

    def change(path, rng, trace):
        held = torch.load(path, weights_only=False)
        place = held["data"] if part == "workers" else held
        place[part] = fuzz.mutate(place[part] or {"loss_a": (torch.tensor(0.5), 2)}, rng, fuzz.tensors)
        torch.save(held, path)

    tried = (fuzz.TRIED + 3) // 4 if part == "workers" else fuzz.TRIED  # processes take longer
    resume(source / "checkpoint-3", tmp_path, f"progress.pt: {part}", "progress.pt", change, tried, **settings)
