"""Scripts with the shapes of the official examples: the same results by transformers and by hftrainer.

Each library runs all of them in one process, since importing takes longer than a script.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from tests.compat.example_shapes.driver import NEEDS, SHAPES
from tests.support.known_differences import MEASURED, OWN_FILES
from tests.support.parity import assert_same_weights

DRIVER = Path(__file__).parent / "example_shapes" / "driver.py"
#: Script → modules that it needs and this environment lacks.
MISSING = {name: [module for module in NEEDS.get(name, ()) if not importlib.util.find_spec(module)] for name in SHAPES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, processes):
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    names = [name for name in SHAPES if not MISSING[name]]
    by_hftrainer = ["-m", "hftrainer", "run", DRIVER, ours, *names, "--both-parsers"]
    env = {**processes.environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(theirs / "hf")}
    for words in ([DRIVER, theirs, *names], by_hftrainer):
        done = processes.run(*words, env=env, fresh=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return theirs, ours


def without_times(value):
    if isinstance(value, dict):
        times = {name for name in value if any(time in name for time in MEASURED)}
        return {name: "measured" if name in times else without_times(v) for name, v in value.items()}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def content(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text(), parse_constant=str))
    if path.name == "README.md":
        return metadata_load(path)
    return path.read_text() if path.suffix == ".jinja" else "not read"


def outcome(folder):
    error = folder / "error.txt"
    assert not error.exists(), error.read_text()
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in OWN_FILES]
    return {str(path.relative_to(folder)): content(path) for path in files}


def results_of(files):
    """Takes the results out of cards' metadata, without what the ledger says of "origins"."""
    found = {}
    for name, card in ((name, content) for name, content in files.items() if name.endswith("README.md")):
        (index,) = card["model-index"]
        for result in index["results"]:
            result["dataset"] = {key: v for key, v in result["dataset"].items() if v not in (None, "None")}
        found[name] = [index.pop("results"), card.pop("metrics", None)]
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_example_script_gives_the_same_results(folders, name):
    if MISSING[name]:
        pytest.skip(f"{name} needs {' and '.join(MISSING[name])}")
    theirs, ours = (outcome(folder / name) for folder in folders)
    trained = [any((folder / name).rglob("hftrainer_manifest.json")) for folder in folders]
    assert trained == [False, True], "by transformers, then by hftrainer"
    our_results, their_results = results_of(ours), results_of(theirs)
    assert ours.keys() == theirs.keys()
    for file, value in theirs.items():
        if file.endswith(".safetensors"):
            assert_same_weights(ours[file], value)
        else:
            assert ours[file] == value, file
    for file, (results, metrics) in their_results.items():
        # compatibility.toml, "results": ours has those of the last evaluation where a release of transformers has none.
        assert our_results[file] == ([results, metrics] if results else our_results[file])
