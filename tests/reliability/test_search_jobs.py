"""`n_jobs`: a worker has a copy of the Trainer, and both processes train trials of one study."""

import json
import os
import pickle
import signal
import threading
from contextlib import contextmanager
from multiprocessing import connection

import optuna
import pytest
import torch

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.search import workers
from tests.reliability.search_job import rate
from tests.support.checkpoints import make_trainer
from tests.support.small_models import make_plain


@pytest.fixture
def start(processes, tmp_path):
    def start_script(n_trials, mode="once"):
        os.mkfifo(tmp_path / "together")
        words = ["-m", "tests.reliability.jobs_script", tmp_path, n_trials, mode]
        script = processes.start(*words, cwd=tmp_path, env={**processes.environment(), "OMP_NUM_THREADS": "1"})
        line = script.stdout.readline()
        assert line.startswith("worker "), script.communicate()
        return script, int(line.split()[1])

    return start_script


def read_found(text):
    return [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("found")]


def test_script_and_worker_share_the_trials_of_two_searches(tmp_path, start):
    script, worker = start(8, "twice")
    output, errors = script.communicate()
    assert script.returncode == 0, errors
    (best, trials), (second, others) = read_found(output)
    assert [number for number, _, _ in trials] == list(range(8))
    assert {state for _, state, _ in trials} == {"COMPLETE"}
    assert {process for _, _, process in trials} == {script.pid, worker}
    assert 0 <= int(best) < 8
    assert [(number, state) for number, state, _ in others] == [(0, "COMPLETE"), (1, "COMPLETE")]
    best_there = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/second.db").best_trial
    assert second == str(best_there.number)


def test_trial_of_a_killed_worker_is_tried_again(start):
    script, worker = start(4, "waits")
    os.kill(worker, signal.SIGKILL)
    output, errors = script.communicate()
    assert script.returncode == 0, errors
    ((_, trials),) = read_found(output)
    assert [process for _, state, process in trials if state == "FAIL"] == [worker]
    assert sum(state == "COMPLETE" for _, state, _ in trials) == 4
    assert "Worker 1 of n_jobs was killed by signal 9. See " in errors


@pytest.mark.parametrize("mode", ["stops", "fails"])
def test_stop_or_error_in_a_worker_ends_the_search(start, mode):
    script, worker = start(1000, mode)
    output, errors = script.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert script.returncode == (mode == "fails"), errors
    if mode == "stops":
        ((_, trials),) = read_found(output)
        assert 2 <= len(trials) < 1000
    else:
        assert "SearchFailed: Worker 1 of n_jobs failed. See " in errors
        assert "KeyError: 'in the worker'" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=repr)
def test_workers_end_with_the_script(start, number):
    """At Ctrl-C the script ends them; when it is killed, they notice."""
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


@pytest.fixture
def search(tmp_path):
    trainer = make_trainer(tmp_path, trainer={"model_init": make_plain}, max_steps=1, save_strategy="no")

    def search(**keywords):
        return trainer.hyperparameter_search(rate, **keywords)

    search.trainer = trainer
    return search


@pytest.mark.parametrize("count", [0, -2, 1.5, "2"])
def test_wrong_n_jobs_is_refused(search, count):
    with pytest.raises(InvalidArgument, match=f"n_jobs={count!r} must be a positive integer, or -1"):
        search(n_jobs=count)


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:", optuna.storages.InMemoryStorage()])
def test_storage_in_memory_is_refused(search, storage):
    with pytest.raises(UnsupportedArgument, match="is in memory, so processes cannot share it"):
        search(n_jobs=2, storage=storage)


def test_n_jobs_beside_a_launcher_is_refused(search, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    words = r"a launcher has started several processes\. Start the script without"
    with pytest.raises(UnsupportedArgument, match=words):
        search(n_jobs=2)


@pytest.mark.parametrize(("seconds", "states"), [(None, ["COMPLETE"] * 3), (1e-9, [])])
def test_worker_trains_the_trials_that_are_left_in_time(search, tmp_path, monkeypatch, seconds, states):
    @contextmanager
    def run_workers(workers, count, function):
        found.append(count)
        pickle.loads(pickle.dumps(function))()
        found.append([trial.state.name for trial in optuna.load_study(**study).trials])
        yield

    found, study = [], {"study_name": "a", "storage": f"sqlite:///{tmp_path}/search.db"}
    monkeypatch.setattr(workers.SearchWorkers, "run_workers", run_workers)
    search_kwargs = {"n_jobs": 2, "n_trials": 3, "timeout": seconds, **study}
    if seconds is None:
        assert search(**search_kwargs).run_id in ("0", "1", "2")
    else:
        with pytest.raises(SearchFailed, match="no trial was started"):
            search(**search_kwargs)
    assert found == [2, states]


def test_what_cannot_be_pickled_is_named(search):
    for callbacks, name in (([threading.Lock()], "The search's options"), ([], "Trainer.lock")):
        with pytest.raises(InvalidArgument, match=rf"^{name} cannot be pickled for the processes of the search \("):
            search(n_trials=3, n_jobs=2, callbacks=callbacks)
        search.trainer.lock = threading.Lock()


def test_each_worker_has_a_gpu_and_a_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(workers.devices, "cpu_count", lambda: 8)
    assert workers._resources(1, 3) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [workers._resources(n, 3)["CUDA_VISIBLE_DEVICES"] for n in (1, 2)] == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert workers._resources(1, 2)["CUDA_VISIBLE_DEVICES"] == "6"
    assert workers.number_of_jobs(-1) == 2


def test_one_job_starts_no_worker(search, tmp_path):
    search(n_trials=1, n_jobs=1)
    assert not list(tmp_path.glob("worker-*")) and not list(tmp_path.glob("search.journal"))
