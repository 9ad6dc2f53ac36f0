"""The data of a page of `watch`, and of plots, from a run's journal, or else its newest trainer_state.json."""

from __future__ import annotations

import bisect
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from hftrainer.base.messages import count_of, format_duration, format_number, format_span
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.layout import save_time, sort_checkpoints
from hftrainer.checkpointing.saved_arguments import read_arguments_of_run
from hftrainer.errors import InvalidArgument
from hftrainer.monitoring import journal
from hftrainer.parallel.environment import has_ended
from hftrainer.reporting.metrics import (
    NanSpan,
    choose_best,
    is_number,
    last_usable_step,
    logged_values,
    nan_span,
    sort_names,
)

Event = dict[str, Any]

#: Minimum of the seconds after which a run is silent, in addition to three times its longest pause.
SILENCE = 300.0
#: The word for a run whose loss is not finite at last.
DIVERGED = "diverged"


@dataclass
class JournalSummary:
    """A summary of a run's events. Of steps that a later start undid, only the time counts.

    Attributes:
        begin, end, phase, last_event: the last start; the end and the phase since then; the last event.
        max_steps: optimizer steps of the complete run.
        curves: losses and metrics → optimizer steps and values.
        values: the last value of everything else that training logged.
        spans: starts, intervals and ends, for `goodput`.
        intervals: the last intervals.
        seconds: activity → seconds since the first start.
        pace: optimizer steps and seconds since the last start.
        checkpoints: folder → event.
        warnings: the warnings.
        non_finite_step: the first step since the last finite loss that a warning names for its loss.
        longest_pause: maximum of the seconds between two events of a start.
        downtime: seconds of the pauses before restarts that the user did not choose, which count for goodput.
    """

    begin: Event | None = None
    end: Event | None = None
    phase: Event | None = None
    last_event: Event | None = None
    max_steps: int = 0
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    spans: list[Event] = field(default_factory=list)
    #: The recent ones.
    intervals: deque[Event] = field(default_factory=lambda: deque(maxlen=20))
    seconds: Counter[str] = field(default_factory=Counter)
    pace: tuple[int, float] = (0, 0.0)
    checkpoints: dict[str, Event] = field(default_factory=dict)
    warnings: list[Event] = field(default_factory=list)
    non_finite_step: int | None = None
    longest_pause: float = 0.0
    downtime: float = 0.0

    def add_event(self, event: Event) -> None:
        """Add the next event of the journal."""
        kind = event["event"]
        if self.begin is not None and self.last_event is not None:
            pause = event["time"] - self.last_event["time"]
            if kind != "begin":
                self.longest_pause = max(self.longest_pause, pause)
            elif self.last_event.get("reason") not in journal.CHOSEN:
                self.downtime += pause
        self.last_event = event
        self.non_finite_step = self.non_finite_step or event.get("non_finite_step")
        handlers: dict[str, Callable[[Event], None]] = {
            "begin": self._add_begin,
            "log": self._add_log,
            "interval": self._add_interval,
            "checkpoint": self._add_checkpoint,
            "warning": self.warnings.append,
            "end": self.spans.append,
        }
        if kind in ("phase", "end"):
            setattr(self, kind, event)
        if kind in handlers:
            handlers[kind](event)

    def _add_checkpoint(self, event: Event) -> None:
        self.checkpoints.pop(event["folder"], None)
        self.checkpoints[event["folder"]] = event

    def _add_begin(self, event: Event) -> None:
        self.begin, self.end, self.phase, self.pace = event, None, None, (0, 0.0)
        self.max_steps = event["max_steps"] or 0
        if (self.non_finite_step or 0) > event["step"]:
            self.non_finite_step = None
        self.spans = journal.remove_undone_steps([*self.spans, event])
        self.checkpoints = {path: saved for path, saved in self.checkpoints.items() if saved["step"] <= event["step"]}
        for steps, values in self.curves.values():
            length = bisect.bisect_right(steps, event["step"])
            del steps[length:], values[length:]

    def _add_log(self, event: Event) -> None:
        line = {"step": event["step"], **event["logs"]} | ({"loss": math.nan} if event.get("is_partial") else {})
        for panel, name, step, value in logged_values([line]):
            if panel in ("loss", "metrics"):
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
                if name == "loss" and not math.isnan(value):
                    self.non_finite_step = None
        for name, value in line.items():
            is_shown = name not in self.curves and (name == "eval_share" or not name.startswith("eval_"))
            if is_shown and name != "step" and isinstance(value, (int, float)):
                self.values[name] = value

    def _add_interval(self, event: Event) -> None:
        self.spans.append(event)
        self.intervals.append(event)
        self.seconds.update(event["seconds"])
        self.pace = self.pace[0] + event["steps"], self.pace[1] + sum(event["seconds"].values())

    def state(self, now: float) -> str:
        """One of 'unobserved', 'running', 'silent', 'killed', 'complete', 'stopped' and 'failed'.

        Args:
            now: seconds since 1970.
        """
        if self.begin is None or self.last_event is None:
            is_complete = self.last_event is not None and 0 < self.max_steps <= self.last_event["step"]
            return "complete" if is_complete else "unobserved"
        if self.end is not None:
            reason = self.end["reason"]
            if reason in journal.COMPLETE:
                return reason
            # The other names are those of errors.
            return "stopped" if reason in journal.CHOSEN or reason.startswith("SIG") else "failed"
        if has_ended(f"{self.begin['host']} {self.begin['pid']}"):
            return "killed"
        return "silent" if now - self.last_event["time"] > max(SILENCE, 3 * self.longest_pause) else "running"

    def metric(self, name: str, nan: NanSpan | None) -> dict[str, float | None]:
        """The last and the best value of a curve.

        Args:
            name: the curve.
            nan: when the loss became NaN for good. Only evaluations of weights that are surely finite can be the best.
        """
        steps, values = self.curves[name]
        end: float = math.inf if nan is None else nan.usable if name.startswith("eval_") else nan.first - 1
        finite = [(value, at) for at, value in zip(steps, values, strict=True) if at <= end and not math.isnan(value)]
        choose = choose_best(name, self.begin or {})
        best, best_step = choose(finite, key=lambda pair: pair[0]) if choose and finite else (None, None)
        return {"last": values[-1], "best": best, "best_step": best_step}


class WatchedRun:
    """The files of a run. `read` reads what was appended since the last call.

    Args:
        folder: the run's `output_dir`. Without a journal, we read its newest `trainer_state.json`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._source: Any = None
        self._forget_events()

    def _forget_events(self) -> None:
        """Forget what was read."""
        self._runs, self._offset = journal.RunNumbers(), 0
        self._summaries: defaultdict[int, JournalSummary] = defaultdict(JournalSummary)
        self.summary = self._summaries[0]

    def _read_new_events(self) -> None:
        """Read new events, or all events after the file was replaced or truncated."""
        try:
            with open(os.path.join(self.folder, journal.JOURNAL_NAME), "rb") as file:
                status = os.fstat(file.fileno())
                if self._source != status.st_ino or status.st_size < self._offset:
                    self._forget_events()
                    self._source = status.st_ino
                file.seek(self._offset)
                for line in file:
                    # The run is still writing this line.
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    if (event := journal.parse(line)) is not None:
                        self.add_event(event)
        except FileNotFoundError:
            self._read_checkpoints()

    def add_event(self, event: Event) -> None:
        """Add the next event of the journal."""
        self.summary = self._summaries[self._runs.next(event)]
        self.summary.add_event(event)

    def _read_checkpoints(self) -> None:
        try:
            save_times = {path: save_time(path) for path in sort_checkpoints(self.folder)}
            if save_times and save_times == self._source:
                return
            state = journal.read_state(self.folder)
        # A checkpoint was removed meanwhile: the next update reads the others.
        except FileNotFoundError:
            return
        self.summary, self._source = JournalSummary(max_steps=state.max_steps), save_times
        step, last_save = 0, max(save_times.values(), default=None)
        for line in state.log_history:
            step = line.get("step", step)
            self.summary.add_event({"event": "log", "time": last_save, "step": step, "logs": line})
        for path, saved in save_times.items():
            self.summary.add_event(
                {"event": "checkpoint", "time": saved, "step": int(path.rpartition("-")[2]), "folder": path}
            )
        self.summary.add_event({"event": "state", "time": last_save, "step": state.global_step})

    def read(self) -> dict[str, Any]:
        """The current data of the page, as plain values; times in seconds since 1970.

        Raises:
            InvalidArgument: if the folder has neither a journal nor a state.
        """
        self._read_new_events()
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """The data of what has been read."""
        run, now = self.summary, time.time()
        state, begin, (steps, seconds) = run.state(now), run.begin or {}, run.pace
        is_running = state in ("running", "silent")
        last = run.last_event or {"time": None, "step": 0}
        if state == "running" and run.phase and run.phase["phase"] != "training":
            # An evaluation or a save counts from its start on, also for the time that is left.
            seconds += now - run.phase["time"]
            last = {**last, "time": now}
        names = sort_names([name for name, (curve_steps, _) in run.curves.items() if curve_steps])
        # Rotation removes checkpoints.
        files = os.listdir(self.folder)
        checkpoints = [event for path, event in run.checkpoints.items() if os.path.basename(path) in files]
        recent = {name: sum(i["seconds"].get(name, 0.0) for i in run.intervals) for name in journal.ACTIVITIES}
        page = {
            "folder": self.folder,
            "state": state,
            **{name: (run.end or {}).get(name) for name in ("reason", "message")},
            "step": last["step"],
            "max_steps": run.max_steps,
            "seconds_left": (run.max_steps - last["step"]) / steps * seconds if steps and is_running else None,
            "started": run.spans[0]["time"] if run.spans else None,
            "updated": last["time"],
            **{name: begin.get(name) for name in ("device", "world_size", "host", "pid", "resumed_from")},
            "logging_steps": begin.get("logging_steps"),
            "phase": {"name": run.phase["phase"], "since": run.phase["time"]} if run.phase and is_running else None,
            "goodput": journal.goodput([*run.spans, {**last, "event": "now"}]) if run.begin else None,
            "downtime": run.downtime,
            "values": run.values,
            "seconds": {"recent": recent, "all": {name: run.seconds[name] for name in journal.ACTIVITIES}},
            "checkpoints": _rows(checkpoints, "folder", "step", "time"),
            "non_finite_step": run.non_finite_step,
            "warnings": _rows(run.warnings, "text", "step", "time"),
            "curves": {name: dict(zip(("steps", "values"), run.curves[name], strict=True)) for name in names},
        }
        nan = find_nan(page)
        return page | {"metrics": {name: run.metric(name, nan) for name in names}}


def find_nan(page: dict[str, Any]) -> NanSpan | None:
    """Since when the loss may be NaN; None if the last loss is a number.

    It is None too if only the last line has a loss that was not finite, but a gradient that is.
    """
    losses = {name: (curve["steps"], curve["values"]) for name, curve in page.get("curves", {}).items()}
    since, (logged_steps, logged_losses) = page.get("non_finite_step"), losses.get("loss", ((), ()))
    if since and since > max(logged_steps, default=0):
        # No log line says yet whether the loss stayed NaN, but an evaluation since then may say that it did not.
        usable = last_usable_step(losses, since)
        return NanSpan(since, since, usable) if usable < since else None
    before_last = logged_losses[-2:-1]
    has_finite_gradient = math.isfinite(page.get("values", {}).get("grad_norm", math.nan))
    if has_finite_gradient and not any(map(math.isnan, before_last)):
        return None
    return nan_span(losses, since)


def kept_goodput(page: dict[str, Any]) -> float | None:
    """The goodput; None if it is unknown, and for a diverged run or one that ended early without a checkpoint."""
    is_kept = page["checkpoints"] or page["state"] in ("running", "silent", "complete")
    return page["goodput"] if is_kept and not find_nan(page) else None


def _rows(events: Iterable[Event], *names: str) -> list[dict[str, Any]]:
    return [{name: event[name] for name in names} for event in events]


class RunRecord:
    """The log of a run and what happened to it, from files that are read once: for `plot` and `diff`.

    Attributes:
        folder: the run's `output_dir`, or a checkpoint.
        state: like `journal.read_state`, with the log lines that only the journal has.

    Raises:
        InvalidArgument: if there is no run.
    """

    def __init__(self, folder: str) -> None:
        journal.check_folder(folder)
        self.folder, self._events = folder, journal.read_events(folder)
        # Of the last run, what no resume undid, with the time in seconds without pauses before restarts.
        last_run = journal.without_pauses(journal.select_last_run(self._events))
        pairs = (pair for pair in pairwise([*last_run[:1], *last_run]) if pair[1]["event"] == "begin")
        #: Of each resume, its step, the last known one before it, and whether a later one may have been lost too.
        self.resumes = [
            (now["step"], before["step"], before["event"] != "end") for before, now in pairs if now.get("resumed_from")
        ]
        self._kept = journal.remove_undone_steps(last_run)
        self._logs = [event for event in self._kept if event["event"] == "log"]
        try:
            self.state = journal.read_state(folder)
        except InvalidArgument:
            if not self._kept:
                raise
            self.state = TrainerState()
        lines = [{**event["logs"], "step": event["step"]} for event in self._logs]
        merged = journal.merge_logs(self.state.log_history, lines)
        joined = self._joined_shares()
        shown = (line | joined.get(line.get("step", 0), {}) if "data_wait" in line else line for line in merged)
        self.state.log_history = list(shown)
        self._partial = {event["step"] for event in self._logs if event.get("is_partial")}
        #: Seconds without pauses; None without a journal.
        self.seconds = last_run[-1]["time"] if last_run else None

    @cached_property
    def page(self) -> dict[str, Any]:
        """The data of a page of `watch`."""
        run = WatchedRun(self.folder)
        for event in self._events:
            run.add_event(event)
        return run.describe() if self._events else run.read()

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the run, which its journal or a checkpoint has; empty if none are known."""
        starts = [event["arguments"] for event in self._kept if "arguments" in event]
        return starts[-1] if starts else read_arguments_of_run(self.folder, skip_unreadable=True)

    def read_log(self, x: str) -> tuple[TrainerState, dict[float, float]]:
        """The state with places on the axis `x` as the steps of log lines; and place → optimizer step.

        A loss that leaves out some that were not finite is NaN.

        Args:
            x: 'step', 'epoch' or 'time', in seconds without pauses before restarts, for which it needs a journal.
        """
        pairs: list[tuple[Any, dict[str, Any]]] = [(line.get("step"), line) for line in self.state.log_history]
        if x == "epoch":
            pairs = [(line["epoch"], line) for _, line in pairs if "epoch" in line]
        elif x == "time":
            pairs = [(event["time"], {**event["logs"], "step": event["step"]}) for event in self._logs]
            closing = ((place, {"step": step, **shares}) for place, step, shares, _ in self._last_shares())
            pairs = sorted([*pairs, *closing], key=lambda pair: pair[0])
        # A mean that leaves out losses is no value of a curve.
        for place, (at, line) in enumerate(pairs):
            if "loss" in line and is_number(step := line.get("step")) and step in self._partial:
                pairs[place] = at, line | {"loss": math.nan}
        log = [line if x == "step" else {**line, "step": place} for place, line in pairs]
        steps = {place: line.get("step", place) for place, line in pairs if is_number(place)}
        return replace(self.state, log_history=log), steps

    def _last_shares(self) -> Iterator[tuple[float, int, dict[str, float], float]]:
        """What is between the last log line before each restart, and before the end: its end, shares and seconds.

        Yields:
            time and step of its end, the shares of time, and the seconds.
        """
        if not any("data_wait" in event["logs"] for event in self._logs):
            return
        seconds = Counter[str]()
        last = self._kept[0]
        is_logged = False
        for event in [*self._kept, {"event": "begin"}]:
            if event["event"] == "interval":
                # The interval of a log line is written after it.
                seconds.update({} if is_logged else event["seconds"])
                last, is_logged = event, False
            elif event["event"] == "begin" or "data_wait" in event.get("logs", ()):
                if event["event"] == "begin" and (total := sum(seconds.values())) > 0:
                    names = {"data_wait": "data", "eval_share": "evaluation", "save_share": "saving"}
                    shares = {name: seconds[part] / total for name, part in names.items()}
                    yield last["time"], last["step"], shares, total
                seconds.clear()
                is_logged = event["event"] == "log"

    def _joined_shares(self) -> dict[int, dict[str, float]]:
        """For axes without time: step → shares of a log line with what no line has, before a restart or at the end.

        Before a restart it is joined to the first line after, at the end to the last line.
        """
        lines = [event for event in self._logs if "data_wait" in event["logs"]]
        starts = [e["time"] for e in self._kept if e["event"] == "begin" or "data_wait" in e.get("logs", ())]
        joined: dict[int, tuple[float, dict[str, float]]] = {}
        for place, _, shares, total in self._last_shares():
            line = next((event for event in lines if event["time"] > place), lines[-1])
            start = max((start for start in starts if start < line["time"]), default=line["time"])
            seconds, known = joined.get(line["step"], (line["time"] - start, line["logs"]))
            # A journal may lack a share.
            both = {name: known.get(name, 0) * seconds + share * total for name, share in shares.items()}
            joined[line["step"]] = seconds + total, {name: value / (seconds + total) for name, value in both.items()}
        return {step: shares for step, (_, shares) in joined.items()}

    def find_incidents(self, x: str) -> tuple[list[tuple[float, float]], tuple[float, float, str] | None]:
        """The places of restarts and of the first loss that was not finite, on the axis `x`.

        Returns:
            For each restart, since where work was lost, and where it was; and the place of the loss, twice as it is
            exact, and its step in words; None if unknown.
        """
        logs = [event for event in self._logs if event["step"] and event["logs"].get("epoch")]
        scale = 1 if x == "step" else logs[-1]["logs"]["epoch"] / logs[-1]["step"] if logs else 0.0
        places = [event["time"] if x == "time" else event["step"] * scale for event in self._kept]
        begins = [n for n, event in enumerate(self._kept) if event["event"] == "begin" and event.get("resumed_from")]
        # A journal may begin with a restart, whose time is 0.
        restarts = [(places[n - (x == "time")], places[n]) for n in begins if n or x != "time"]
        # On an accelerator losses are read at log lines alone, and no step is named.
        found = ((event["time"], step) for event in self._kept if (step := event.get("non_finite_step")))
        firsts = ((time if x == "time" else step * scale, f"at step {format_number(step)}") for time, step in found)
        return restarts, next(((place, place, text) for place, text in firsts), None)


def describe_step(page: dict[str, Any]) -> str:
    """The state and the last known step, which of a run that did not write its end is not that of the end."""
    word = "at" if page["state"] in ("running", "stopped", "failed") else "after"
    return f"{page['state'].replace('unobserved', 'state unknown')} {word} step {page['step']:,}"


def describe_state(record: RunRecord, arguments: dict[str, Any], *, is_alone: bool) -> str:
    """What became of a run, if it is not complete; else a missing evaluation. Of a single run, time and resumes too."""
    page, state = record.page, record.state
    seconds = f" in {format_duration(record.seconds)}" if is_alone and record.seconds else ""
    resumes = _describe_resumes(record) if is_alone and record.resumes else ""
    length = f" of {page['max_steps']:,}" * bool(page["max_steps"])
    if nan := find_nan(page):
        return f"{DIVERGED} at step {format_span(nan.first, nan.last)}{length}{resumes}"
    if page["state"] != "complete" and (page["max_steps"] or page["state"] != "unobserved"):
        return describe_step(page) + length + seconds + resumes
    # A checkpoint of the last step of an epoch is written before its evaluation, as by transformers.
    epochs = [line.get("epoch") for line in state.log_history if any(name.startswith("eval_") for name in line)]
    is_last = arguments.get("eval_strategy") == "epoch" and 0 < state.global_step == state.max_steps
    if is_last and not page["started"] and state.epoch not in epochs:
        return f"the evaluation after epoch {state.epoch:g} was not saved (observe=True keeps it)"
    complete = f"complete: {count_of(page['step'], 'steps')}{seconds}{resumes}"
    return complete if is_alone and page["state"] == "complete" else ""


def _describe_resumes(record: RunRecord) -> str:
    """The last place where a run resumed, the steps that all resumes undid, and what they cost; after a comma."""
    page, resumes = record.page, record.resumes
    often = f"{len(resumes)} times, last " * (len(resumes) > 1)
    undone = sum(max(0, last - step) for step, last, _ in resumes)
    # Of a run that was killed, the last event is known, but not the last step.
    least = "at least " * any(is_partial for *_, is_partial in resumes)
    again = f" ({least}{count_of(undone, 'steps')} done again)" * bool(undone)
    downtime = f", {format_duration(page['downtime'])} of downtime" * bool(page["downtime"])
    goodput = "" if (share := kept_goodput(page)) is None else f", goodput {share:.0%}"
    return f", resumed {often}at step {resumes[-1][0]:,}{again}{downtime}{goodput}"
