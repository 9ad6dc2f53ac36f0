"""Folders of runs to draw: trained, or only with their logs."""

import json
import re
import time
from pathlib import Path

import pytest

from hftrainer.monitoring.journal import ACTIVITIES, Journal
from tests.support.parity import accuracy, train

SPEEDS = {"tokens_per_second": 9000.5, "samples_per_second": 17.5, "step_seconds": 0.25, "data_wait": 0.1}
SPEEDS |= {"eval_share": 0.2, "save_share": 0.05, "peak_memory_mb": 812.0, "mfu": 0.4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two short runs with different learning rates."""
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 5}
    folders = [tmp_path_factory.mktemp(f"rate-{rate}") for rate in (0.01, 0.1)]
    for rate, folder in zip((0.01, 0.1), folders, strict=True):
        train("hftrainer", "plain", folder, learning_rate=rate, trainer={"compute_metrics": accuracy}, **settings)
    return list(map(str, folders))


def write_observed_run(folder, **values):
    written = Journal(str(folder))
    written.write("begin", 0, max_steps=30, world_size=1, device="cpu", pid=1, host="there", resumed_from=None)
    for step, speed in ((10, 17.5), (20, 35.0)):
        # As if each step had as many samples.
        speeds = SPEEDS | {"samples_per_second": speed, "step_seconds": 4.375 / speed} | values
        written.write("log", step, logs={"loss": step / 10, "step": step, "epoch": step / 100, **speeds})
    time.sleep(0.002)  # times are in milliseconds; without any time there is no goodput
    written.write("interval", 20, steps=20, seconds=dict.fromkeys(ACTIVITIES, 0.0))
    return str(folder)


def write_log(folder, log, **state):
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log, **state}))
    return str(folder)


def texts_in_svg(path):
    return [" ".join(text.split()) for text in re.findall(r"<!-- (.*?) -->", Path(path).read_text(), re.DOTALL)]
