"""Measures a run between its log lines (`observe`): speeds, where the time goes, memory, MFU; and warns."""

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
from hftrainer.monitoring.flops import FlopCounter
from hftrainer.monitoring.journal import Journal, goodput, read_events
from hftrainer.parallel import devices
from hftrainer.reporting.summary import peak_process_memory

logger = logging.getLogger(__name__)

#: A step that takes so many times the median, and so many seconds, is reported.
_SLOW, _SLOW_SECONDS = 20, 1.0
#: Seconds between two looks at the memory of the process.
_SAMPLE_PERIOD = 0.1
#: Steps from which the median is known, and the most of which it is taken.
_KNOWN, _REMEMBERED = 10, 1000
#: What waits for data → what to do about it.
_REMEDIES = {
    "the dataset": "raise dataloader_num_workers, or prepare the samples before training",
    "data_collator": "raise dataloader_num_workers, or do its work once, before training",
    "the transfer to the device": "set dataloader_pin_memory=True, or make the samples smaller",
    "the loading processes": "raise dataloader_num_workers or dataloader_prefetch_factor",
    "the script's loader": "let it load ahead, in processes of its own",
}


@dataclass
class Measured:
    """What the parts of a run measure, from its beginning; read at log lines.

    Attributes:
        seconds: returns 'evaluation' and 'saving' → seconds.
        waits: returns the parts of the way to a batch, named as in the warning → seconds.
        samples: samples that this process has trained on.
        tokens: its input tokens, padding included.
    """

    seconds: Callable[[], Mapping[str, float]]
    waits: Callable[[], Mapping[str, float]]
    samples: int = 0
    tokens: int = 0


class Observer(TrainerCallback):
    """Measures the intervals between log lines. A callback; `RunWatch` reports micro-batches and phases to it.

    Args:
        what: what to observe, of `OBSERVE_PARTS`.
        measured: what is measured elsewhere.
        sum_over_data: sums a number over the ranks with distinct batches; a collective operation.
        flops: counts the operations of the first micro-batch; None where the peak of the hardware is unknown.
        journal: where events are written.
        facts: values for the first event.
    """

    def __init__(
        self,
        what: frozenset[str],
        measured: Measured,
        sum_over_data: Callable[[int], int],
        flops: FlopCounter | None,
        journal: Journal,
        facts: Mapping[str, Any],
    ) -> None:
        self.what, self.measured, self.journal, self.flops = what, measured, journal, flops
        self._sum_over_data, self._facts = sum_over_data, facts
        self._first_elements = self._step = self._written_step = 0
        self._median: float | None = None
        self._has_warned_of_data = False
        self._handler = _JournalHandler(self)
        samples_memory = "memory" in what and devices.memory_peak() is None
        self._next_sample = 0.0 if samples_memory else math.inf
        self._begin_interval(self._read())
        self._written = self._begin

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies of the Trainer do not observe this run."""
        return TrainerCallback, ()

    # ---- Intervals ---------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, float]:
        """The counters now: 'time', 'data', 'evaluation' and 'saving' in seconds, and counts."""
        waits, seconds = self.measured.waits(), self.measured.seconds()
        counters = {name: seconds.get(name, 0.0) for name in ("evaluation", "saving")} | {"data": sum(waits.values())}
        counts = {"samples": self.measured.samples, "tokens": self.measured.tokens}
        return {"time": time.perf_counter(), **counters, **counts, **waits}

    def _begin_interval(self, now: dict[str, float]) -> None:
        self._begin, self._memory = now, 0
        self._count = 0
        self._latest: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_begin = _in_steps(now)

    def values(self) -> dict[str, float]:
        """The values for a log line, of the time since the last one. A collective operation."""
        now = self._read()
        spent = {name: value - self._begin.get(name, 0.0) for name, value in now.items()}
        training = _in_steps(spent)
        found: dict[str, float] = {}
        if "speed" in self.what and self._count:
            rates = {name: self._sum_over_data(int(spent[name])) / training for name in ("tokens", "samples")}
            found = {f"{name}_per_second": rate for name, rate in rates.items() if rate}
            found["step_seconds"] = training / self._count
        if "time" in self.what:
            shares = {"data_wait": "data", "eval_share": "evaluation", "save_share": "saving"}
            found |= {name: spent[part] / spent["time"] for name, part in shares.items()}
        if "memory" in self.what:
            found["peak_memory_mb"] = self._take_memory() / 1e6
        if self.flops is not None and self.flops.counted:
            elements = spent["tokens"] or spent["samples"]
            found["mfu"] = self.flops.counted * elements / self._first_elements / training / self.flops.peak
        if len(self._latest) >= _KNOWN:
            self._median = statistics.median(self._latest)
            self._check_data(spent)
        self._begin_interval(now)
        return found

    def _take_memory(self) -> int:
        """The peak of memory since the last call, in bytes: of the tensors on the accelerator, or of this process."""
        peak = devices.take_memory_peak()
        return max(self._memory, _process_memory()) if peak is None else peak

    def write_interval(self) -> None:
        """Write to the journal where the time since the last such event went."""
        now = self._read()
        spent = {name: now[name] - self._written[name] for name in ("data", "evaluation", "saving")}
        seconds = {"steps": now["time"] - self._written["time"] - sum(spent.values()), **spent}
        self.journal.write("interval", self._step, steps=self._step - self._written_step, seconds=seconds)
        self._written, self._written_step = now, self._step

    def goodput(self) -> float | None:
        """The share of all time since the run's first start that went into steps that count; None without a journal."""
        self.write_interval()
        return None if self.journal.folder is None else goodput(read_events(self.journal.folder))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Write to the journal when the block begins and ends; `name` is 'evaluation' or 'saving'."""
        self.write_interval()
        self.journal.write("phase", self._step, phase=name)
        try:
            yield
        finally:
            self.write_interval()
            self.journal.write("phase", self._step, phase="training")

    # ---- Micro-batches -----------------------------------------------------------------------------------------

    def end_micro_batch(self, samples: int, tokens: int) -> None:
        """Count a micro-batch of this process."""
        self.measured.samples += samples
        self.measured.tokens += tokens
        if self.flops is not None and self.flops.counted is None:
            self.flops.end()
            self._first_elements = tokens or samples

    # ---- Events ------------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin the journal and the first interval."""
        self._step = self._written_step = state.global_step
        facts = {"max_steps": state.max_steps, "pid": os.getpid(), "host": socket.gethostname(), **self._facts}
        self.journal.write("begin", self._step, **facts)
        logging.getLogger("hftrainer").addHandler(self._handler)
        self._begin_interval(self._read())
        self._written = self._begin

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time of the step, and the memory."""
        now, seconds, self._step = time.perf_counter(), self.measured.seconds(), state.global_step
        in_steps = now - seconds.get("evaluation", 0.0) - seconds.get("saving", 0.0)
        self._count += 1
        self._latest.append(in_steps - self._step_begin)
        self._step_begin = in_steps
        self._check_step(self._latest[-1])
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_PERIOD
            self._memory = max(self._memory, _process_memory())

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the log line to the journal."""
        self.journal.write("log", state.global_step, logs=logs)
        if "loss" in (logs or {}):
            self.write_interval()

    def on_save(self, args, state, control, **kwargs):
        """Write to the journal that there is a checkpoint."""
        self.journal.write("checkpoint", state.global_step, folder=f"checkpoint-{state.global_step}")

    def close(self, reason: str) -> None:
        """End the journal's entries of this run."""
        if self.flops is not None:
            self.flops.stop()
        self.write_interval()
        self.journal.write("end", self._step, reason=reason)
        logging.getLogger("hftrainer").removeHandler(self._handler)

    # ---- Warnings ----------------------------------------------------------------------------------------------

    def _check_step(self, seconds: float) -> None:
        if self._median is None or "warnings" not in self.what:
            return
        if seconds > max(_SLOW * self._median, _SLOW_SECONDS):
            times = seconds / self._median
            logger.warning("Step %d took %.3g s, %.0f times the median.", self._step, seconds, times)
            self._median = None  # no second warning before the next log line

    def _check_data(self, spent: Mapping[str, float]) -> None:
        """Warn once if steps wait for data more than half of their time, and name the part that takes most of it."""
        share = spent["data"] / _in_steps(spent)
        if share > 0.5 and "warnings" in self.what and not self._has_warned_of_data:
            part = max(self.measured.waits(), key=lambda name: spent[name])
            text = "Steps wait for data %.0f %% of the time, mostly for %s: %s."
            logger.warning(text, 100 * share, part, _REMEDIES[part])
            self._has_warned_of_data = True


class _JournalHandler(logging.Handler):
    """Writes warnings to the journal too."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message."""
        self._observer.journal.write("warning", self._observer._step, text=record.getMessage())


def _in_steps(counters: Mapping[str, float]) -> float:
    """Seconds spent in steps, including the wait for data."""
    return counters["time"] - counters["evaluation"] - counters["saving"]


def _process_memory() -> int:
    """Resident memory of this process, in bytes; where the system does not say it, its highest so far; else 0."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return peak_process_memory()
