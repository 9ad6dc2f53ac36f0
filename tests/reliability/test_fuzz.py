"""Checkpoints with contents that somebody made up: a clear error or a run that resumes; no code of theirs is run."""

import contextlib
import functools
import json
import os
import pickle
import struct

import pytest
import torch
from hypothesis import strategies as st

from hftrainer.checkpointing.distributed import PARTS, load_model_parts, load_optimizer_parts
from hftrainer.checkpointing.manifest import _crc32_of_list
from hftrainer.checkpointing.names import MANIFEST_NAME
from hftrainer.errors import DamagedCheckpoint
from tests.support import fuzz
from tests.support.checkpoints import KeepsState, copy_without_manifest, finished, make_trainer
from tests.support.jobs import names
from tests.support.parts import stepped, write

pytestmark = pytest.mark.filterwarnings("ignore")
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def make(folder, **settings):
    return make_trainer(folder, callbacks=[KeepsState()], **{"max_steps": 5, "logging_steps": 2, **settings})


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Kind → a checkpoint: of a run, of one with a loading process, and parts of a model and its optimizer."""

    @functools.cache
    def source(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "parts":
            write(folder / "checkpoint-3")
            (folder / "checkpoint-3" / MANIFEST_NAME).touch()
        else:
            make(folder, max_steps=3, **(WORKERS if kind == "workers" else {})).train()
        return folder / "checkpoint-3"

    return source


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "checkpoint-3"


def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def harmless(folder):
    """What is read inside is accepted or refused; it runs no code, writes nothing elsewhere, takes little memory."""
    before = memory()
    with fuzz.accepted_or_refused():
        yield
    assert names(folder.parents[1]) == ["run"]
    assert memory() - before < 500 * 2**20


def change_json(path, draw, trace):
    path.write_text(json.dumps(draw(fuzz.mutated(json.loads(path.read_text())))))


def change_torch(path, draw, trace):
    torch.save(draw(fuzz.pickled(torch.load(path, weights_only=False), trace)), path)


def change_header(path, draw, trace):
    """A header of safetensors that lies about its length, or about the tensors."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(draw(fuzz.mutated(json.loads(data[8:end])))).encode()
    length = draw(st.sampled_from([len(header)] * 4 + [0, 7, 2**40, 2**63]))
    path.write_bytes(struct.pack("<Q", length) + header + data[end:])


def change_part(part, path, draw, trace):
    """A part of the progress that is not in every run."""
    held = torch.load(path, weights_only=False)
    place = held["data"] if part == "workers" else held
    place[part] = draw(fuzz.mutated(place[part] or {"loss_a": (torch.tensor(0.5), 2)}, fuzz.tensors))
    torch.save(held, path)


def change_list(path, draw, trace):
    """Another value of a field of the list of parts, or of one of the descriptions in it."""
    parts = pickle.loads(path.read_bytes())
    name = draw(st.sampled_from(list(vars(parts))))
    value = getattr(parts, name)
    described = draw(st.sampled_from(list(value.values()))) if isinstance(value, dict) and value else value
    if getattr(described, "__dict__", None) and draw(st.integers(0, 9)) < 7:
        vars(described)[draw(st.sampled_from(list(vars(described))))] = draw(fuzz.tensors)
    else:
        setattr(parts, name, draw(fuzz.mutated(value)))
    if draw(st.integers(0, 9)) == 9:
        parts.planner_data = {"more": fuzz.Mischief(trace)}
    path.write_bytes(pickle.dumps(parts))


def scramble(path, draw, trace):
    path.write_bytes(draw(fuzz.scrambled(path.read_bytes())))


def resume(folder, **settings):
    finished(make(folder.parent, **settings), folder)


def load(kind):
    def load_parts(folder):
        model, optimizer = stepped()
        if kind == "model":
            load_model_parts(model, str(folder))
        else:
            load_optimizer_parts(model, optimizer, str(folder))

    return load_parts


CHANGES = {
    **{"trainer_state.json": change_json, MANIFEST_NAME: change_json, "model.safetensors": change_header},
    **dict.fromkeys(["progress.pt", "rng_state.pth", "optimizer.pt", "scheduler.pt"], change_torch),
    **dict.fromkeys(["lightning_callbacks.pt", "training_args.bin"], change_torch),
}
#: What is changed → the checkpoint it is in, the file, how, and what reads it.
CASES = {
    **{f"values of {name}": ("run", name, change, resume) for name, change in CHANGES.items()},
    **{f"bytes of {name}": ("run", name, scramble, resume) for name in CHANGES},
    "metrics": ("run", "progress.pt", functools.partial(change_part, "metrics"), resume),
    "workers": (
        "workers",
        "progress.pt",
        functools.partial(change_part, "workers"),
        functools.partial(resume, **WORKERS),
    ),
}
for _kind, _folder in PARTS.items():
    CASES[f"list of parts of the {_kind}"] = ("parts", f"{_folder}/.metadata", change_list, load(_kind))
    CASES[f"bytes of that of the {_kind}"] = ("parts", f"{_folder}/.metadata", scramble, load(_kind))
    CASES[f"bytes of the {_kind}'s parts"] = ("parts", f"{_folder}/__0_0.distcp", scramble, load(_kind))


@pytest.mark.parametrize("case", CASES)
@fuzz.made_up
def test_made_up_contents(sources, folder, case, data):
    kind, name, change, read = CASES[case]
    copy_without_manifest(sources(kind), folder)
    if name == MANIFEST_NAME:
        (folder / name).write_bytes((sources(kind) / name).read_bytes())
    change(folder / name, data.draw, folder.parents[1] / "trace")
    with harmless(folder):
        read(folder)


# ---- Made up by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/tmp/outside.safetensors", 7, None])
def test_no_way_out_of_the_folder_by_an_index(sources, folder, shard):
    copy_without_manifest(sources("run"), folder)
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(fuzz.CLEAR, match=r"model\.safetensors\.index\.json"):
        resume(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_no_way_out_of_the_folder_by_a_manifest(sources, folder, name):
    copy_without_manifest(sources("run"), folder)
    files = {name: {"size": 1, "crc32": 1}}
    (folder / MANIFEST_NAME).write_text(json.dumps({"files": files, "crc32": _crc32_of_list(files)}))
    with pytest.raises(fuzz.CLEAR, match=rf"{MANIFEST_NAME} cannot be read"):
        resume(folder)


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
def test_values_that_a_step_of_training_would_refuse(sources, folder, name):
    file, change = STEPS[name]
    copy_without_manifest(sources("run"), folder)
    held = torch.load(folder / file, weights_only=False)
    change(held)
    torch.save(held, folder / file)
    with pytest.raises(DamagedCheckpoint, match=f"{file} does not hold what"):
        resume(folder)
