"""The facts of a run for `watch`, `ask` and plots, from its journal, or else its newest trainer_state.json."""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hftrainer.base.messages import count_of, format_duration, format_number, format_span
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.layout import save_time, sort_checkpoints, step_of
from hftrainer.checkpointing.saved_arguments import read_arguments_of_run
from hftrainer.errors import InvalidArgument
from hftrainer.monitoring import journal
from hftrainer.reporting.metrics import NanSpan, is_number, last_usable_step, nan_span, sort_names

#: The word for a run whose loss is not finite at last.
DIVERGED = "diverged"


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run at a moment: what `watch` shows and its `--json` prints. Times are seconds since 1970.

    Attributes:
        folder: the run's `output_dir`, or a checkpoint.
        state: one of the words of `JournalSummary.state`.
        reason, message: why the run ended, as in the journal; None before its end.
        step, max_steps: optimizer steps done, and those of the complete run, 0 if unknown.
        seconds_left: until the last step, at the speed since the last start; None if unknown or the run has ended.
        started, updated: the first start, and the last sign of life.
        device, world_size, host, pid, resumed_from, logging_steps: of the last start; None without a journal.
        phase: the `name` of the activity of a run that has not ended, and `since` when; None if unknown.
        goodput: share of the time in steps that were kept; None without a journal.
        downtime: seconds of the pauses after failures.
        values: the last value of everything that training logged besides curves.
        seconds: 'recent' and 'all' → activity → seconds.
        checkpoints: `folder`, `step` and `time` of those that exist, the last saved one last.
        non_finite_step: the first step since the last finite loss that a warning names for its loss.
        warnings: `text`, `step` and `time` of each.
        curves: loss or metric → its `steps` and `values`.
        metrics: loss or metric → its `last` value, the `best` one, and that one's `best_step`.
    """

    folder: str
    state: str
    reason: str | None
    message: str | None
    step: int
    max_steps: int
    seconds_left: float | None
    started: float | None
    updated: float | None
    device: str | None
    world_size: int | None
    host: str | None
    pid: int | None
    resumed_from: str | None
    logging_steps: float | None
    phase: dict[str, Any] | None
    goodput: float | None
    downtime: float
    values: dict[str, float]
    seconds: dict[str, dict[str, float]]
    checkpoints: list[dict[str, Any]]
    non_finite_step: int | None
    warnings: list[dict[str, Any]]
    curves: dict[str, dict[str, list[float]]]
    metrics: dict[str, dict[str, float | None]]

    @cached_property
    def nan(self) -> NanSpan | None:
        """Since when the loss may be NaN; None if the last loss is a number.

        It is None too if only the last line has a loss that was not finite, but a gradient that is.
        """
        losses = {name: (curve["steps"], curve["values"]) for name, curve in self.curves.items()}
        since, (logged_steps, logged_losses) = self.non_finite_step, losses.get("loss", ([], []))
        if since and since > max(logged_steps, default=0):
            # No log line says yet whether the loss stayed NaN, but an evaluation since then may say that it did not.
            usable = last_usable_step(losses, since)
            return NanSpan(since, since, usable) if usable < since else None
        has_finite_gradient = math.isfinite(self.values.get("grad_norm", math.nan))
        if has_finite_gradient and not any(map(math.isnan, logged_losses[-2:-1])):
            return None
        return nan_span(losses, since)

    @property
    def kept_goodput(self) -> float | None:
        """The goodput; None if it is unknown, and for a diverged run or one that ended early without a checkpoint."""
        is_kept = self.checkpoints or self.state in ("running", "silent", "complete")
        return self.goodput if is_kept and not self.nan else None


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
        self._summaries = defaultdict[int, journal.JournalSummary](journal.JournalSummary)
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

    def add_event(self, event: dict[str, Any]) -> None:
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
        self.summary, self._source = journal.JournalSummary(max_steps=state.max_steps), save_times
        step, last_save = 0, max(save_times.values(), default=None)
        for line in state.log_history:
            step = line.get("step", step)
            self.summary.add_event({"event": "log", "time": last_save, "step": step, "logs": line})
        for path, saved in save_times.items():
            self.summary.add_event({"event": "checkpoint", "time": saved, "step": step_of(path), "folder": path})
        self.summary.add_event({"event": "state", "time": last_save, "step": state.global_step})

    def read(self) -> RunFacts:
        """The facts by now.

        Raises:
            InvalidArgument: if the folder has neither a journal nor a state.
        """
        self._read_new_events()
        return self.describe()

    def describe(self) -> RunFacts:
        """The facts by what has been read."""
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
        facts = RunFacts(
            folder=self.folder,
            state=state,
            **{name: (run.end or {}).get(name) for name in ("reason", "message")},
            step=last["step"],
            max_steps=run.max_steps,
            seconds_left=(run.max_steps - last["step"]) / steps * seconds if steps and is_running else None,
            started=run.spans[0]["time"] if run.spans else None,
            updated=last["time"],
            **{key: begin.get(key) for key in ("device", "world_size", "host", "pid", "resumed_from", "logging_steps")},
            phase={"name": run.phase["phase"], "since": run.phase["time"]} if run.phase and is_running else None,
            goodput=journal.goodput([*run.spans, {**last, "event": "now"}]) if run.begin else None,
            downtime=run.downtime,
            values=run.values,
            seconds={"recent": recent, "all": {name: run.seconds[name] for name in journal.ACTIVITIES}},
            checkpoints=[{name: event[name] for name in ("folder", "step", "time")} for event in checkpoints],
            non_finite_step=run.non_finite_step,
            warnings=[{name: event[name] for name in ("text", "step", "time")} for event in run.warnings],
            curves={name: dict(zip(("steps", "values"), run.curves[name], strict=True)) for name in names},
            metrics={},
        )
        return replace(facts, metrics={name: run.metric(name, facts.nan) for name in names})


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
        begins = [n for n, e in enumerate(last_run) if e["event"] == "begin" and e.get("resumed_from")]
        pairs = ((last_run[max(0, n - 1)], last_run[n]) for n in begins)
        #: Of each resume, its step, the last known one before it, and whether a later one may have been lost too.
        self.resumes = [(now["step"], before["step"], before["event"] != "end") for before, now in pairs]
        self._kept = journal.remove_undone_steps(last_run)
        self._logs = [event for event in self._kept if event["event"] == "log"]
        try:
            self.state = journal.read_state(folder)
        except InvalidArgument:
            if not self._kept:
                raise
            self.state = TrainerState()
        merged = journal.merge_logs(self.state.log_history, [e["logs"] | {"step": e["step"]} for e in self._logs])
        joined = self._joined_shares()
        self.state.log_history = [e | joined.get(e.get("step", 0), {}) if "data_wait" in e else e for e in merged]
        self._partial = {event["step"] for event in self._logs if event.get("is_partial")}
        #: Seconds without pauses; None without a journal.
        self.seconds = last_run[-1]["time"] if last_run else None

    @cached_property
    def facts(self) -> RunFacts:
        """What `watch` shows of the run."""
        run = WatchedRun(self.folder)
        for event in self._events:
            run.add_event(event)
        return run.describe() if self._events else run.read()

    @property
    def early_stopping(self) -> str:
        """The name of the callback, if the newest checkpoint of a run without a journal says that it ended the run."""
        name = "EarlyStoppingCallback"
        saved = (self.state.stateful_callbacks or {}).get(name, {})
        values = saved.get("args", {}) | saved.get("attributes", {}) if isinstance(saved, dict) else {}
        counter, patience = (values.get(f"early_stopping_patience{part}", math.inf) for part in ("_counter", ""))
        return name if self.facts.state == "unobserved" and math.inf > counter >= patience else ""

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the run, which its journal or a checkpoint has; empty if none are known."""
        starts = [event["arguments"] for event in self._kept if "arguments" in event]
        return starts[-1] if starts else read_arguments_of_run(self.folder, skip_unreadable=True)

    @property
    def known_arguments(self) -> dict[str, Any]:
        """The arguments, and the numbers of processes and of steps per epoch, as far as they are known."""
        known = dict(self.arguments)
        if device := self.facts.device:
            known |= {"processes": self.facts.world_size, "device": device.partition(":")[0]}
        # Runs with other data differ in it. With an incomplete last accumulation it is not known exactly.
        steps = self.state.global_step / (self.state.epoch or math.inf)
        if known and steps and math.isclose(steps, round(steps)):
            known["steps per epoch"] = round(steps)
        return known

    @cached_property
    def texts(self) -> dict[str, str]:
        """Names and last values of what was logged as text, which has no curve."""
        return {
            name: value for line in self.state.log_history for name, value in line.items() if isinstance(value, str)
        }

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


def describe_step(facts: RunFacts) -> str:
    """The state and the last known step. A run that did not write its end may have gone on after that step."""
    word = "at" if facts.state in ("running", "stopped", "failed") else "after"
    return f"{facts.state.replace('unobserved', 'state unknown')} {word} step {facts.step:,}"


def describe_state(record: RunRecord, arguments: dict[str, Any], *, is_alone: bool) -> str:
    """What became of a run. For a single run, also the metrics that have no curve, since their values are text."""
    values = ", ".join(f"{name} (last {textwrap.shorten(text, 40)!r})" for name, text in record.texts.items())
    texts = f"no curve, since it is text: {values}" if is_alone and values else ""
    return "; ".join(filter(None, (_describe_end(record, arguments, is_alone=is_alone), texts)))


def _describe_end(record: RunRecord, arguments: dict[str, Any], *, is_alone: bool) -> str:
    """What became of a run that is not complete, or a missing evaluation. For a single run, also time and resumes."""
    facts, state = record.facts, record.state
    seconds = f" in {format_duration(record.seconds)}" if is_alone and record.seconds else ""
    resumes = _describe_resumes(record) if is_alone and record.resumes else ""
    length = f" of {facts.max_steps:,}" * bool(facts.max_steps)
    if nan := facts.nan:
        if is_alone and facts.step > nan.last:
            length = f", but ran on to step {facts.step:,}{length}{seconds}"
        return f"{DIVERGED} at step {format_span(nan.first, nan.last)}{length}{resumes}"
    if facts.state != "complete" and (facts.max_steps or facts.state != "unobserved"):
        if facts.reason == "TrialPruned":
            return f"pruned at step {facts.step:,}{length}{seconds}{resumes}"
        if by := facts.message if facts.reason == "stopped" else record.early_stopping:
            return f"ended by {by} at step {facts.step:,}{length}{seconds}{resumes}"
        hint = " (observe=True would tell)" if is_alone and facts.state == "unobserved" else ""
        return describe_step(facts) + length + _describe_cause(facts) + hint + seconds + resumes
    # A checkpoint of the last step of an epoch is written before its evaluation, as by transformers.
    epochs = [line.get("epoch") for line in state.log_history if any(name.startswith("eval_") for name in line)]
    is_last = arguments.get("eval_strategy") == "epoch" and 0 < state.global_step == state.max_steps
    if is_last and not facts.started and state.epoch not in epochs:
        return f"the evaluation after epoch {state.epoch:g} was not saved (observe=True keeps it)"
    complete = f"complete: {count_of(facts.step, 'steps')}{seconds}{resumes}"
    return complete if is_alone and facts.state == "complete" else ""


def _describe_cause(facts: RunFacts) -> str:
    """The error or the signal that ended a run, in brackets."""
    if facts.reason in (None, "stopped"):
        return ""
    error = textwrap.shorten(f"{facts.reason}: {facts.message}", 80, placeholder=" …")
    return f" ({error if facts.message else facts.reason})"


def _describe_resumes(record: RunRecord) -> str:
    """The last place where a run resumed, the steps that all resumes undid, and what they cost; after a comma."""
    facts, resumes = record.facts, record.resumes
    often = f"{len(resumes)} times, last " * (len(resumes) > 1)
    undone = sum(max(0, last - step) for step, last, _ in resumes)
    # Of a run that was killed, the last event is known, but not the last step.
    least = "at least " * any(is_partial for *_, is_partial in resumes)
    again = f" ({least}{count_of(undone, 'steps')} done again)" * bool(undone)
    downtime = f", {format_duration(facts.downtime)} of downtime" * bool(facts.downtime)
    goodput = "" if (share := facts.kept_goodput) is None else f", goodput {share:.0%}"
    killed = "killed and " * all(is_partial for *_, is_partial in resumes)
    return f", {killed}resumed {often}at step {resumes[-1][0]:,}{again}{downtime}{goodput}"
