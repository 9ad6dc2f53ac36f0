"""The journal of a run: its events, one JSON object per line. `watch` and `plot` read it, and a run's saved log.

Every line has `time` (seconds since 1970), `event` and `step` (optimizer steps done). The events are:

- `begin`: `train()` started; `max_steps`, `logging_steps` or null, `world_size`, `device`, `pid`, `host`,
  `resumed_from`, a folder or null, and `arguments` without tokens and output paths.
- `log`: `logs`, a line of `log_history`; and `is_partial` if some losses since the line before were not finite, so that
  its `loss` may leave them out and be too low.
- `interval`: the time since the last interval; `steps`, and `seconds` by activity: 'steps' (forward, backward,
  optimizer), 'data' (waiting for it), 'evaluation' and 'saving'; together all of the time. Written at log lines, at the
  start and end of phases, and at the end.
- `phase`: the activity that starts: 'training', 'evaluation' or 'saving'.
- `checkpoint`: a checkpoint is complete, in `folder`.
- `warning`: `text`, and `non_finite_step` where the loss of that step is not finite.
- `end`: `reason`, such as 'complete', 'stopped' or the name of an error. `message` is the first line of an error, or
  the callback that stopped the run.
"""

from __future__ import annotations

import bisect
import heapq
import json
import logging
import math
import os
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hftrainer.arguments.storage_url import explain_unreadable_url
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.layout import checkpoints_newest_first
from hftrainer.errors import InvalidArgument, suggest
from hftrainer.parallel.environment import has_ended
from hftrainer.reporting.metrics import NanSpan, choose_best, logged_values

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
#: The activities of an interval.
ACTIVITIES = ("steps", "data", "evaluation", "saving")
#: Reasons of an end after which no restart is needed.
COMPLETE = ("complete", "stopped")
#: Reasons of an end after which a pause is the user's choice, and no loss of time.
CHOSEN = (*COMPLETE, "Ctrl-C", "TrialPruned")
#: Minimum of the seconds after which a run is silent, in addition to three times its longest pause.
SILENCE = 300.0

Event = dict[str, Any]


class Journal:
    """Appends events to the journal of a run.

    Attributes:
        folder: the run's `output_dir`; None to write nothing, as on other ranks and after a failure.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event. After a failure such as a full disk, warn once and write no more events."""
        if self.folder is None:
            return
        line = {"time": round(time.time(), 3), "event": event, "step": step, **values}
        try:
            os.makedirs(self.folder, exist_ok=True)
            append_line(os.path.join(self.folder, JOURNAL_NAME), line)
        except OSError as error:
            # Before the warning, which would otherwise be written to the journal.
            self.folder = None
            logger.warning("The journal cannot be written, so it ends here: %s", error)


def append_line(path: str, value: dict[str, Any], *, is_durable: bool = False) -> None:
    """Append a JSON object as a line, after ending a line that a kill left incomplete.

    Args:
        path: the file.
        value: the object; other types than JSON's become strings.
        is_durable: whether to wait until the line is on the disk.
    """
    with open(path, "a+b") as file:
        is_complete = not file.tell() or (file.seek(-1, os.SEEK_END), file.read(1))[1] == b"\n"
        file.write((b"" if is_complete else b"\n") + json.dumps(value, default=str).encode() + b"\n")
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def parse(line: bytes) -> dict[str, Any] | None:
    """The event in a line of a journal; None if a kill truncated the line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "event", "step"} <= event.keys() else None


def check_folder(folder: str) -> None:
    """Raise `InvalidArgument` if the path is not a folder."""
    if not os.path.isdir(folder):
        reason = explain_unreadable_url(folder)
        problem = f": {reason}" if reason else " is not a folder" if os.path.exists(folder) else " does not exist"
        parent, name = os.path.split(os.path.abspath(folder))
        siblings = [entry.name for entry in os.scandir(parent) if entry.is_dir()] if os.path.isdir(parent) else []
        advice = suggest(name, siblings, ": pass a run's output_dir")
        raise InvalidArgument(f"{folder}{problem}{advice}")


def read_events(folder: str) -> list[dict[str, Any]]:
    """The events in a run's folder, in order; empty without a journal. Truncated lines are skipped."""
    try:
        with open(os.path.join(folder, JOURNAL_NAME), "rb") as file:
            return [event for line in file if (event := parse(line)) is not None]
    except FileNotFoundError:
        return []


class RunNumbers:
    """The run of each event of a journal, by number: a start from scratch begins a run, a resumed one continues it.

    A resume from a checkpoint that an earlier run has written continues that one.
    """

    def __init__(self) -> None:
        self._number = self._count = 0
        self._writers: dict[str, int] = {}

    def next(self, event: dict[str, Any]) -> int:
        """The number of the next event's run."""
        if event["event"] == "begin" and event.get("resumed_from") is None:
            self._count += 1
            self._number = self._count
        elif event["event"] == "begin":
            self._number = self._writers.get(Path(str(event["resumed_from"])).name, self._number)
        elif event["event"] == "checkpoint":
            self._writers[str(event.get("folder"))] = self._number
        return self._number


def select_last_run(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of the run to which the last event belongs."""
    runs = list(map(RunNumbers().next, events))
    return [event for event, run in zip(events, runs, strict=True) if run == runs[-1]]


def remove_undone_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of the last run, without those of steps that a resume from an earlier checkpoint undid."""
    remaining: list[dict[str, Any]] = []
    for event in select_last_run(events):
        if event["event"] == "begin":
            remaining = [old for old in remaining if old["event"] in ("begin", "end") or old["step"] <= event["step"]]
        remaining.append(event)
    return remaining


def without_pauses(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with their time in seconds since the first, without the pauses before restarts."""
    moved, skipped = [], events[0]["time"] if events else 0.0
    for before, event in pairwise([*events[:1], *events]):
        skipped += event["time"] - before["time"] if event["event"] == "begin" else 0.0
        moved.append({**event, "time": event["time"] - skipped})
    return moved


def goodput(events: list[dict[str, Any]]) -> float | None:
    """Fraction of the time since the start from scratch spent on steps that count; None before the first interval.

    Pauses that the user chose are no part of this time.
    """
    remaining = remove_undone_steps(events)
    intervals = [event for event in remaining if event["event"] == "interval"]
    if not intervals:
        return None
    useful = sum(event["seconds"]["steps"] + event["seconds"]["data"] for event in intervals)
    pairs = [pair for pair in pairwise(remaining) if pair[1]["event"] != "begin" or pair[0].get("reason") not in CHOSEN]
    elapsed: float = sum(now["time"] - before["time"] for before, now in pairs)
    # Times are rounded, and a run is measured from before its first event.
    return min(1.0, useful / elapsed) if elapsed > 0 else None


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
            elif self.last_event.get("reason") not in CHOSEN:
                self.downtime += pause
        self.last_event = event
        self.non_finite_step = self.non_finite_step or event.get("non_finite_step")
        if kind in ("phase", "end"):
            setattr(self, kind, event)
        if kind in ("interval", "end"):
            self.spans.append(event)
        if kind == "warning":
            self.warnings.append(event)
        if kind == "checkpoint":
            # A folder that was written again becomes the last.
            self.checkpoints.pop(event["folder"], None)
            self.checkpoints[event["folder"]] = event
        add = {"begin": self._add_begin, "log": self._add_log, "interval": self._add_interval}
        if kind in add:
            add[kind](event)

    def _add_begin(self, event: Event) -> None:
        self.begin, self.end, self.phase, self.pace = event, None, None, (0, 0.0)
        self.max_steps = event["max_steps"] or 0
        if (self.non_finite_step or 0) > event["step"]:
            self.non_finite_step = None
        self.spans = remove_undone_steps([*self.spans, event])
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
            if reason in COMPLETE:
                return reason
            # The other names are those of errors.
            return "stopped" if reason in CHOSEN or reason.startswith("SIG") else "failed"
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


def run_names(folders: list[str]) -> list[str]:
    """The shortest suffixes of the paths that distinguish the runs."""
    parts = [Path(os.path.realpath(folder)).parts for folder in folders]
    depth = next((n for n in range(1, 9) if len({path[-n:] for path in parts}) == len(parts)), 8)
    return [str(Path(*path[-depth:])) for path in parts]


def find_runs(folder: str, place: str = "*/") -> list[str]:
    """The newest runs in folders of a folder, at most five; with an empty `place`, the folder itself if it is one."""
    names = ("checkpoint-*/", JOURNAL_NAME, layout.TRAINER_STATE_NAME)
    runs = {path.parent for name in names for path in Path(folder).glob(place + name)}
    return list(map(str, sorted(runs, key=os.path.getmtime, reverse=True)[:5]))


def read_state(folder: str) -> TrainerState:
    """The final state of the run in `folder`, or else of its newest checkpoint; if several runs wrote there, the last.

    Raises:
        InvalidArgument: if both are missing, or the file cannot be read.
    """
    check_folder(folder)
    # Only the log is needed, so a checkpoint without weights is enough.
    paths = [Path(place) / layout.TRAINER_STATE_NAME for place in (folder, *checkpoints_newest_first(folder))]
    files = [path for path in paths if path.is_file()]
    if not files:
        if runs := find_runs(folder):
            raise InvalidArgument(f"no run has written in {folder}; did you mean {' or '.join(runs)}?")
        advice = "a run writes them from its start with observe=True, any other when it saves"
        raise InvalidArgument(f"{folder} has no logs of a run (no {JOURNAL_NAME}, no checkpoint): {advice}")
    try:
        state = TrainerState.load_from_json(str(file := files[0]))
        # A later run may have fewer steps. Of one run, as in a copy with other times, each log begins the next.
        if (file := max(files, key=os.path.getmtime)) == files[0]:
            return state
        last = TrainerState.load_from_json(str(file))
        return last if last.log_history != state.log_history[: len(last.log_history)] else state
    except ValueError as error:
        raise InvalidArgument(f"{file} cannot be read ({error}). Pass a complete checkpoint of the run.") from error


def merge_logs(saved: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved log lines and those that only the journal has, by step.

    Of the journal of an earlier run, which shares no line with them, those of later steps.
    """

    def step_of(line: dict[str, Any]) -> float:
        return step if isinstance(step := line.get("step"), (int, float)) else -1

    known = {(step_of(line), name) for line in saved for name in line.keys() - {"step", "epoch"}}
    texts, new_texts = ({json.dumps(line, sort_keys=True) for line in lines} for lines in (saved, new))
    first = 0 if texts & new_texts else max(map(step_of, saved), default=-1) + 1
    missing = (line for line in new if line["step"] >= first and not known & {(line["step"], name) for name in line})
    return [*heapq.merge(saved, missing, key=step_of)]
