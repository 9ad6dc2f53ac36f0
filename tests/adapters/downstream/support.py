"""Runs the cases of one library by transformers and by hftrainer at the same time, and compares their records."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.known_differences import MEASURED

ROOT = Path(__file__).parents[3]
#: Who runs the cases → the words of the command line.
WAYS: dict[str, list[str]] = {"transformers": [], "hftrainer": ["--swap"]}
#: Times that the libraries measure and log.
ALL_MEASURED = (*MEASURED, "step_time", "elapsed_time", "remaining_time", "train_speed(s/it)")


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that runs cases: one thread, no network, nothing from an earlier run."""
    more = {
        "HF_HOME": str(folder / "hf"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS", "HF_HUB_DISABLE_TELEMETRY"), "1"),
        **dict.fromkeys(("TOKENIZERS_PARALLELISM", "TRL_EXPERIMENTAL_SILENCE"), "false"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # libraries write sets into their files
    }
    return {**processes.environment(), **more}


def run_both(module: str, names: Iterable[str], folder: Path, python: str = sys.executable) -> Path:
    """Run cases `names` of `module` in two processes of `python`; returns `folder`, with one folder for each way."""
    started = {}
    for way, words in WAYS.items():
        (folder / way).mkdir(parents=True)
        line = [python, "-m", "tests.adapters.downstream.driver", *words, module, str(folder / way), *names]
        with (folder / f"{way}.txt").open("w") as output:
            env = environment(folder / way)
            started[way] = subprocess.Popen(line, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    for way, process in started.items():
        assert process.wait() == 0, f"{way}:\n{(folder / f'{way}.txt').read_text()[-10_000:]}"
    return folder


def read(folder: Path, way: str, name: str) -> dict[str, Any]:
    error = folder / way / f"{name}.error.txt"
    assert not error.exists(), f"{name} by {way}:\n{error.read_text()}"
    return json.loads((folder / way / f"{name}.json").read_text())


def comparable(value: Any) -> Any:
    """A record without the values of measured times, whose names stay; NaN equals NaN."""
    if isinstance(value, dict):
        return {k: "measured" if k.endswith(ALL_MEASURED) else comparable(item) for k, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return "nan" if value != value else value


def assert_same(folder: Path, name: str) -> dict[str, Any]:
    """Assert that both ways have left the same record of a case, the order of its keys too; returns ours."""
    ours, theirs = (comparable(read(folder, way, name)) for way in ("hftrainer", "transformers"))
    for part in theirs:
        assert ours[part] == theirs[part], part
    assert json.dumps(ours["log_history"]) == json.dumps(theirs["log_history"]), "the order of keys"
    assert ours.keys() == theirs.keys()
    assert len(theirs["log_history"]) > 0
    return ours
