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
from tests.compat.example_shapes.shapes import SHAPES
from tests.support import warm
from tests.support.differences import MEASURED, OWN_FILES
from tests.support.parity import assert_same_weights

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


def card_of(path):
    """A card's metadata, and of these the results apart; without what the ledger says of "origins"."""
    card = metadata_load(path)
    (index,) = card["model-index"]
    for result in index["results"]:
        result["dataset"] = {name: v for name, v in result["dataset"].items() if v not in (None, "None")}
    return card, [index.pop("results"), card.pop("metrics", None)]


def results_of(folder):
    return {str(path.relative_to(folder)): card_of(path)[1] for path in folder.rglob("README.md")}


def as_texts(found):
    """Equal for equal values: a card's keys have another order in transformers'."""
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items()}


def number(text):
    """3.0 equals 3."""
    value = float(text)
    return int(value) if value.is_integer() else value


def outcome(folder):
    """What a script has left, by file: metrics, predictions, states and cards as texts, weights, and other names."""
    found = {}
    for name in files_of(folder):
        path = folder / name
        if name.endswith(".safetensors"):
            found[name] = dict(sorted(load_file(path).items()))
        elif name.endswith(".json"):
            found[name] = json.dumps(without_times(json.loads(path.read_text(), parse_float=number)), sort_keys=True)
        elif name.endswith("README.md"):
            found[name] = json.dumps(card_of(path)[0], sort_keys=True)
        else:
            found[name] = path.read_text() if name.endswith((".txt", ".jinja")) else "not read"
    return found


def assert_same_outcome(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, dict):
            assert_same_weights(ours[name], value)
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "transformers"])
def test_same_results(run, name, way):
    if MISSING[name]:
        pytest.skip(f"{name} needs {' and '.join(MISSING[name])}")

    def outcome_of(way):
        folder = run(way) / name
        error = folder / "error.txt"
        assert not error.exists(), error.read_text()
        return outcome(folder)

    ours = results_of(run(way) / name)

    def results_of_peer():
        """As the ledger says of "results": ours has the last evaluation's where a release of transformers has none."""
        theirs = results_of(run("transformers") / name)
        return as_texts({card: found if found[0] else ours[card] for card, found in theirs.items()})

    assert_same_outcome(outcome_of(way), outcome_of("transformers"))
    assert as_texts(ours) == results_of_peer()
