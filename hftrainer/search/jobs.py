"""`n_jobs`: further processes that run the script again and take part in its search.

Lightning starts the processes of its DDP in the same way. Threads would share one random generator and one model.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hftrainer.errors import InvalidArgument, UnsupportedArgument

logger = logging.getLogger(__name__)

#: Environment variable that tells a worker what to take part in, as JSON: see `Jobs`.
WORKER = "HFTRAINER_SEARCH_WORKER"
#: Seconds that workers have to write a checkpoint and end, when the search is interrupted.
_TO_END = 30.0
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
        failed: whether a worker has ended before its time.

    Raises:
        InvalidArgument: for a count that cannot be.
        UnsupportedArgument: where there is no script that could be run again.
    """

    def __init__(self, count: Any, folder: str, timeout: float | None) -> None:
        if not isinstance(count, int) or (count < 1 and count != -1):
            raise InvalidArgument(f"n_jobs={count!r}: give a number from 1, or -1 for one per GPU or core.")
        self.failed = False
        self.count = count if count > 0 else torch.cuda.device_count() or os.cpu_count() or 1
        self._folder = os.path.abspath(folder)
        self._told = json.loads(os.environ.get(WORKER, "null")) if self.count > 1 else None
        self._until = None if timeout is None else time.time() + timeout
        if self._told is not None and self._told["until"] is not None:
            self._until = self._told["until"]
        if self.count > 1 and self._told is None and hasattr(sys, "ps1"):
            raise UnsupportedArgument(
                f"n_jobs={count} starts the script again, and a notebook or a console has none: put the search into a "
                "file, or leave n_jobs out."
            )

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
        elif type(options["storage"]).__name__ == "InMemoryStorage":
            raise UnsupportedArgument(f"n_jobs={self.count}: processes cannot share an InMemoryStorage: leave it out.")
        if name is not None:
            options = {**options, "study_name": name, "load_if_exists": True}
        self._file = file
        return options

    def opened(self, study_name: str) -> None:
        """Note that the study is there."""
        if self.count > 1:
            _begun.append((self._file, study_name))

    def is_orphan(self) -> bool:
        """Whether this is a worker whose script has ended."""
        return self._told is not None and os.getppid() != self._told["script"]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the workers take part, and wait for them; a worker ends here.

        Raises:
            SystemExit: in a worker, when there is nothing left for it to do.
        """
        if self.count == 1 or self._told is not None:
            yield
            if self._told is not None:
                raise SystemExit(0)
            return
        workers = [self._start(number) for number in range(1, self.count)]
        try:
            yield
            for worker in workers:
                worker.wait()
        finally:
            _end(workers)
        for number, worker in enumerate(workers, 1):
            if worker.returncode:
                self.failed = True
                logger.warning("Worker %d has ended with %d: see %s", number, worker.returncode, self._log(number))

    def _log(self, number: int) -> str:
        return os.path.join(self._folder, f"worker-{number}.log")

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        os.makedirs(self._folder, exist_ok=True)
        told = {"studies": _begun, "until": self._until, "script": os.getpid()}
        environment = {**os.environ, WORKER: json.dumps(told), **_share_of_machine(number, self.count)}
        with open(self._log(number), "wb") as log:
            # A session of its own, so that Ctrl-C reaches the script alone, which then ends the workers in order.
            return subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def refuse_in_worker() -> None:
    """Refuse to train outside a search in a worker, which would write over what the script has trained.

    Raises:
        UnsupportedArgument: in a worker.
    """
    if WORKER in os.environ:
        raise UnsupportedArgument(
            "n_jobs starts the script again for each job, and it trains before it searches: search first, or start the "
            "search from a script of its own."
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
    cores = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    alone = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
    return {"OMP_NUM_THREADS": cores, **alone}


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
