"""Runs begun with transformers 4.57 and finished here, and the other way: they end as if nothing had happened.

This environment has 4.57; `make test-versions` names another, with the newest transformers, in `NEWEST_PYTHON`.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.compat.interchange import SHAPES
from tests.support.known_differences import files_in
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
PYTHONS = {"4.57": sys.executable, "newest": os.environ.get("NEWEST_PYTHON", "")}
THEIRS, OURS, OURS_NEWEST = ("4.57", "transformers"), ("4.57", "hftrainer"), ("newest", "hftrainer")
WAYS = [(THEIRS, OURS), (THEIRS, OURS_NEWEST), (OURS, THEIRS), (OURS_NEWEST, THEIRS), (OURS_NEWEST, OURS)]
LAYOUTS = {"safetensors": {}, "bin": {"save_safetensors": False}}
pytestmark = [
    pytest.mark.skipif(not version("transformers").startswith("4.57"), reason="make test-versions runs it beside 4.57"),
    pytest.mark.skipif(not PYTHONS["newest"], reason="NEWEST_PYTHON is not set; make test-versions sets it"),
]


def run(jobs: dict[str, list]) -> None:
    env = {**environment(), "HF_HUB_OFFLINE": "1"}
    how = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([PYTHONS[name], "-m", "tests.compat.interchange", json.dumps(given)], **how)
        for name, given in jobs.items()
    ]
    for process in started:
        output, _ = process.communicate()
        assert process.returncode == 0, output


def name_of(layout, model, *runners):
    return "-".join([layout, model, *(part for runner in runners for part in runner)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every undisturbed run, and every resumed one: `folders / name_of(...)`."""
    base = tmp_path_factory.mktemp("runs")
    cases = list(itertools.product(LAYOUTS, SHAPES))
    jobs = {"4.57": [], "newest": []}
    for (layout, model), runner in itertools.product(cases, [THEIRS, OURS, OURS_NEWEST]):
        folder = str(base / name_of(layout, model, runner))
        jobs[runner[0]].append([runner[1], model, folder, False, LAYOUTS[layout]])
    run(jobs)
    jobs = {"4.57": [], "newest": []}
    for (layout, model), (writer, reader) in itertools.product(cases, WAYS):
        folder = base / name_of(layout, model, writer, reader)
        checkpoint = f"checkpoint-{SHAPES[model][2]}"
        shutil.copytree(base / name_of(layout, model, writer) / checkpoint, folder / checkpoint)
        jobs[reader[0]].append([reader[1], model, str(folder), True, LAYOUTS[layout]])
    run(jobs)
    return base


def read(path: Path):
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=path.name != "rng_state.pth")


def same(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool((ours == theirs).all()) if hasattr(ours, "all") else ours == theirs


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def assert_same_end(folder: Path, reference: Path) -> None:
    assert same(read(folder / "final.pt"), read(reference / "final.pt"))
    assert report(folder) == report(reference)
    ours, theirs = last_checkpoint(folder), last_checkpoint(reference)
    files = files_in(theirs)
    assert files_in(ours) == files
    compared = [name for name in files if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    compared.remove("training_args.bin")
    assert [name for name in compared if not same(read(ours / name), read(theirs / name))] == []
    assert len(compared) >= 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("runner", [OURS, OURS_NEWEST], ids="-".join)
def test_undisturbed_run_ends_as_with_4_57(folders, layout, model, runner):
    assert_same_end(folders / name_of(layout, model, runner), folders / name_of(layout, model, THEIRS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(itertools.chain(*way)))
def test_run_resumed_by_the_other_library_ends_the_same(folders, layout, model, way):
    assert_same_end(folders / name_of(layout, model, *way), folders / name_of(layout, model, THEIRS))
