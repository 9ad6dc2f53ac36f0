"""A script for TFTrainer, run unchanged by `python -m hftrainer run`, against what the real one logged."""

import importlib.metadata
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import processes

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"
COMMON = (
    "--overwrite_output_dir --logging_steps 1 --learning_rate 1e-3 --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 --eval_steps 1000 --use_cpu --disable_tqdm true"
)
CASES = {
    "text": "--task text --num_train_epochs 2 --evaluation_strategy steps --eval_steps 5",
    "text_wd": (
        "--task text --num_train_epochs 3 --warmup_steps 4 --weight_decay 0.1 --adam_epsilon 1e-6 --poly_power 2"
    ),
    "text_ga": "--task text --num_train_epochs 2 --gradient_accumulation_steps 2 --max_grad_norm 0.01",
    "ner": "--task ner --num_train_epochs 2",
    "qa": "--task qa --num_train_epochs 2",
    "text_odd": "--task text --examples 18 --eval_examples 10 --num_train_epochs 2 --max_steps 7",
}
#: Two libraries compute in float32, each in its own order.
CLOSE = 2e-6
#: Of these the real one counted the first two samples of its evaluation again.
EACH_SAMPLE_ONCE = {"text_odd"}


def run(folder: Path, words: str, task: str, **environment: str) -> dict:
    line = [sys.executable, "-m", "hftrainer", "run", str(HERE / "script_v4.py")]
    line += ["--model_dir", str(REFERENCE / f"model_{task}"), "--output_dir", str(folder), *COMMON.split()]
    environment = {**processes.environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*line, *words.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def farthest(ours: list, theirs: list) -> float:
    return max((abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True)), default=0.0)


@pytest.mark.parametrize("name", CASES)
def test_logs_and_predictions_are_those_of_tensorflow(tmp_path, name):
    ours = run(tmp_path, CASES[name], name.partition("_")[0])
    theirs = json.loads((REFERENCE / f"{name}.json").read_text())
    if name in EACH_SAMPLE_ONCE:
        for each in (ours, theirs):
            each["logs"] = [line for line in each["logs"] if "eval_loss" not in line]
        assert (ours.pop("evaluate")["eval_rows"], theirs.pop("evaluate")["eval_rows"]) == (10, 12)
    assert [list(line) for line in ours["logs"]] == [list(line) for line in theirs["logs"]]
    apart = [
        farthest([float(value) for value in line.values()], [float(value) for value in real.values()])
        for line, real in zip(ours["logs"], theirs["logs"], strict=True)
    ]
    assert max(apart) < CLOSE
    for key in ("evaluate", "metrics"):
        if theirs.get(key) is not None:
            assert ours[key].keys() == theirs[key].keys()
            assert farthest(list(ours[key].values()), list(theirs[key].values())) < CLOSE
    if "predictions" in theirs:
        np.testing.assert_allclose(ours["predictions"], theirs["predictions"], rtol=1e-4, atol=CLOSE)
        assert ours["label_ids"] == theirs["label_ids"]


def test_example_script_learns(tmp_path):
    pytest.importorskip("sklearn")
    if importlib.metadata.version("transformers").startswith("4."):
        pytest.skip("TensorFlow computes convolutions of images with channels last only, on the CPU")
    done = subprocess.run(
        [sys.executable, "-m", "hftrainer", "run", str(HERE.parents[2] / "examples" / "tf_trainer.py")],
        env={**processes.environment(), "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) > 0.5  # by guessing 0.1; 0.73 to 0.8, by the number of threads
    assert (tmp_path / "demo_output" / "tf" / "model.safetensors").is_file()


def test_resume_within_an_epoch_is_exact(tmp_path):
    """Within an epoch: the same order of samples, mean loss of the epoch and rate as in the undisturbed run."""
    words = "--task text --num_train_epochs 3 --save_steps 7"
    whole = run(tmp_path / "whole", words, "text")
    part = run(tmp_path / "part", words, "text")
    assert part == whole
    # The checkpoint of step 14 goes, so that the second call of train() begins at step 7 of 15, in the second epoch.
    for folder in (tmp_path / "part").glob("checkpoint-*"):
        if folder.name != "checkpoint-7":
            folder.rename(tmp_path / folder.name)
    resumed = run(tmp_path / "part", words, "text")
    steps = [line for line in whole["logs"] if "loss" in line]
    assert [line for line in resumed["logs"] if "loss" in line] == steps[7:]
    assert {**resumed, "logs": None} == {**whole, "logs": None}
    assert not any(math.isnan(line["loss"]) for line in steps)
