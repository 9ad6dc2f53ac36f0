"""Starting, stopping and comparing the jobs of tests/reliability: `job.py`, `search_job.py`, `hang_job.py`."""

import json
import os
import re
import signal
import time
from multiprocessing import connection
from pathlib import Path

import torch

from tests.support import processes
from tests.support.launchers import free_port
from tests.support.parity import assert_same_weights as assert_same

__all__ = ["JOB", "SHARDED", "Job", "JobGroup", "assert_same", "final_log", "final_weights", "let_go"]
__all__ += ["names_in", "read_until"]
JOB = Path(__file__).parents[1] / "reliability" / "job.py"
#: Settings of a job whose ranks each write their shard of a checkpoint.
SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def read_until(process, line):
    """Read a process's output until it prints a line; what it printed so far."""
    seen = []
    for printed in process.stdout:
        seen.append(printed.strip())
        if seen[-1] == line:
            return seen
    raise AssertionError(f"no {line!r} in {seen}: {process.stderr.read()}")


def let_go(folder):
    """Let the jobs continue that wait at `waits_at`; until the file is closed, none waits there again."""
    return open(f"{folder}.go", "w")


class Job:
    """A job, a module of tests/reliability, in a process of its own; the file `output` has all that it prints."""

    def __init__(self, folder, environment=None, job="job", **settings):
        words = ["-m", f"tests.reliability.{job}", folder, json.dumps(settings)]
        env = {**processes.environment(), **(environment or {})}
        self._started = processes.start(*words, env=env, merge=True)
        self.output, self.process = self._started.errors, self._started.process

    def wait_for(self, pattern):
        """Wait until the job has printed a line that begins with the regular expression `pattern`."""
        while not re.search(f"^{pattern}", self.output.read_text(), re.MULTILINE):
            assert self.process.is_alive(), self.output.read_text()
            time.sleep(0.005)

    def kill(self):
        self._started.kill()

    def finish(self):
        """Wait for the end, which is a success; the lines that the job has printed."""
        self.process.join()
        printed = self.output.read_text()
        assert self.process.exitcode == 0, printed
        return printed.splitlines()


class JobGroup:
    """The processes of one job, with the environment of a launcher if there are several: rank 0 has the store.

    Each is killed at the touch of its files that `kill_at` says, at 0 never.
    """

    def __init__(self, folder, count=2, kill_at=(0, 0), **settings):
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        places = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        if settings.get("waits_at"):
            os.mkfifo(f"{folder}.go")
        self.jobs = [
            Job(folder, place if count > 1 else None, kill_at=at, **settings)
            for place, at in zip(places, kill_at, strict=False)
        ]

    def wait_for(self, pattern):
        for job in self.jobs:
            job.wait_for(pattern)

    def end(self, seconds=None):
        """Wait for the end; when one process has failed, end the others as torchrun does. The statuses.

        If none has ended after so many seconds, all print their stacks and fail.
        """
        running = [job.process for job in self.jobs]
        if not connection.wait([process.sentinel for process in running], seconds):
            for process in running:
                os.kill(process.pid, signal.SIGABRT)  # faulthandler prints the stacks
                process.join()
            raise AssertionError(f"nothing has ended after {seconds} seconds: {self.printed()}")
        statuses = [process.exitcode for process in running if process.exitcode is not None]
        has_failed = any(status < 0 or 0 < status < 128 for status in statuses)  # others end soon, unless they hang
        for process in running:
            for end in (process.terminate, process.kill):
                process.join(timeout=5 if has_failed else 300)
                end()
            process.join()
        return [process.exitcode for process in running]

    def printed(self):
        return [job.output.read_text() for job in self.jobs]


def final_weights(folder):
    return _final(folder)["weights"]


def final_log(folder):
    """What a job has logged since its first start, without what is measured and without the last line's mean loss."""
    lines = [line for line in _final(folder)["log"] if "train_loss" not in line]  # which is of the last start
    measured = ("runtime", "per_second", "flos")
    return [{key: value for key, value in line.items() if not key.endswith(measured)} for line in lines]


def _final(folder):
    return torch.load(Path(folder) / "final.pt", weights_only=True)
