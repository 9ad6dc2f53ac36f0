"""`n_jobs`: further processes that run the script again and take part in its search.

Lightning starts the processes of its DDP in the same way. Threads would share one random generator and one model.
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.errors import InvalidArgument, SearchFailed, UnsupportedArgument
from hftrainer.parallel.worker import WORKER

if TYPE_CHECKING:
    from optuna import Study

logger = logging.getLogger(__name__)

#: Seconds that workers have to write a checkpoint and end, when the search is interrupted.
_TO_END = 30.0
#: What a worker ends with when its search is over; with 0 its script has never come to the search.
_DONE = 64
#: User attribute of a study: the last search in it that a callback has stopped.
_STOPPED = "stopped"
_SECONDS_BETWEEN_LOOKS = 1.0
#: The searches with several jobs that this process has begun: the file of the storage made for them, and the study.
_begun: list[tuple[str | None, str]] = []


class Jobs:
    """The processes of one search, of which this is one: the script's own, or a worker that it has started.

    A script may search several times, and a worker takes part in one search: from those before it takes the result.

    Args:
        count: how many there are to be; -1 for one per GPU, or per core where there is none.
        folder: for the logs of the workers, and the storage where none is given.
        timeout: seconds that the search may take; None for no limit.

    Attributes:
        lost: whether a worker was killed, so that there may be trials left.

    Raises:
        InvalidArgument: for a count that cannot be.
        UnsupportedArgument: where there is no script that could be run again.
    """

    def __init__(self, count: Any, folder: str, timeout: float | None) -> None:
        if not isinstance(count, int) or (count < 1 and count != -1):
            raise InvalidArgument(f"n_jobs={count!r}: give a number from 1, or -1 for one per GPU or core.")
        self.lost = False
        self._folder = os.path.abspath(folder)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._said: set[int] = set()  # the workers whose end has been told
        self._told = json.loads(os.environ.get(WORKER, "null")) if count != 1 else None
        if self._told is not None:
            self.count, self._until, self._name = self._told["count"], self._told["until"], self._told["search"]
            return
        self.count = count if count > 0 else torch.cuda.device_count() or _cores()
        self._until = None if timeout is None else time.time() + timeout
        self._name = f"{os.getpid()}-{time.time()}"
        if self.count > 1 and (hasattr(sys, "ps1") or sys.argv[0] in ("", "-")):
            raise UnsupportedArgument(
                f"n_jobs={count} starts the script again, and a notebook or a console has none: put the search into a "
                "file, or leave n_jobs out."
            )

    @property
    def is_worker(self) -> bool:
        """Whether another process has begun the search, and made the study."""
        return self._told is not None

    @property
    def is_over(self) -> bool:
        """Whether this is a worker that was started for a later search."""
        return self._told is not None and len(_begun) < len(self._told["studies"])

    def left(self) -> float | None:
        """Seconds that the search may still take; None for no limit."""
        return None if self._until is None else self._until - time.time()

    def sharing(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `create_study` with which all processes come to the same study."""
        if self.count == 1:
            return options
        file, name = self._told["studies"][len(_begun)] if self._told is not None else (None, None)
        if options.get("storage") is None:
            file = file or os.path.join(self._folder, "search.journal")
            options = {**options, "storage": _journal(file)}
        elif _is_in_memory(options["storage"]):
            raise UnsupportedArgument(
                f"n_jobs={self.count}: processes cannot share storage={options['storage']!r}, which is in memory: "
                "leave it out, and a file is made."
            )
        if name is not None:
            options = {**options, "study_name": name}
        self._file = file
        return options

    def opened(self, study_name: str) -> None:
        """Note that the study is there."""
        if self.count > 1:
            _begun.append((self._file, study_name))

    @contextmanager
    def at_work(self, left: int | None) -> Iterator[None]:
        """Let the workers take part, and wait for them; a worker ends here.

        Args:
            left: trials to be done; no more processes are started. None for no end.

        Raises:
            SearchFailed: when a worker has failed.
            SystemExit: in a worker, when there is nothing left for it to do.
        """
        if self._told is not None:
            _follow(self._told["script"])
            yield
            raise SystemExit(_DONE)
        threads = torch.get_num_threads()
        number = self.count if left is None else min(self.count, left)
        self._workers = [self._start(each) for each in range(1, number)]
        if self._workers:
            torch.set_num_threads(max(1, threads // number))
        try:
            yield
            for worker in self._workers:
                worker.wait()
            self.look_after_workers()
        finally:
            _end(self._workers)
            if self._workers:
                torch.set_num_threads(threads)

    def look_after_workers(self) -> None:
        """Say what has become of workers that have ended.

        Raises:
            SearchFailed: when one has failed, as the search would have in this process.
        """
        for number, worker in enumerate(self._workers, 1):
            status = worker.poll()
            if status is None or status == _DONE or number in self._said:
                continue
            self._said.add(number)
            where = f"Worker {number} of n_jobs={self.count}"
            log = f"see {self._log(number)}. {self._last_words(number)}"
            if status > 0:
                raise SearchFailed(f"{where} has failed: {log}")
            self.lost = True
            if status < 0:
                logger.warning("%s was killed by signal %d: %s", where, -status, log)
            else:
                logger.warning("%s has ended without having come to the search: %s", where, log)

    def stop(self, study: Study) -> None:
        """Note that a callback has stopped the search, for the other processes."""
        study.set_user_attr(_STOPPED, self._name)

    def is_stopped(self, study: Study) -> bool:
        """Whether a callback has stopped the search, in this process or another."""
        return self.count > 1 and study.user_attrs.get(_STOPPED) == self._name

    def _last_words(self, number: int) -> str:
        with open(self._log(number), encoding="utf-8", errors="replace") as log:
            lines = [line for line in log if line.strip()]
        return lines[-1].strip() if lines else ""

    def _log(self, number: int) -> str:
        return os.path.join(self._folder, f"worker-{number}.log")

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        os.makedirs(self._folder, exist_ok=True)
        told = {
            "studies": _begun,
            "until": self._until,
            "script": os.getpid(),
            "count": self.count,
            "search": self._name,
        }
        environment = {**os.environ, WORKER: json.dumps(told), **_share_of_machine(number, self.count)}
        with open(self._log(number), "wb") as log:
            # A session of its own, so that Ctrl-C reaches the script alone, which then ends the workers in order.
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


def _share_of_machine(number: int, count: int) -> dict[str, str]:
    """Variables that give a worker a GPU of its own, where there are several, and its share of the cores."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(gpu) for gpu in range(torch.cuda.device_count())]
    cores = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // count)))
    alone = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
    return {"OMP_NUM_THREADS": cores, **alone}


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command() -> list[str]:
    """What this process was started with; the script by its whole path, for it may have changed its folder since."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    words = [os.path.abspath(script) if script and word == sys.argv[0] else word for word in sys.orig_argv[1:]]
    return [sys.executable, *words]


def _is_in_memory(storage: Any) -> bool:
    if isinstance(storage, str):
        return storage.startswith("sqlite") and (storage.endswith("://") or ":memory:" in storage)
    return type(storage).__name__ == "InMemoryStorage"


def _follow(script: int) -> None:
    """End with the script, however that ends; a trial under way is saved as by any signal."""

    def watch() -> None:
        while os.getppid() == script:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="follow-script", daemon=True).start()


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """End the workers that are still running, when the search was interrupted."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.terminate()
    deadline = time.monotonic() + _TO_END
    for worker in running:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
