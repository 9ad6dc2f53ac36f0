"""Scripts with the shapes of the official examples: the same results by transformers and by hftrainer.

Each library runs all of them in one process, since importing takes longer than a script.
"""

import functools
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from hftrainer.model_card.files import PLOT_NAME
from tests import warm
from tests.interop.example_shapes.shapes import SHAPES
from tests.parity.differences import MEASURED, OWN_FILES
from tests.parity.support import assert_same_weights

DRIVER = Path(__file__).parent / "example_shapes" / "driver.py"
#: Who runs the scripts → the words before the folder.
WAYS = {
    "transformers": [DRIVER],
    "hftrainer": ["-m", "hftrainer", "run", DRIVER],
    "hftrainer, with its own parser": ["-m", "hftrainer", "run", DRIVER, "--own-parser"],
}
#: Script → what it needs and this environment does not have.
MISSING = {
    name: [module for module in shape.needs if importlib.util.find_spec(module) is None]
    for name, shape in SHAPES.items()
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that returns the folder of the scripts that `way` has run."""

    @functools.cache
    def run_all(way):
        folder = tmp_path_factory.mktemp("shapes")
        more = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
        line = [warm.PYTHON, *WAYS[way], folder, *(name for name in SHAPES if not MISSING[name])]
        env = {**warm.environment(), **warm.LIBRARIES, **more}
        done = subprocess.run([str(word) for word in line], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return run_all


def without_times(value):
    """JSON without the values of measured times, whose names stay."""
    if isinstance(value, dict):
        times = {name for name in value if any(time in name for time in MEASURED)}
        return {name: "measured" if name in times else without_times(v) for name, v in value.items()}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def files_of(folder):
    own = {*OWN_FILES, PLOT_NAME}
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in own)


def same_card(ours, theirs):
    """Whether two cards have the same metadata, but for what the ledger says of "origins" and "results"."""
    ours, theirs = metadata_load(ours), metadata_load(theirs)
    (index,) = theirs["model-index"]
    for result in index["results"]:
        result["dataset"] = {name: v for name, v in result["dataset"].items() if v not in (None, "None")}
    if not index["results"]:
        del ours["model-index"][0]["results"], index["results"]
        for card in (ours, theirs):
            card.pop("metrics", None)
    return ours == theirs


def differences(ours, theirs):
    """Names of the files of results, predictions and states that differ; weights are compared by themselves."""
    different = []
    for name in files_of(theirs):
        mine, other = ours / name, theirs / name
        if name.endswith(".safetensors"):
            assert_same_weights(load_file(mine), load_file(other))
        elif name.endswith(".json"):
            same = without_times(json.loads(mine.read_text())) == without_times(json.loads(other.read_text()))
            different += [] if same else [name]
        elif name.endswith("README.md"):
            different += [] if same_card(mine, other) else [name]
        elif name.endswith((".txt", ".jinja")):
            different += [] if mine.read_text() == other.read_text() else [name]
    return different


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "transformers"])
def test_same_results(run, name, way):
    if MISSING[name]:
        pytest.skip(f"{name} needs {' and '.join(MISSING[name])}")
    ours, theirs = run(way) / name, run("transformers") / name
    for folder in (theirs, ours):
        error = folder / "error.txt"
        assert not error.exists(), error.read_text()
    assert files_of(ours) == files_of(theirs)
    assert differences(ours, theirs) == []
