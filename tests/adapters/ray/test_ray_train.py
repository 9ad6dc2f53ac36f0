"""Ray Train around a Trainer: two workers, its report callback, one that is killed, and data of Ray."""

import json
import os
import sys
from pathlib import Path

import pytest
import ray.data
import ray.train
from ray.train.torch import TorchTrainer

from tests.adapters.ray.trains import train
from tests.docs import test_pages
from tests.support.launching import TORCHRUN, python
from tests.support.tiny import plain_data


def fit(folder, datasets=None, **config):
    """Train with two workers; Ray's result, and what each worker has found."""
    folder.mkdir(exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
        datasets=datasets,
    ).fit()
    return result, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"))


ALONE = """
import json, sys, torch
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import make_plain, plain_data
torch.set_num_threads(1)
args = TrainingArguments(sys.argv[1], max_steps=8, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
    use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no", eval_strategy="steps", eval_steps=2)
trainer = Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(8))
trainer.train()
with open(f"{sys.argv[1]}.json", "w") as file:
    json.dump({name: value.tolist() for name, value in trainer.model.state_dict().items()}, file)
"""


def test_two_workers(undisturbed, tmp_path):
    """They train the weights of two processes under torchrun, and Ray gets each checkpoint with its metrics."""
    result, workers = undisturbed
    assert [worker["place"] for worker in workers] == [[2, 0], [2, 1]]
    assert workers[0]["weights"] == workers[1]["weights"]
    assert result.metrics["step"] == 8
    assert {"eval_loss", "loss", "learning_rate"} <= result.metrics.keys()
    with result.checkpoint.as_directory() as path:
        state = json.loads(Path(path, "checkpoint", "trainer_state.json").read_text())
    assert state["global_step"] == 8
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    run = python(*TORCHRUN, str(script), str(tmp_path / "out"))
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads((tmp_path / "out.json").read_text()) == workers[0]["weights"]


def test_a_worker_is_killed(undisturbed, tmp_path):
    """Ray starts both again, from the last checkpoint that it was given: the undisturbed weights."""
    _, expected = undisturbed
    result, workers = fit(tmp_path / "run", falls_at=5)
    assert (tmp_path / "run" / "fallen").exists()
    assert all(worker["from"] for worker in workers)
    assert result.metrics["step"] == 8
    assert [worker["weights"] for worker in workers] == [worker["weights"] for worker in expected]
    assert workers[0]["logs"] == expected[0]["logs"]


def test_the_guide(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    test_pages.test_blocks(test_pages.ROOT / "docs" / "guides" / "ray.md", tmp_path, monkeypatch)


def test_data_of_ray(tmp_path):
    """`prepare_trainer` reads iterators of Ray Data: each worker its shard."""
    rows = [{"x": row["x"].numpy(), "labels": int(row["labels"])} for row in plain_data(40)]
    datasets = {"train": ray.data.from_items(rows * 2), "eval": ray.data.from_items(rows[:8])}
    result, workers = fit(tmp_path / "run", datasets, shards=True)
    assert result.metrics["step"] == 8
    assert workers[0]["weights"] == workers[1]["weights"]
    assert len(workers[0]["logs"]) == 8
