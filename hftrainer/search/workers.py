"""Trials in other processes: pickled Trainers, and the workers of `n_jobs`, which train trials of one study.

The `n_jobs` of Optuna starts threads, which would share one random generator and one model.
"""

from __future__ import annotations

import copyreg
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch

from hftrainer.callbacks.handler import is_instance_by_name
from hftrainer.callbacks.progress_bar import ProgressCallback
from hftrainer.errors import InvalidArgument, SearchFailed
from hftrainer.parallel import devices
from hftrainer.releases.followed import follow

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: Seconds that a worker has to mark its trial as interrupted and exit, after an interruption of the search.
_SECONDS_TO_EXIT = 30.0


class SearchWorkers:
    """The workers of one search, which train trials in addition to the script's process.

    Args:
        folder: the folder for the workers' logs.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    @contextmanager
    def run_workers(self, count: int, function: Callable[[], Any]) -> Iterator[None]:
        """Start the workers before the block, and wait for them after it.

        Args:
            count: number of processes, including this one.
            function: the picklable function that each worker runs.

        Raises:
            SearchFailed: if a worker failed.
        """
        threads = torch.get_num_threads()
        os.makedirs(self._folder, exist_ok=True)
        reader, writer = os.pipe()
        with open(reader, "rb") as pipe, open(writer, "wb"), tempfile.NamedTemporaryFile() as file:
            pickle.dump(function, file)
            file.flush()
            try:
                for number in range(1, count):
                    self._workers[number] = self._start(number, count, file.name, pipe)
                torch.set_num_threads(max(1, threads // count))
                yield
                for worker in self._workers.values():
                    worker.wait()
                self.check()
            finally:
                torch.set_num_threads(threads)
                self._terminate()

    def check(self) -> None:
        """Log each worker that was killed.

        Raises:
            SearchFailed: if a worker failed, since the same error in this process would end the search.
        """
        for number, worker in list(self._workers.items()):
            # None while the worker runs, 0 when its search has ended.
            if not worker.poll():
                continue
            del self._workers[number]
            log = f"See {self._log(number)}. Its last line: {self._last_line(number)}"
            if worker.returncode > 0:
                raise SearchFailed(f"Worker {number} of n_jobs failed. {log}")
            logger.warning("Worker %d of n_jobs was killed by signal %d. %s", number, -worker.returncode, log)

    def _start(self, number: int, count: int, file: str, pipe: IO[bytes]) -> subprocess.Popen[bytes]:
        python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with open(self._log(number), "wb") as log:
            # In a separate session, the worker gets no Ctrl-C: the script gets it, and terminates the workers.
            return subprocess.Popen(
                [sys.executable, "-c", "from hftrainer.search.workers import run_worker; run_worker()", file],
                env={**os.environ, "PYTHONPATH": python_path, **_resources(number, count)},
                stdin=pipe,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _terminate(self) -> None:
        """Terminate the running workers, and kill those that do not exit in time."""
        for worker in self._workers.values():
            worker.terminate()
        deadline = time.monotonic() + _SECONDS_TO_EXIT
        for worker in self._workers.values():
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._workers.clear()

    def _log(self, number: int) -> str:
        return os.path.join(self._folder, f"worker-{number}.log")

    def _last_line(self, number: int) -> str:
        with open(self._log(number), encoding="utf-8", errors="replace") as log:
            lines = [line for line in log if line.strip()]
        return lines[-1].strip() if lines else ""


def run_worker() -> None:
    """Run the pickled function in the file `sys.argv[1]`; the main function of a worker."""
    with open(sys.argv[1], "rb") as file:
        function = pickle.load(file)
    threading.Thread(target=_exit_with_script, args=(sys.stdin.fileno(),), daemon=True).start()
    function()


def _exit_with_script(pipe: int) -> None:
    """Send SIGTERM to this worker when the script ends, which closes its end of the pipe."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def number_of_jobs(n_jobs: Any) -> int:
    """The number of processes for `n_jobs`; -1 means one per GPU, or one per core without a GPU.

    Raises:
        InvalidArgument: if `n_jobs` is not a positive integer or -1.
    """
    if not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise InvalidArgument(f"n_jobs={n_jobs!r} must be a positive integer, or -1 for one job per GPU or core.")
    return n_jobs if n_jobs > 0 else torch.cuda.device_count() or devices.cpu_count()


def _resources(number: int, count: int) -> dict[str, str]:
    """Environment variables that assign one of several GPUs and a share of the cores to a worker."""
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus.split(",") if visible_gpus else [str(gpu) for gpu in range(torch.cuda.device_count())]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, devices.cpu_count() // count)))
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
    return {"OMP_NUM_THREADS": threads, **gpu}


# ---- A Trainer for another process, which rebuilds process-specific parts --------------------------------------------


@dataclass(frozen=True)
class PickledTrainer:
    """A pickled Trainer.

    Attributes:
        pickled: the output of cloudpickle, including functions and classes of the script.
        folder: the working directory, to which its paths are relative.
    """

    pickled: bytes
    folder: str

    def unpack(self) -> TrainerParts:
        """Unpickle the Trainer, and prepare it for training in this process.

        Changes to its working directory if that exists here.
        """
        parts: TrainerParts = pickle.loads(self.pickled)
        trainer = parts.trainer
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for arguments in filter(None, (vars(trainer.args), parts.arguments_before_search)):
            arguments["output_dir"] = os.path.join(self.folder, arguments["output_dir"])
        # install() was not called in this process.
        follow(parts.policy.release)
        parts.trainer_setup.set_log_level()
        parts.trainer_setup.copy_argument_values()
        parts.rebuild()
        for callback in list(trainer.callback_handler.callbacks):
            if is_instance_by_name(callback, "NotebookProgressCallback"):
                trainer.pop_callback(callback)
                trainer.add_callback(ProgressCallback)
        return parts


def pickle_trainer(parts: TrainerParts) -> PickledTrainer:
    """Pickle a Trainer without changing it.

    Raises:
        InvalidArgument: if an attribute or a callback cannot be pickled. The error names it.
    """
    trainer, state = parts.trainer, parts.trainer_state_for_copy()
    try:
        return PickledTrainer(_pickle_with_state(parts, trainer, state), os.getcwd())
    except Exception as error:
        raise InvalidArgument(
            f"{_find_unpicklable_name(parts, state)} cannot be pickled for the processes of the search ({error}). "
            "Create it in those processes instead, for example in a callback's on_train_begin."
        ) from error


def _pickle_with_state(value: Any, trainer: Trainer, state: dict[str, Any]) -> bytes:
    """Pickle a value, with `state` as the state of the Trainer that it refers to."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                constructor = copyreg.__newobj__  # type: ignore[attr-defined]
                # `unpack` rebuilds the rest.
                return constructor, (type(trainer),), state, None, None, _set_state
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _set_state(trainer: Trainer, state: dict[str, Any]) -> None:
    vars(trainer).update(state)


def _find_unpicklable_name(parts: TrainerParts, state: dict[str, Any]) -> str:
    """The name of the first callback or attribute that cannot be pickled."""
    class_name, callbacks = type(parts.trainer).__name__, parts.trainer.callback_handler.callbacks
    search_attributes: dict[str, Any] = {} if parts.search_backend is None else vars(parts.search_backend)
    candidates: list[tuple[str, Any]] = [
        *(
            (f"The callback {type(callback).__name__}", callback)
            for callback in (*callbacks, *parts.lightning_callbacks)
        ),
        *((f"The search's {name.strip('_')}", value) for name, value in search_attributes.items()),
        *((f"{class_name}.{name}", value) for name, value in state.items()),
    ]
    for name, value in candidates:
        if value is not parts:
            try:
                _pickle_with_state(value, parts.trainer, {})
            except Exception:
                return name
    return class_name
