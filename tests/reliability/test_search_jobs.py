"""`n_jobs`: the script is started again, and both processes train trials of one study."""

import json
import os
import signal
import sys
import time
from multiprocessing import connection

import optuna
import pytest
import torch

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.search import jobs
from hftrainer.search.jobs import WORKER, Jobs
from tests.reliability.search_job import rate
from tests.support.checkpoints import make_trainer
from tests.support.tiny import make_plain

# ---- In processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(processes, tmp_path):
    """Starts the script; returns it once both processes train, and the number of its worker."""

    def start_script(n_trials, mode="once"):
        os.mkfifo(tmp_path / "together")
        words = ["-m", "tests.reliability.jobs_script", tmp_path, n_trials, mode]
        script = processes.start(*words, cwd=tmp_path, env={**processes.environment(), "OMP_NUM_THREADS": "1"})
        line = script.stdout.readline()
        assert line.startswith("worker "), script.communicate()
        return script, int(line.split()[1])

    return start_script


def found(text):
    """What a process has printed of each search: the best trial, and all of them."""
    return [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("found")]


def test_two_searches(tmp_path, start):
    script, worker = start(8, "twice")
    output, errors = script.communicate()
    assert script.returncode == 0, errors
    (best, trials), (second, others) = found(output)
    assert [number for number, _, _ in trials] == list(range(8))
    assert {state for _, state, _ in trials} == {"COMPLETE"}
    assert {process for _, _, process in trials} == {script.pid, worker}
    assert 0 <= int(best) < 8
    assert [(number, state) for number, state, _ in others] == [(0, "COMPLETE"), (1, "COMPLETE")]
    best_there = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/second.db").best_trial
    assert second == str(best_there.number)
    log = (tmp_path / "out" / "worker-1.log").read_text()  # of the second search: it takes over what the first found
    assert found(log) == [[best, trials]]


def test_a_worker_that_is_killed(start):
    script, worker = start(4, "waits")
    os.kill(worker, signal.SIGKILL)
    output, errors = script.communicate()
    assert script.returncode == 0, errors
    ((_, trials),) = found(output)
    assert [process for _, state, process in trials if state == "FAIL"] == [worker]
    assert sum(state == "COMPLETE" for _, state, _ in trials) == 4
    assert "Worker 1 of n_jobs=2 was killed by signal 9. See " in errors


@pytest.mark.parametrize("mode", ["stops", "fails"])
def test_ended_in_a_worker(start, mode):
    """A callback of the worker stops the whole search; so does an error, which the script tells."""
    script, worker = start(1000, mode)
    output, errors = script.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert script.returncode == (mode == "fails"), errors
    if mode == "stops":
        ((_, trials),) = found(output)
        assert 2 <= len(trials) < 1000
    else:
        assert "SearchFailed: Worker 1 of n_jobs=2 failed. See " in errors
        assert "KeyError: 'in the worker'" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_script(start, number):
    """Killed, it tells them nothing; at Ctrl-C it ends them first."""
    script, worker = start(1000)
    ended = os.pidfd_open(worker)
    script.send_signal(number)
    output, errors = script.communicate()
    assert script.returncode == -number
    if number == signal.SIGINT:
        assert connection.wait([ended], timeout=0)
        assert "found" not in output
        assert "KeyboardInterrupt" in errors
    connection.wait([ended])
    os.close(ended)


# ---- In this process -------------------------------------------------------------------------------------------------


@pytest.fixture
def search(tmp_path):
    """Searches with a Trainer of one step."""
    trainer = make_trainer(tmp_path, trainer={"model_init": make_plain}, max_steps=1, save_strategy="no")

    def search(**keywords):
        return trainer.hyperparameter_search(rate, **keywords)

    search.trainer = trainer
    return search


@pytest.mark.parametrize("count", [0, -2, 1.5, "2"])
def test_no_number_of_jobs(search, count):
    with pytest.raises(InvalidArgument, match=f"n_jobs={count!r}: give a positive integer, or -1"):
        search(n_jobs=count)


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:", optuna.storages.InMemoryStorage()])
def test_storage_that_processes_cannot_share(search, storage):
    with pytest.raises(UnsupportedArgument, match="is in memory, and processes cannot share it"):
        search(n_jobs=2, storage=storage)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((sys, "argv"), ["-"], "a notebook or a console has no script"),
        ((sys, "ps1"), ">>> ", "a notebook or a console has no script"),
        ((TrainingArguments, "world_size"), 2, "has started several processes. Start the script without a launcher"),
    ],
)
def test_refused(search, monkeypatch, place, value, message):
    monkeypatch.setattr(*place, value, raising=False)
    with pytest.raises(UnsupportedArgument, match=message):
        search(n_jobs=2)


def test_a_worker_does_not_train_outside_the_search(search, monkeypatch):
    monkeypatch.setenv(WORKER, as_worker())
    for train in (search.trainer.train, search):
        with pytest.raises(UnsupportedArgument, match=r"before this search\. Put the search with n_jobs first"):
            train()


@pytest.mark.parametrize("count", [2, -1])
def test_a_worker_ends_after_its_search(search, tmp_path, monkeypatch, count):
    """Also where it sees one GPU of several, and would count one job."""
    storage = f"sqlite:///{tmp_path}/search.db"
    study = optuna.create_study(study_name="mine", storage=storage)
    monkeypatch.setattr(jobs, "_searches", [])
    monkeypatch.setattr(jobs, "_exit_with_script", lambda script: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(WORKER, as_worker(searches=[[None, "mine"]], deadline=time.time() - 1))
    with pytest.raises(SystemExit) as ended:
        search(n_trials=3, n_jobs=count, storage=storage, timeout=1000)
    assert ended.value.code == jobs._SEARCH_DONE
    assert study.trials == []  # the time was up: the script tells it


def as_worker(**told):
    """The assignment of a worker."""
    return json.dumps({"search": "a", "searches": [], "deadline": None, "count": 2, "script": os.getppid(), **told})


def test_each_worker_has_a_gpu_and_a_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(jobs, "_cores", lambda: 8)
    assert jobs._resources(1, 3) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [jobs._resources(n, 3)["CUDA_VISIBLE_DEVICES"] for n in (1, 2)] == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert jobs._resources(1, 2)["CUDA_VISIBLE_DEVICES"] == "6"
    assert Jobs(-1, "x", None).count == 2


def test_one_job_starts_nothing(search, tmp_path):
    search(n_trials=1, n_jobs=1)
    assert not list(tmp_path.glob("worker-*")) and not list(tmp_path.glob("search.journal"))
