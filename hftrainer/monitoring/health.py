"""`/health` and `/metrics` of a run (`metrics_port`), and the stack of a rank that hangs.

The training thread of each rank records its progress in `Heartbeat`. A second thread writes it to the folder `_health`
of the run. The first rank of each node serves the ranks of its node, and rank 0 all ranks that share the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from hftrainer.arguments.choices import read_address
from hftrainer.callbacks.state import TrainerState
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed
from hftrainer.parallel.processes import Processes

_GetState = Callable[[], TrainerState]
_GetFolder = Callable[[], str | None]
#: Name of the folder. Uploads to the Hub skip names that begin with '_'.
HEALTH_FOLDER = "_health"
#: What the training thread may do; the values of "phase" in the records and answers.
_ACTIVITIES = ("starting", "training", "evaluation", "saving", "ended")
#: Event that every rank has → whether the next sign of progress may take minutes.
_SIGNS = {
    "on_epoch_begin": True,  # the loader may start worker processes
    "on_step_begin": False,
    "on_substep_end": False,
    "on_pre_optimizer_step": False,
    "on_step_end": False,
    "on_prediction_step": False,
    "on_predict": True,
    "on_evaluate": True,
}
#: Seconds between two records of a rank.
_INTERVAL = 2.0
#: Seconds without a sign of progress after which a rank is late, if they exceed `_LIMIT_PER_PAUSE` times its longest
#: pause.
_SHORTEST_LIMIT = 15.0
_LIMIT_PER_PAUSE = 10
#: The same if the usual pause is unknown, or if no signs are expected, as during a checkpoint.
_SLOW_LIMIT = 300.0
#: Seconds without a sign after which this rank writes its stack.
_STACK_AFTER = 10.0
#: Seconds for which a file system may show an old record of another node.
_CACHED = 60.0
#: Modules with a function on the stack while torch.compile compiles, but not when compiled code runs.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


class Heartbeat:
    """The progress of this rank's training thread.

    Attributes:
        activity: one of `_ACTIVITIES`.
        signs_since_step: signs of progress since the last optimizer step; the same on all ranks.
        step_time: end of the last optimizer step, on the monotonic clock.
    """

    __slots__ = ("_is_slow", "_longest", "_time", "activity", "signs_since_step", "step_time")

    def __init__(self) -> None:
        self.activity = _ACTIVITIES[0]
        self.signs_since_step = 0
        self.step_time = self._time = time.monotonic()
        self._is_slow = False
        self._longest = dict.fromkeys(_ACTIVITIES, 0.0)

    def beat(self, is_slow: bool = False) -> None:
        """Record progress; `is_slow` if the next sign may take minutes."""
        now = time.monotonic()
        if now - self._time > self._longest[self.activity] and not self._is_slow:
            self._longest[self.activity] = now - self._time
        self._time, self._is_slow = now, is_slow
        self.signs_since_step += 1

    def record_event(self, event: str) -> None:
        """Record an event, before its callbacks are called."""
        if event in _SIGNS:
            self.beat(is_slow=_SIGNS[event])
        if event == "on_step_end":
            self.signs_since_step, self.step_time = 0, self._time
            if self.activity == "starting":
                self.activity = "training"

    def begin_activity(self, activity: str) -> None:
        """Record that an activity begins."""
        self.beat()
        # The first batch of an evaluation may start worker processes.
        self.activity, self._is_slow = activity, activity in ("evaluation", "saving")

    @contextlib.contextmanager
    def in_activity(self, activity: str) -> Iterator[None]:
        """Begin an activity for the block, and the previous one again after it."""
        previous_activity = self.activity
        self.begin_activity(activity)
        try:
            yield
        finally:
            self.begin_activity(previous_activity)

    def seconds_since_sign(self) -> float:
        """Seconds since the last sign."""
        return time.monotonic() - self._time

    def limit(self) -> float | None:
        """Seconds without progress after which this rank is late; None for no limit."""
        if self.activity in ("starting", "ended"):
            return None
        longest = self._longest[self.activity]
        return _SLOW_LIMIT if self._is_slow or not longest else max(_SHORTEST_LIMIT, _LIMIT_PER_PAUSE * longest)


class _Recorder(threading.Thread):
    """Writes the record of this rank, and its stack if there is no progress, until `stop`.

    Args:
        heartbeat: the progress of the thread that creates this object.
        state: returns the state of the Trainer.
        path: the file of the record. The stacks are next to it, with the suffix .txt.
        rank: this rank.
        reporter: reads the records of the ranks that this rank serves; None if it serves none.
    """

    def __init__(
        self, heartbeat: Heartbeat, state: _GetState, path: Path, rank: int, reporter: _Reporter | None
    ) -> None:
        super().__init__(name="health", daemon=True)
        self._heartbeat, self._state, self._path, self._reporter = heartbeat, state, path, reporter
        self._rank, self._thread = rank, threading.get_ident()
        self._stop_event = threading.Event()
        self._stacks = open(path.with_suffix(".txt"), "ab", buffering=0)  # noqa: SIM115

    def run(self) -> None:
        """Write and read records until `stop`."""
        while not self._stop_event.is_set():
            # If C code holds the GIL, this thread does not run, and faulthandler's thread writes the stacks.
            faulthandler.dump_traceback_later(_STACK_AFTER, file=self._stacks)
            try:
                self._write_record()
            # The disk is full: no record is better than an old one.
            except OSError:
                _remove(self._path)
            if self._reporter is not None:
                self._reporter.read_records()
            self._stop_event.wait(_INTERVAL)

    def _write_record(self) -> None:
        heartbeat = self._heartbeat
        # Read the limit first, since the training thread may reset the seconds.
        limit = heartbeat.limit()
        quiet = heartbeat.seconds_since_sign()
        self._stacks.truncate(0)
        if quiet > _STACK_AFTER:
            faulthandler.dump_traceback(self._stacks)
            limit = None if _is_compiling() else limit
        record = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "thread": self._thread,
            "step": self._state().global_step,
            "signs": heartbeat.signs_since_step,
            "phase": heartbeat.activity,
            "seconds_since_sign": quiet,
            "limit": limit,
            # A reader of the file might see half of it.
            "stack": self._path.with_suffix(".txt").read_text(),
        }
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(self._path)

    def stop(self) -> None:
        """Stop the thread, and remove the files of this rank."""
        self._stop_event.set()
        self.join(_INTERVAL)
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        _remove(self._path)
        _remove(self._path.with_suffix(".txt"))
        # Other ranks may have files in the folder.
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_compiling() -> bool:
    """Whether torch.compile is compiling in a thread of this process."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__") in _COMPILERS:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False


class _Reporter:
    """Answers `/health`, and `/metrics` as a collector of prometheus_client.

    Args:
        heartbeat: the progress of this rank.
        state: returns the state of the Trainer.
        last_checkpoint: returns the newest complete checkpoint of the run.
        paths: the files of the records.
    """

    def __init__(self, heartbeat: Heartbeat, state: _GetState, last_checkpoint: _GetFolder, paths: list[Path]) -> None:
        self._heartbeat, self._state, self._last_checkpoint, self._paths = heartbeat, state, last_checkpoint, paths
        self._host = socket.gethostname()
        #: The record of each rank, and the time when this process first read it, since clocks of nodes may differ.
        self._records: dict[Path, tuple[dict[str, Any], float]] = {}
        #: (late rank, its step, its signs) → the time since when it is late.
        self._late_since: dict[tuple[int, int, int], float] = {}

    def read_records(self) -> None:
        """Read the records of the ranks."""
        records = {}
        for path in self._paths:
            with contextlib.suppress(OSError, ValueError):
                record, old_record = json.loads(path.read_text()), self._records.get(path)
                records[path] = old_record if old_record and old_record[0] == record else (record, time.monotonic())
        self._records = records
        late = [_progress(rank) for rank in self._slowest_ranks() if rank["is_late"]]
        self._late_since = {rank: self._late_since.get(rank, time.monotonic()) for rank in late}

    def _slowest_ranks(self) -> list[dict[str, Any]]:
        """The ranks furthest behind."""
        ranks = list(self._ranks())
        last = min((_progress(rank)[1:] for rank in ranks), default=None)
        return [rank for rank in ranks if _progress(rank)[1:] == last]

    def _ranks(self) -> Iterator[dict[str, Any]]:
        for path, (record, read_at) in self._records.items():
            age = max(0.0, time.monotonic() - read_at - (0 if record["host"] == self._host else _CACHED))
            quiet, limit = record["seconds_since_sign"] + age, record["limit"]
            if record["phase"] == "starting" != self._heartbeat.activity:
                # Ranks finish the first step together, so a record that still says "starting" is stale.
                quiet, limit = age, _SHORTEST_LIMIT
            is_late = limit is not None and quiet > limit
            yield {**record, "seconds_since_sign": round(quiet, 1), "is_late": is_late, "path": path}

    def report(self) -> dict[str, Any]:
        """The response of `/health`. A run is stalled if the ranks furthest behind exceed their limits."""
        state, activity, ranks = self._state(), self._heartbeat.activity, list(self._ranks())
        # When a slow rank continues, its record is newer than those of the ranks that waited for it, which seem behind.
        threshold = time.monotonic() - 2 * _INTERVAL
        late = [rank for rank in self._slowest_ranks() if self._late_since.get(_progress(rank), math.inf) <= threshold]
        return {
            "status": "stalled" if late else activity if activity in ("starting", "ended") else "ok",
            "step": state.global_step,
            "max_steps": state.max_steps,
            "phase": activity,
            "seconds_since_step": round(time.monotonic() - self._heartbeat.step_time, 1),
            "ranks": [{name: rank[name] for name in ("rank", "step", "phase", "seconds_since_sign")} for rank in ranks],
            "late_ranks": [
                {**{name: rank[name] for name in ("rank", "host", "pid")}, "stack": _stack(rank)} for rank in late
            ],
            "last_checkpoint": self._last_checkpoint(),
        }

    def collect(self) -> Iterator[Any]:
        """The metrics of `/metrics`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state, report = self._state(), self.report()
        losses = (line["loss"] for line in reversed(state.log_history) if "loss" in line)
        checkpoint = (report["last_checkpoint"] or "").rpartition("-")[2]
        for name, help_text, value in (
            ("step", "Optimizer steps done.", state.global_step),
            ("max_steps", "Optimizer steps of the complete run.", state.max_steps),
            ("epoch", "Epochs done.", state.epoch),
            ("loss", "The last loss logged.", next(losses, None)),
            ("seconds_since_step", "Seconds since the last optimizer step.", report["seconds_since_step"]),
            ("checkpoint_step", "Step of the newest checkpoint.", int(checkpoint) if checkpoint.isdecimal() else None),
            ("ranks_late", "Ranks that hang.", len(report["late_ranks"])),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"hftrainer_{name}", help_text, value=value)
        yield CounterMetricFamily("hftrainer_steps", "Optimizer steps done.", value=state.global_step)
        phases = GaugeMetricFamily("hftrainer_phase", "1 for the current phase.", labels=["phase"])
        for activity in _ACTIVITIES:
            phases.add_metric([activity], int(activity == report["phase"]))
        log_values = GaugeMetricFamily("hftrainer_log", "The numbers of the last log line.", labels=["name"])
        for name, value in (state.log_history or [{}])[-1].items():
            if isinstance(value, (int, float)):
                log_values.add_metric([name], value)
        yield from (phases, log_values)


def _progress(rank: dict[str, Any]) -> tuple[int, int, int]:
    """A rank, its optimizer step, and its signs since then."""
    return rank["rank"], rank["step"], rank["signs"]


def _stack(rank: dict[str, Any]) -> str:
    """The stack of a rank's training thread, innermost call first; empty if it is not available."""
    with contextlib.suppress(OSError):
        # If C code holds the GIL, the record has none, and the file is complete.
        for part in reversed((rank["stack"] or rank["path"].with_suffix(".txt").read_text()).split("\n\n")):
            if f"Thread 0x{rank['thread']:016x}" in part:
                return str(part).strip()
    return ""


class _Server(ThreadingMixIn, WSGIServer):
    """Listens on an address of IPv4 or IPv6, with a thread for each request."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


@contextlib.contextmanager
def _run_server(address: int | str, reporter: _Reporter) -> Iterator[None]:
    """Serve `/health` and `/metrics` during the block.

    Raises:
        InvalidArgument: if the port is in use, or the address does not belong to this machine.
        MissingPackage: if prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError as error:
        raise MissingPackage(
            "metrics_port needs prometheus_client: pip install 'hftrainer[metrics]'"
        ) from cause_if_installed(error)
    registry = CollectorRegistry()
    registry.register(reporter)
    metrics = make_wsgi_app(registry)

    def answer(request: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if request["PATH_INFO"] != "/health":
            return metrics(request, start_response)
        report = reporter.report()
        status = "503 Service Unavailable" if report["status"] == "stalled" else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(report).encode()]

    host, port = read_address(address)
    try:
        # Not start_wsgi_server: it answers with the metrics, at any path, before it can be given another application.
        server = make_server(host, port, answer, _Server, _QuietHandler)
    except OSError as error:
        raise InvalidArgument(
            f"metrics_port={address!r}: cannot listen on {host}:{port} ({error.strerror}). Use another port."
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        # Loader workers have a copy of the socket, which must not keep listening.
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.server_close()


@contextlib.contextmanager
def serve_health(args: Any, processes: Processes, state: _GetState, last_checkpoint: _GetFolder) -> Iterator[Heartbeat]:
    """Serve `/health` and `/metrics` during the block. Yields the `Heartbeat` to update.

    Args:
        args: the training arguments.
        processes: the processes of the run.
        state: returns the state of the Trainer.
        last_checkpoint: returns the newest complete checkpoint of the run, if any.

    Raises:
        InvalidArgument: on all ranks, if a rank that serves cannot use the port.
        MissingPackage: on all ranks, if a rank that serves has no prometheus_client.
    """
    if (address := args.metrics_port) is None:
        yield Heartbeat()
        return
    folder, rank = Path(args.output_dir, HEALTH_FOLDER), processes.rank
    ranks = range(processes.world_size) if rank == 0 else range(rank, rank + processes.local_world_size)
    heartbeat, error = Heartbeat(), None
    reporter = _Reporter(heartbeat, state, last_checkpoint, [folder / f"rank-{rank}.json" for rank in ranks])
    is_server = processes.local_rank == 0
    with contextlib.ExitStack() as stack:
        if is_server:
            # A killed run may have left the folder.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                stack.enter_context(_run_server(address, reporter))
            except (InvalidArgument, MissingPackage) as problem:
                error = problem
        for rank_error in processes.gather_objects([error]):
            if rank_error is not None:
                raise rank_error
        folder.mkdir(parents=True, exist_ok=True)
        recorder = _Recorder(heartbeat, state, folder / f"rank-{rank}.json", rank, reporter if is_server else None)
        recorder.start()
        stack.callback(recorder.stop)
        yield heartbeat
