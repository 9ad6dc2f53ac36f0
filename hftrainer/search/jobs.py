"""`n_jobs`: worker processes that run the script again and train trials of the same study.

Lightning starts the processes of its DDP in the same way. Optuna's own `n_jobs` starts threads, which would share one
random generator and one model.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.parallel.environment import WORKER

if TYPE_CHECKING:
    from optuna import Study

logger = logging.getLogger(__name__)

#: Exit status of a worker whose search has ended. A script that never reaches the search exits with 0.
_SEARCH_DONE = 64
#: User attribute of a study: the last search that was stopped before it had all trials.
_STOPPED = "stopped"
#: When the search is interrupted, a worker has this long to write a checkpoint and exit.
_SECONDS_TO_EXIT = 30.0
_SECONDS_BETWEEN_CHECKS = 1.0
#: The searches with several jobs that this process has started: the journal file, if we made one, and the study's name.
_searches: list[tuple[str | None, str]] = []


class Jobs:
    """The processes of one search: the script's own process, and the workers that it starts.

    A script may search several times. A worker takes part in one search, and only reads the results of earlier ones.

    Args:
        count: number of processes; -1 for one per GPU, or one per core if there is no GPU.
        folder: folder of the workers' logs, and of the storage if the user gives none.
        timeout: time limit of the search in seconds; None for no limit.

    Attributes:
        is_worker: whether this process is a worker, so that the script has already created the study.
        lost_worker: whether a worker was killed, so that trials may be left.

    Raises:
        InvalidArgument: if `count` is not a positive integer or -1.
        UnsupportedArgument: in a notebook or a console, where there is no script to run again.
    """

    def __init__(self, count: Any, folder: str, timeout: float | None) -> None:
        if not isinstance(count, int) or (count < 1 and count != -1):
            raise InvalidArgument(f"n_jobs={count!r}: give a positive integer, or -1 for one job per GPU or core.")
        self.lost_worker = False
        self._folder = os.path.abspath(folder)
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._assignment = json.loads(os.environ.get(WORKER, "null")) if count != 1 else None
        self.is_worker = self._assignment is not None
        if self._assignment is not None:
            self.count, self._deadline, self._name = (self._assignment[key] for key in ("count", "deadline", "search"))
            return
        self.count = count if count > 0 else torch.cuda.device_count() or _cores()
        self._deadline = None if timeout is None else time.time() + timeout
        self._name = f"{os.getpid()}-{time.time()}"
        if self.count > 1 and (hasattr(sys, "ps1") or sys.argv[0] in ("", "-")):
            raise UnsupportedArgument(
                f"n_jobs={count} runs the script again, and a notebook or a console has no script. Move the search "
                "into a file, or leave n_jobs out."
            )

    @property
    def is_finished(self) -> bool:
        """Whether this process is a worker that the script started for a later search."""
        return self._assignment is not None and len(_searches) < len(self._assignment["searches"])

    def seconds_left(self) -> float | None:
        """How long the search may still take; None for no limit."""
        return None if self._deadline is None else self._deadline - time.time()

    def study_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Complete the options of `create_study` so that all processes open the same study.

        Raises:
            UnsupportedArgument: if the storage is in memory.
        """
        if self.count == 1:
            return options
        file, name = self._assignment["searches"][len(_searches)] if self._assignment is not None else (None, None)
        if options.get("storage") is None:
            file = file or os.path.join(self._folder, "search.journal")
            options = {**options, "storage": _journal(file)}
        elif _is_in_memory(options["storage"]):
            raise UnsupportedArgument(
                f"n_jobs={self.count}: storage={options['storage']!r} is in memory, and processes cannot share it. "
                "Leave storage out to use a file."
            )
        if name is not None:
            options = {**options, "study_name": name}
        self._file = file
        return options

    def register(self, study_name: str) -> None:
        """Remember the study, so that workers of later searches can open it."""
        if self.count > 1:
            _searches.append((self._file, study_name))

    @contextmanager
    def running(self, remaining: int | None) -> Iterator[None]:
        """Start the workers before the block and wait for them after it. A worker exits after the block.

        Args:
            remaining: number of trials that are left, which limits the number of workers; None for no limit.

        Raises:
            SearchFailed: if a worker failed.
            SystemExit: in a worker.
        """
        if self._assignment is not None:
            _exit_with_script(self._assignment["script"])
            yield
            raise SystemExit(_SEARCH_DONE)
        threads = torch.get_num_threads()
        count = self.count if remaining is None else min(self.count, remaining)
        self._workers = {number: self._start(number) for number in range(1, count)}
        if self._workers:
            torch.set_num_threads(max(1, threads // count))
        try:
            yield
            for worker in self._workers.values():
                worker.wait()
            self.check_workers()
        finally:
            _terminate(self._workers.values())
            torch.set_num_threads(threads)

    def check_workers(self) -> None:
        """Log each worker that was killed.

        Raises:
            SearchFailed: if a worker failed, since the same error in this process would end the search.
        """
        for number, worker in list(self._workers.items()):
            status = worker.poll()
            if status is None or status == _SEARCH_DONE:
                continue
            del self._workers[number]
            name = f"Worker {number} of n_jobs={self.count}"
            log = f"See {self._log(number)}. Its last line: {self._last_line(number)}"
            if status > 0:
                raise SearchFailed(f"{name} failed. {log}")
            self.lost_worker = True
            if status < 0:
                logger.warning("%s was killed by signal %d. %s", name, -status, log)
            else:
                logger.warning("%s exited before it reached the search. %s", name, log)

    def stop(self, study: Study) -> None:
        """Tell the other processes to stop, since a callback has stopped the search or the time is up."""
        if self.count > 1:
            study.set_user_attr(_STOPPED, self._name)

    def is_stopped(self, study: Study) -> bool:
        """Whether any process has stopped the search."""
        return self.count > 1 and study.user_attrs.get(_STOPPED) == self._name

    def _last_line(self, number: int) -> str:
        with open(self._log(number), encoding="utf-8", errors="replace") as log:
            lines = [line for line in log if line.strip()]
        return lines[-1].strip() if lines else ""

    def _log(self, number: int) -> str:
        return os.path.join(self._folder, f"worker-{number}.log")

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        os.makedirs(self._folder, exist_ok=True)
        assignment = {
            "searches": _searches,
            "deadline": self._deadline,
            "script": os.getpid(),
            "count": self.count,
            "search": self._name,
        }
        environment = {**os.environ, WORKER: json.dumps(assignment), **_resources(number, self.count)}
        with open(self._log(number), "wb") as log:
            # With a session of its own, the worker gets no Ctrl-C. The script gets it, and terminates the workers.
            return subprocess.Popen(
                _command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _journal(file: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    os.makedirs(os.path.dirname(file), exist_ok=True)
    return JournalStorage(JournalFileBackend(file))


def _resources(number: int, count: int) -> dict[str, str]:
    """Environment variables that give a worker one of several GPUs, and its share of the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // count)))
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
    return {"OMP_NUM_THREADS": threads, **gpu}


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command() -> list[str]:
    """The command line of this process. The script's path is absolute, since the working directory may have changed."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    words = [os.path.abspath(script) if script and word == sys.argv[0] else word for word in sys.orig_argv[1:]]
    return [sys.executable, *words]


def _is_in_memory(storage: Any) -> bool:
    if isinstance(storage, str):
        return storage.startswith("sqlite") and (storage.endswith("://") or ":memory:" in storage)
    return type(storage).__name__ == "InMemoryStorage"


def _exit_with_script(script: int) -> None:
    """Send this worker SIGTERM when the script ends, even if it is killed. SIGTERM saves the running trial."""

    def watch() -> None:
        while os.getppid() == script:
            time.sleep(_SECONDS_BETWEEN_CHECKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="exit-with-script", daemon=True).start()


def _terminate(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    """Terminate the workers that are still running, and kill those that do not exit in time."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.terminate()
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    for worker in running:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
