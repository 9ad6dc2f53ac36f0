"""Measures a run between its log lines (`observe`): speeds, time by activity, memory, MFU; warns of slow steps."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.callbacks.state import TrainerCallback
from hftrainer.checkpointing.saved_arguments import plain_arguments
from hftrainer.monitoring.flops import FlopCounter
from hftrainer.monitoring.journal import Journal, read_events
from hftrainer.parallel import devices
from hftrainer.reporting.memory import peak_process_memory

logger = logging.getLogger(__name__)

#: Minimum of a slow step that is reported: as a multiple of the median, and in seconds.
_SLOW_FACTOR, _SLOW_SECONDS = 20, 1.0
#: Seconds between two samples of the process's memory.
_SAMPLE_PERIOD = 0.1
#: Minimum and maximum number of steps of a median.
_MIN_STEPS, _MAX_STEPS = 10, 1000
#: The cause of a wait for data → the remedy.
_REMEDIES = {
    "the dataset": "raise dataloader_num_workers, or prepare the samples before training",
    "data_collator": "raise dataloader_num_workers, or do its work once, before training",
    "the transfer to the device": "set dataloader_pin_memory=True, or make the samples smaller",
    "the loading processes": "raise dataloader_num_workers or dataloader_prefetch_factor",
    "the script's loader": "let it prefetch in separate processes",
}


@dataclass(eq=False, repr=False)
class Observer(TrainerCallback):
    """A callback that measures the intervals between log lines. `Monitors` reports micro-batches and phases to it.

    Args:
        observations: what to observe, from `OBSERVE_PARTS` of `arguments.choices`.
        step: returns the optimizer steps done; `on_step_end` is not called if a callback before it raises an error.
        seconds: returns 'evaluation' and 'saving' → seconds since the run started.
        waits: returns the causes of waits for data, as in `_REMEDIES` → seconds since the run started.
        sum_over_data: sums a number over the ranks with distinct batches; a collective operation.
        flops: counts the operations of the first micro-batch; None if the peak of the hardware is unknown.
        journal: the journal for the events.
        facts: values for the first event.
    """

    observations: frozenset[str]
    step: Callable[[], int]
    seconds: Callable[[], Mapping[str, float]]
    waits: Callable[[], Mapping[str, float]]
    sum_over_data: Callable[[int], int]
    flops: FlopCounter | None
    journal: Journal
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._samples = self._tokens = self._first_elements = 0
        self._written_step = 0
        self._median_step_seconds: float | None = None
        self._has_warned_of_data = False
        self._handler = _JournalHandler(self)
        samples_memory = "memory" in self.observations and devices.memory_peak() is None
        self._next_sample = 0.0 if samples_memory else math.inf
        #: Seconds of the steps since `_checked_counters`, for warnings: the interval of a log line may have few steps.
        self._latest_step_seconds: deque[float] = deque(maxlen=_MAX_STEPS)
        self._begin_interval(self._read_counters())
        self._written_counters = self._checked_counters = self._start_counters

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Make copies of the Trainer observe nothing."""
        return TrainerCallback, ()

    # ---- Intervals ---------------------------------------------------------------------------------------------

    def _read_counters(self) -> dict[str, float]:
        """The current counters: seconds of each activity, and numbers of samples and tokens."""
        waits, seconds = self.waits(), self.seconds()
        counters = {name: seconds.get(name, 0.0) for name in ("evaluation", "saving")} | {"data": sum(waits.values())}
        return {"time": time.perf_counter(), **counters, "samples": self._samples, "tokens": self._tokens, **waits}

    def _begin_interval(self, counters: dict[str, float]) -> None:
        self._start_counters = counters
        self._memory_peak = 0
        self._steps_in_interval = 0
        self._step_start = _step_seconds(counters)

    def pop_values(self) -> dict[str, float]:
        """The values for a log line, for the time since the last one. A collective operation."""
        counters = self._read_counters()
        differences = {name: value - self._start_counters.get(name, 0.0) for name, value in counters.items()}
        training_seconds = _step_seconds(differences)
        values: dict[str, float] = {}
        if "speed" in self.observations and self._steps_in_interval:
            rates = {
                name: self.sum_over_data(int(differences[name])) / training_seconds for name in ("tokens", "samples")
            }
            values = {f"{name}_per_second": rate for name, rate in rates.items() if rate}
            values["step_seconds"] = training_seconds / self._steps_in_interval
        if "time" in self.observations:
            shares = {"data_wait": "data", "eval_share": "evaluation", "save_share": "saving"}
            values |= {name: differences[part] / differences["time"] for name, part in shares.items()}
        if "memory" in self.observations:
            device_peak = devices.pop_memory_peak()
            peak = max(self._memory_peak, _process_memory()) if device_peak is None else device_peak
            values["peak_memory_mb"] = peak / 1e6
        if self.flops is not None and (operations := self.flops.counted_operations):
            elements = differences["tokens"] or differences["samples"]
            values["mfu"] = operations * elements / self._first_elements / training_seconds / self.flops.peak
        if len(self._latest_step_seconds) >= _MIN_STEPS:
            self._median_step_seconds = statistics.median(self._latest_step_seconds)
            self._check_data({name: value - self._checked_counters.get(name, 0.0) for name, value in counters.items()})
            self._latest_step_seconds.clear()
            self._checked_counters = counters
        self._begin_interval(counters)
        return values

    def write_interval(self) -> None:
        """Write the time by activity since the last interval to the journal."""
        counters = self._read_counters()
        differences = {name: value - self._written_counters.get(name, 0.0) for name, value in counters.items()}
        other_seconds = {name: differences[name] for name in ("data", "evaluation", "saving")}
        seconds = {"steps": differences["time"] - sum(other_seconds.values()), **other_seconds}
        step = self.step()
        self.journal.write("interval", step, steps=step - self._written_step, seconds=seconds)
        self._written_counters = counters
        self._written_step = step

    def read_events(self) -> list[dict[str, Any]]:
        """The events until now, also of earlier runs; none without a journal."""
        self.write_interval()
        return [] if self.journal.folder is None else read_events(self.journal.folder)

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Write the start and end of an activity ('evaluation' or 'saving') to the journal."""
        self.write_interval()
        self.journal.write("phase", self.step(), phase=name)
        try:
            yield
        finally:
            self.write_interval()
            self.journal.write("phase", self.step(), phase="training")

    # ---- Micro-batches -----------------------------------------------------------------------------------------

    def add_micro_batch(self, samples: int, tokens: int) -> None:
        """Count a micro-batch of this process."""
        self._samples += samples
        self._tokens += tokens
        if self.flops is not None and self.flops.counted_operations is None:
            self.flops.end()
            self._first_elements = tokens or samples

    # ---- Events ------------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the journal and the first interval."""
        self._written_step = state.global_step
        logging_steps = state.logging_steps if args.logging_strategy == "steps" else None
        facts = {"max_steps": state.max_steps, "pid": os.getpid(), "host": socket.gethostname(), **self.facts}
        facts |= {name: getattr(args, name) for name in ("metric_for_best_model", "greater_is_better")}
        facts["arguments"] = plain_arguments(args)
        self.journal.write("begin", state.global_step, **facts, logging_steps=logging_steps)
        logging.getLogger("hftrainer").addHandler(self._handler)
        self._begin_interval(self._read_counters())
        self._written_counters = self._checked_counters = self._start_counters

    def on_step_begin(self, args, state, control, **kwargs):
        """Start counting the operations of the first micro-batch."""
        if self.flops is not None:
            self.flops.start()

    def on_step_end(self, args, state, control, **kwargs):
        """Record the time of the step, and the memory."""
        now = time.perf_counter()
        seconds = self.seconds()
        step_seconds = now - seconds.get("evaluation", 0.0) - seconds.get("saving", 0.0)
        self._steps_in_interval += 1
        self._latest_step_seconds.append(step_seconds - self._step_start)
        self._step_start = step_seconds
        self._check_step(self._latest_step_seconds[-1])
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_PERIOD
            self._memory_peak = max(self._memory_peak, _process_memory())

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the log line to the journal."""
        is_partial = "loss" in (logs or {}) and getattr(state, "non_finite_step", 0) > 0
        self.journal.write("log", state.global_step, logs=logs, **({"is_partial": True} if is_partial else {}))
        if "loss" in (logs or {}):
            self.write_interval()

    def on_save(self, args, state, control, **kwargs):
        """Record the checkpoint in the journal."""
        self.journal.write("checkpoint", state.global_step, folder=f"checkpoint-{state.global_step}")

    def close(self, reason: str, message: str = "") -> None:
        """Write the end of the run to the journal, and the first line of an error's message."""
        if self.flops is not None:
            self.flops.stop()
        self.write_interval()
        values = {"message": message.splitlines()[0]} if message else {}
        self.journal.write("end", self.step(), reason=reason, **values)
        logging.getLogger("hftrainer").removeHandler(self._handler)

    # ---- Warnings ----------------------------------------------------------------------------------------------

    def _check_step(self, seconds: float) -> None:
        if self._median_step_seconds is None or "warnings" not in self.observations:
            return
        if seconds > max(_SLOW_FACTOR * self._median_step_seconds, _SLOW_SECONDS):
            times = seconds / self._median_step_seconds
            logger.warning("Step %d took %.3g s, %.0f times the median.", self.step(), seconds, times)
            # No second warning before the next log line.
            self._median_step_seconds = None

    def _check_data(self, seconds: Mapping[str, float]) -> None:
        """Warn once if steps wait for data more than half of their time, and name the main cause."""
        share = seconds["data"] / _step_seconds(seconds)
        if share > 0.5 and "warnings" in self.observations and not self._has_warned_of_data:
            cause = max(self.waits(), key=lambda name: seconds[name])
            text = "Steps wait for data %.0f %% of the time, mostly for %s: %s."
            logger.warning(text, 100 * share, cause, _REMEDIES[cause])
            self._has_warned_of_data = True


class _JournalHandler(logging.Handler):
    """Also writes warnings to the journal."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message."""
        step = getattr(record, "non_finite_step", None)
        values = {} if step is None else {"non_finite_step": step}
        self._observer.journal.write("warning", self._observer.step(), text=record.getMessage(), **values)


def _step_seconds(counters: Mapping[str, float]) -> float:
    """Seconds spent in steps, including the wait for data."""
    return counters["time"] - counters["evaluation"] - counters["saving"]


def _process_memory() -> int:
    """Resident memory of this process, in bytes; its peak on systems that do not report it; else 0."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return peak_process_memory()
