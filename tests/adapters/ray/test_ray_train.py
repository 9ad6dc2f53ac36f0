"""Ray Train around a Trainer: two workers, its report callback, one that is killed, and data of Ray."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import ray.data
import ray.train
from ray.train.torch import TorchTrainer

from tests.adapters.ray.train_worker import train, train_alone
from tests.support.page_blocks import ROOT, run_page
from tests.support.small_models import plain_data


def fit(folder, datasets=None, workers=2, **config):
    folder.mkdir(exist_ok=True)
    scaling = ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5})
    once = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(name="run", storage_path=str(folder / "ray"), failure_config=once)
    given = {"folder": str(folder), **config}
    trainer = TorchTrainer(train, train_loop_config=given, scaling_config=scaling, run_config=run, datasets=datasets)
    return trainer.fit(), [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"))


def test_two_workers_train_the_weights_of_two_ranks(undisturbed, tmp_path, processes):
    """Ray gets each checkpoint with its metrics."""
    result, workers = undisturbed
    assert [worker["place"] for worker in workers] == [[2, 0], [2, 1]]
    assert workers[0]["weights"] == workers[1]["weights"]
    assert result.metrics["step"] == 8
    assert {"eval_loss", "loss", "learning_rate"} <= result.metrics.keys()
    with result.checkpoint.as_directory() as path:
        state = json.loads(Path(path, "checkpoint", "trainer_state.json").read_text())
    assert state["global_step"] == 8
    assert processes.run_ranks(train_alone, 2, tmp_path) == [worker["weights"] for worker in workers]


def test_killed_worker_resumes_to_the_undisturbed_weights(undisturbed, tmp_path):
    """Ray restarts both from the last checkpoint that it got."""
    _, expected = undisturbed
    result, workers = fit(tmp_path / "run", falls_at=5)
    assert (tmp_path / "run" / "fallen").exists()
    assert all(worker["from"] for worker in workers)
    assert result.metrics["step"] == 8
    assert [worker["weights"] for worker in workers] == [worker["weights"] for worker in expected]
    assert workers[0]["logs"] == expected[0]["logs"]


def test_elastic_run_continues_with_one_worker(tmp_path):
    """The losses of each step are those of two workers."""
    given = {"settings": {"elastic": True}, "dropout": 0.0, "resume": "auto"}
    _, (whole, _) = fit(tmp_path / "whole", **given)
    fit(tmp_path / "run", stops_at=4, **given)
    shutil.rmtree(tmp_path / "run" / "ray")  # a new job, with the same output folder
    _, (alone,) = fit(tmp_path / "run", workers=1, **given)
    losses, expected = ([line["loss"] for line in each["logs"]] for each in (alone, whole))
    assert losses[:4] == expected[:4]
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)  # up to the order of additions, in float32


def test_code_of_the_guide_runs(processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    run_page(ROOT / "docs" / "guides" / "ray.md", processes)


def test_each_worker_reads_its_shard_of_ray_data(tmp_path):
    rows = [{"x": row["x"].numpy(), "labels": int(row["labels"])} for row in plain_data(40)]
    datasets = {"train": ray.data.from_items(rows * 2), "eval": ray.data.from_items(rows[:8])}
    result, workers = fit(tmp_path / "run", datasets, shards=True)
    assert result.metrics["step"] == 8
    assert workers[0]["weights"] == workers[1]["weights"]
    assert len(workers[0]["logs"]) == 8
