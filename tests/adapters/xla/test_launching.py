"""`python -m hftrainer run --tpu`, and what several processes do; XLA's CPU has one core, and no collectives."""

import os
import subprocess
import sys

import pytest
import torch

from tests.adapters.xla.support import ROOT, TOLERANCE, make_trainer, numbers, run_script, weights
from tests.support import processes
from tests.support.launchers import free_port

SCRIPT = """
import os, sys
from transformers import Trainer, TrainingArguments
from tests.support.small_models import make_plain, plain_data
args = TrainingArguments(sys.argv[1], max_steps=2, disable_tqdm=True, save_strategy="no", report_to="none")
trainer = Trainer(make_plain(), args, train_dataset=plain_data())
trainer.train()
print("device", args.device, args._rank_info.launcher, type(trainer).__module__, __name__)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("options", "status"), [(["--num-cores", "1"], 0), ([], 5)], ids=["one core", "all cores"])
def test_run_tpu_runs_the_script_and_returns_its_status(tmp_path, options, status):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_script("-m", "hftrainer", "run", "--tpu", *options, str(script), str(tmp_path), str(status))
    assert done.returncode == status, done.stderr[-3000:]
    assert "device xla:0 xla hftrainer.trainer __main__" in done.stdout


def test_more_cores_than_there_are_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    done = run_script("-m", "hftrainer", "run", "--tpu", "--num-cores", "4", str(script))
    assert done.returncode == 1 and "one core or all, and this machine has 1" in done.stderr


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    env = {**processes.environment(), "PJRT_LOCAL_PROCESS_COUNT": "2", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.xla.replicas", str(folder)],
            cwd=ROOT,
            env={**env, "PJRT_LOCAL_PROCESS_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said[0][-3000:] + said[1][-3000:]
    return folder, [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_processes_train_as_one(replicas, tmp_path):
    """Two times two samples in a step, as one process with four."""
    _, found = replicas
    evaluated = {"eval_strategy": "steps", "eval_steps": 6, "per_device_eval_batch_size": 3}
    one = make_trainer(tmp_path, "llama", samples=40, use_cpu=True, **evaluated)
    one.train()
    assert [each["place"]["launcher"] for each in found] == ["xla", "xla"]
    assert [each["place"]["rank"] for each in found] == [0, 1]
    assert found[0]["strategy"] == "XlaReplicas"
    compared = ("loss", "eval_loss", "grad_norm", "learning_rate")
    for line, expected in zip(found[0]["numbers"], numbers(one), strict=True):
        assert line.keys() == expected.keys()
        same = {key: value for key, value in expected.items() if key in compared}
        assert {key: line[key] for key in same} == pytest.approx(same, rel=2 * TOLERANCE)
    for name, value in weights(one).items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=0, atol=5 * TOLERANCE, msg=name)
        assert all(torch.equal(each["weights"][name], found[0]["weights"][name]) for each in found)
    predictions = torch.tensor(one.predict(one.eval_dataset).predictions)
    torch.testing.assert_close(found[1]["predictions"], predictions, rtol=1e-3, atol=1e-3)


def test_two_processes_save_and_resume(replicas):
    folder, found = replicas
    assert [each["should_save"] for each in found] == [True, False]
    names = set(os.listdir(folder / "checkpoint-6"))
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    for each in found:
        assert all(torch.equal(each["resumed"][name], value) for name, value in each["weights"].items())
