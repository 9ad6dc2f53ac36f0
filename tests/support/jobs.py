"""Starting, stopping and comparing the jobs of `job.py`."""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch

from tests.support import warm

JOB = Path(__file__).parents[1] / "reliability" / "job.py"
ENVIRONMENT = {**warm.environment(), "PYTHONUNBUFFERED": "1"}
#: Settings of a job whose ranks each write their part of a checkpoint.
SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def names(folder):
    """What is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def start(folder, **settings):
    """A job that is running."""
    return subprocess.Popen(
        [warm.PYTHON, str(JOB), str(folder), json.dumps(settings)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, as these tests may be, ignore Ctrl-C, and what they start would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_until(process, line):
    """Read the job's output until it prints a line; what it printed so far."""
    seen = []
    for printed in process.stdout:
        seen.append(printed.strip())
        if seen[-1] == line:
            return seen
    raise AssertionError(f"no {line!r} in {seen}: {process.stderr.read()}")


def finish(folder, **settings):
    """Run a job to its end; what it printed."""
    process = start(folder, **settings)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines(), err


class Forked:
    """A job in a process forked from one that has imported everything, so that fifty of them take little time."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("hftrainer_lightning.engine", "tests.reliability.job", "tests.reliability.search_job"),
            *("optuna.storages._rdb.storage", "sqlalchemy.dialects.sqlite"),
        ]
    )

    def __init__(self, folder, environment=None, job="job", **settings):
        environment = environment or {}
        self.folder, self.output = Path(folder), Path(f"{folder}.out{environment.get('RANK', '')}")
        self.output.write_text("")  # and not what an earlier one has printed
        arguments = (str(folder), settings, str(self.output), environment, job)
        self.process = self.context.Process(target=run_forked, args=arguments)
        self.process.start()

    def wait_for(self, word):
        """Wait until the job has printed a line that begins so."""
        while not (self.output.exists() and f"\n{word}" in f"\n{self.output.read_text()}"):
            assert self.process.is_alive(), self.output.read_text()
            time.sleep(0.005)

    def kill(self):
        """`kill -9`, and wait for the end."""
        self.process.kill()
        self.process.join()

    def finish(self):
        """Wait for the end; what the job printed."""
        self.process.join(timeout=120)
        printed = self.output.read_text()
        assert self.process.exitcode == 0, printed
        return printed.splitlines()


class Group:
    """The processes of one job, with the environment that torchrun gives them if there are several.

    Args:
        folder: of the run.
        count: how many.
        kill_at: for each, at which touch of its files it is killed; 0 for never.
        settings: of the job.
    """

    def __init__(self, folder, count=2, kill_at=(0, 0), **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        places = [{**shared, "MASTER_PORT": str(port), "GROUP_RANK": "0", "RANK": str(rank)} for rank in range(count)]
        self.jobs = [
            Forked(folder, {**place, "LOCAL_RANK": place["RANK"]} if count > 1 else None, kill_at=at, **settings)
            for place, at in zip(places, kill_at, strict=False)
        ]

    def end(self, seconds=120):
        """Wait for the end; when one process has ended by itself, end the others, as torchrun does. The statuses."""
        processes, deadline = [job.process for job in self.jobs], time.monotonic() + seconds
        while all(process.is_alive() for process in processes):
            time.sleep(0.01)
            if time.monotonic() > deadline:
                self._fail_as_hanging(seconds)
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
                process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in processes]

    def _fail_as_hanging(self, seconds):
        for job in self.jobs:
            os.kill(job.process.pid, signal.SIGUSR2)  # prints the stacks
        time.sleep(1)
        for job in self.jobs:
            job.kill()
        raise AssertionError(f"nothing has ended after {seconds} seconds: {self.printed()}")

    def printed(self):
        return [job.output.read_text() for job in self.jobs]


def run_forked(folder, settings, output, environment, job):
    """What the forked process does."""
    gc.freeze()  # a search collects garbage after each trial: not among all that was imported
    faulthandler.register(signal.SIGUSR2)  # says where it hangs
    multiprocessing.set_start_method("fork", force=True)  # as in a script, for the processes of loaders
    os.environ.update(environment)
    main = importlib.import_module(f"tests.reliability.{job}").main
    with open(output, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        main(folder, settings)


def weights(folder):
    """The final weights of a job."""
    return _final(folder)["weights"]


def log(folder):
    """What a job has logged from its first start on, without what is measured, and without the last line."""
    lines = [line for line in _final(folder)["log"] if "train_loss" not in line]  # which is of the last start
    measured = ("runtime", "per_second", "flos")
    return [{key: value for key, value in line.items() if not key.endswith(measured)} for line in lines]


def _final(folder):
    return torch.load(Path(folder) / "final.pt", weights_only=True)


def assert_same(ours, theirs):
    """Exactly the same weights."""
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
