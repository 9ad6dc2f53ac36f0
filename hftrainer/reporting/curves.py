"""The curves of plots: of one run, or of several runs for comparison."""

from __future__ import annotations

import bisect
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from hftrainer.base.messages import format_number, format_span
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.saved_arguments import SEEDS, differing_arguments
from hftrainer.errors import InvalidArgument
from hftrainer.monitoring.journal import run_names
from hftrainer.monitoring.run_facts import DIVERGED, RunRecord, describe_state, describe_step
from hftrainer.reporting import metrics
from hftrainer.reporting.metrics import EVALUATION_LOSS, LOSSES, PANEL_OF, PANELS, SHARES, SPEEDS

#: Entries of log lines → their names in legends and tables, if not the same.
WORDS = PANEL_OF | dict(zip(PANELS[SHARES], ("waiting for data", "evaluation", "saving", "training"), strict=True))
#: Unit of time → seconds. A time axis has the largest of which the longest run has two.
TIME_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
#: Horizontal axis → its label.
X_AXES = {"step": "Optimizer step", "epoch": "Epoch"} | {unit: f"Time ({unit})" for unit in TIME_UNITS}
#: Those of Okabe and Ito, which differ for colour-blind readers too, and four others.
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #56b4e9 #e69f00 #000000 #882255 #999933 #5e3c99 #a6611a".split()
#: Shape of a run's markers: matplotlib's name → plotly's name. Six: with the colours, 66 combinations.
MARKS = {"o": "circle", "s": "square", "X": "x", "D": "diamond", "p": "pentagon", "P": "cross"}
#: Line style: matplotlib's → plotly's.
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
#: Number of points from which a noisy curve is drawn faintly, under its mean, and others have no markers.
MANY = 30
#: Number of points from which a page has that choice.
FEW = 10
#: Number of parts of a long curve, of each of which only the lowest and the highest point are drawn.
MAX_PARTS = 1000
#: Number of runs from which evaluation losses have a panel of their own.
MANY_RUNS = 5
#: The first words of the states of runs that did not reach their end.
ENDED_EARLY = (DIVERGED, "killed", "stopped", "failed")
#: The highest value that is drawn. matplotlib cannot compute with the range of larger ones.
MAX_SHOWN = 1e250


@dataclass(frozen=True)
class Curve:
    """One curve of one run.

    Attributes:
        panel: the title of its panel.
        name: the name of the log entry.
        steps: optimizer steps, epochs, or time in the unit `x`.
        values: the values; some may be NaN.
        best: the index of the best value; None if unknown.
        run: the name of the run in a plot of several runs, else empty.
        member: the name of one of several runs that differ in seeds alone, which are one run; empty for their mean.
        settings: the arguments in which the run differs from the others, and their values.
        x: what `steps` holds, a key of `X_AXES`.
        colour: the colour of the run, or in a plot of one run the colour of the curve.
        dash: the index of its line style.
        mark: the shape of its markers, which distinguishes runs in black and white.
        owner: in a panel that one of several runs has alone, the entry of the legend, which names the run.
        restarts: where a resumed run started again, after the place since which its work was lost.
        non_finite: the interval of its first value that is not finite: its start and end on the axis, and its steps in
            words. If the journal has the step of a loss, the interval may end before the log line.
        start: where the interval of the first value began.
        pace: seconds per step of the interval of each value, with evaluations and saving; 0 if unknown.
        state: what became of the run, if not its end; and an evaluation that was not saved.
        width: of the line of its first `shared` values, which later curves have too, so that it is seen below them.
        is_best: whether the best value of its run is the best of all runs.
        diverged: where the loss of its run was first not finite; empty if the run did not diverge.
        most_points: the number of finite values that this curve of some run has, so that all are smoothed alike.
        extent: the share of the horizontal axis of its panel that the curve has.
    """

    panel: str
    name: str
    steps: list[float]
    values: list[float]
    best: int | None = None
    run: str = ""
    member: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    x: str = "step"
    colour: str = COLOURS[0]
    dash: int = 0
    mark: str = "o"
    owner: str = ""
    restarts: Sequence[tuple[float, float]] = ()
    non_finite: tuple[float, float, str] | None = None
    start: float = 0
    pace: Sequence[float] = ()
    state: str = ""
    width: float = 1.5
    shared: int = 0
    is_best: bool = False
    diverged: Sequence[float] = ()
    most_points: int = 0
    extent: float = 1

    @property
    def marked(self) -> list[int]:
        """The indices of the points with a marker.

        All of fewer than `MANY` points of one run, or evaluations of several; else of several runs about ten, fewer of
        a short run.
        """
        # The start of an interval, such as a restart, is no point.
        logged = {*self.steps}
        drawn = enumerate(zip(*self.points(self.values), strict=True))
        points = [index for index, (step, value) in drawn if step in logged and math.isfinite(value)]
        if not self.run or (self.name.startswith("eval_") and len(points) < MANY * self.extent):
            return points if len(points) < MANY else []
        every = max(1, len(points) // max(1, round(10 * self.extent)))
        # Shift the markers, so that those of coinciding runs do not overlap.
        return points[list(MARKS).index(self.mark) * every // len(MARKS) :: every]

    @cached_property
    def drawn_indices(self) -> list[int]:
        """The indices of the points that are drawn.

        All, or the lowest and highest of each of at most about twice `MAX_PARTS` parts; of a part of shares the last.
        """
        indices = range(len(self.values))
        size = max(1, len(self.values) // MAX_PARTS)
        if self.name in PANELS[SHARES]:
            return [*indices[::-size]][::-1]
        parts = (indices[start : start + size] for start in indices[::size])
        return sorted({extreme(part, key=self.values.__getitem__) for part in parts for extreme in (min, max)})

    @cached_property
    def _widths(self) -> list[float]:
        """The width of the interval of each value, which a restart begins too."""
        places = sorted([self.start, *self.steps, *(restart for _, restart in self.restarts)])
        return [step - places[max(0, bisect.bisect_left(places, step) - 1)] for step in self.steps]

    @cached_property
    def so_far(self) -> list[float]:
        """The values; shares of all the time up to their step."""
        if self.name not in PANELS[SHARES]:
            return self.values
        # Not 0 in sum.
        seconds = np.multiply(self._widths, 1.0 if self.x in TIME_UNITS else self.pace or 1.0) + 1e-12
        return (np.cumsum(self.values * seconds) / np.cumsum(seconds)).tolist()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What tables have: some of its values, the place of the best, and how many are not finite."""
        finite = list(filter(math.isfinite, self.so_far)) or [math.nan]
        ends = {"first": self.so_far[0], "last": self.so_far[-1], "lowest": min(finite), "highest": max(finite)}
        best, place = (None, None) if self.best is None else (self.values[self.best], self.steps[self.best])
        return ends | {"best": best, "best_step": place, "not_finite": len(self.gaps)}

    def points(self, values: list[float], floor: float = -math.inf) -> tuple[list[float], list[float]]:
        """The steps and values that are drawn, those below `floor` there.

        Speeds and shares are of the time since the log line before, so that the first value begins there, and over time
        the first speed after a restart at the restart. Curves over time have a gap where steps were undone, and a
        learning rate where it jumps. A share is drawn of all the time up to its step, so that evaluations and saves at
        intervals do not make it jump.
        """
        is_share = self.name in PANELS[SHARES]
        values = self.so_far if is_share else np.maximum(values, floor).tolist()
        steps, shown = ([column[index] for index in self.drawn_indices] for column in (self.steps, values))
        is_interval = PANEL_OF.get(self.name) in SPEEDS
        is_rate = self.name == "learning_rate"
        for lost, restart in self.restarts if is_rate or (self.x in TIME_UNITS and not is_share) else ():
            # Epochs of restarts are computed, and may be less than the logged ones.
            place = bisect.bisect_right(steps, restart * (1 + 1e-9))
            gap = [math.nan] if place and (lost < restart or (is_rate and metrics.is_jump(shown, place))) else []
            first = gap + (shown[place : place + 1] if is_interval else [])
            steps[place:place] = [restart] * len(first)
            shown[place:place] = first
        if is_interval and steps and steps[0] > self.start:
            steps, shown = [self.start, *steps], [shown[0], *shown]
        return steps, shown

    @cached_property
    def drawable(self) -> list[float]:
        """The values, at most `MAX_SHOWN`; some may be NaN."""
        return np.clip(self.values, -MAX_SHOWN, MAX_SHOWN).tolist()

    @cached_property
    def without_spikes(self) -> list[float]:
        """The values, but of speeds without single ones that are far from the others."""
        if PANEL_OF.get(self.name) in SPEEDS or len(self.finite) < FEW:
            return self.drawable
        calm = metrics.replace_spikes(self.drawable)
        # Many are no spikes, as in a metric that is 1 at every tenth step and else 0, or a loss of rare large values.
        share = 10 if self.panel in (*LOSSES, "gradient norm") else 100
        is_rare = share * sum(abs(a - b) > 0 for a, b in zip(calm, self.drawable, strict=True)) <= len(calm)
        return calm if is_rare else self.drawable

    @property
    def smoothings(self) -> list[str]:
        """The choices of a page that smooth it: of noisy values, not shares, rates, evaluations and single seeds."""
        is_exact = self.member or self.name in ("learning_rate", *PANELS[SHARES]) or self.name.startswith("eval_")
        levels = ["light", "strong"] if max(self.most_points, len(self.finite)) >= MANY else ["strong"]
        return [] if is_exact or len(self.finite) < FEW else levels

    @cached_property
    def mean(self) -> list[float] | None:
        """The lightly smoothed values of a curve that has many and can be smoothed, else None."""
        return self.smooth("light") if "light" in self.smoothings else None

    def smooth(self, level: str) -> list[float]:
        """The centred mean without spikes, by a key of `metrics.SMOOTHING`; of speeds, that of all steps."""
        # Speeds are of intervals, such as one of a single step at first. Over time, their steps are not known.
        is_counted = PANEL_OF.get(self.name) in SPEEDS and self.x not in TIME_UNITS
        steps = np.add(self._widths, 1e-12) if is_counted else np.ones(len(self.values))
        is_speed = (self.name.endswith("_per_second") or self.name == "mfu") and min(self.finite, default=0) > 0
        has_many, power = len(self.finite) >= MANY, -1 if is_speed else 1
        return metrics.smooth(self.without_spikes, steps, level, has_many=has_many, power=power)

    def below(self, top: float) -> list[float]:
        """The values, with a gap for those above `top`: the lines to them would be walls."""
        return [value if value <= top else math.nan for value in self.drawable]

    def shared_points(self, values: list[float], floor: float) -> tuple[list[float], list[float]]:
        """The points of the values that later curves have too; a gap for the others."""
        return self.points(values[: self.shared] + [math.nan] * (len(values) - self.shared), floor)

    def peaks(self, top: float) -> list[int]:
        """The index of the highest of each group of neighbours above `top`."""
        above = enumerate(index for index, value in enumerate(self.values) if value > top)
        groups = groupby(above, key=lambda pair: pair[1] - pair[0])
        return [max((index for _, index in group), key=self.values.__getitem__) for _, group in groups]

    @property
    def label(self) -> str:
        """The name in words, in a plot of several runs after the name of the run."""
        name = WORDS.get(self.name, self.name)
        return f"{self.member or self.run}: {name}" if self.run else name

    @property
    def legend_entry(self) -> str:
        """The name, in a plot of one run with the best value."""
        best = "" if self.run or self.best is None else f" (★ best: {self.format_best()})"
        return self.owner or f"{self.name}{best}"

    def describe_place(self, index: int) -> str:
        """The place of a value in words."""
        number = format_number(self.steps[index])
        return f"{number} {self.x}" if self.x in TIME_UNITS else f"{self.x} {number}"

    def format_best(self) -> str:
        """The best value and its place as text."""
        return "" if self.best is None else f"{self.format(self.values[self.best])} at {self.describe_place(self.best)}"

    def format(self, value: float) -> str:
        """A value as text."""
        return f"{value:.1%}" if self.name in PANELS[SHARES] else format_number(value)

    @cached_property
    def gaps(self) -> list[int]:
        """The indices of the values that are not finite."""
        return [index for index, value in enumerate(self.values) if not math.isfinite(value)]

    @cached_property
    def end(self) -> int | None:
        """The index of the last finite loss of a run that ended early; None of other curves."""
        finite = (index for index, value in enumerate(self.values) if math.isfinite(value))
        return max(finite, default=None) if self.name == "loss" and self.state.startswith(ENDED_EARLY) else None

    @property
    def legend_colour(self) -> str:
        """The colour of its entry: black for a curve of several runs."""
        return "black" if self.run and not self.owner else self.colour

    @cached_property
    def finite(self) -> list[float]:
        """The finite values."""
        return list(filter(math.isfinite, self.values))


def read_curves(runs: Sequence[str | RunRecord], x: str = "step", *, join_seeds: bool = False) -> list[Curve]:
    """The curves of runs: of their folders, or of what was read from these.

    One run has a colour per curve; several runs have a colour and a marker per run, and a dash per curve. With
    `join_seeds`, those that differ in seeds alone are one run, with their mean.

    Raises:
        InvalidArgument: if there is no run, or its log has nothing to draw.
    """
    records = [RunRecord(run) if isinstance(run, str) else run for run in runs]
    for reason in filter(None, (explain_empty(record, x) for record in records)):
        raise InvalidArgument(reason)
    names = run_names([record.folder for record in records]) if len(records) > 1 else [""]
    arguments = [record.known_arguments for record in records]
    differing = differing_arguments(arguments)
    logs = [record.read_log(x) for record in records]
    unit = _choose_time_unit(logs) if x == "time" else x
    if len({known.get("metric_for_best_model") for known in arguments}) > 1:
        # Otherwise a metric would have stars in some runs only.
        arguments = [known | {"metric_for_best_model": None} for known in arguments]
    plain_curves: list[Curve] = []
    for record, log, name, known, settings in zip(records, logs, names, arguments, differing, strict=True):
        state = describe_state(record, known, is_alone=not name)
        run_curves = _curves_over_axis(record, x, unit, _plain_curves(*log, known))
        plain_curves += (replace(curve, run=name, settings=settings, x=unit, state=state) for curve in run_curves)
    curves = _with_styles(_join_seeds(plain_curves) if join_seeds else plain_curves)
    losses = [curve for curve in curves if curve.name == "loss" and curve.state.startswith(DIVERGED)]
    diverged = {curve.run: [curve.non_finite[1]] for curve in losses if curve.non_finite}
    best_runs = _find_best_runs(curves, next((known for known in arguments if "metric_for_best_model" in known), {}))
    return [replace(c, is_best=c.run in best_runs, diverged=diverged.get(c.run, ())) for c in curves]


def _choose_time_unit(logs: list[tuple[TrainerState, dict[float, float]]]) -> str:
    """The largest unit of time of which the longest run has two."""
    last = max(line["step"] for state, _ in logs for line in state.log_history)
    return next((unit for unit, seconds in TIME_UNITS.items() if last >= 2 * seconds), "seconds")


def _curves_over_axis(record: RunRecord, x: str, unit: str, curves: Iterable[Curve]) -> Iterator[Curve]:
    """The curves of a run with places in a unit of the axis `x`, and with the incidents of its journal."""
    size = TIME_UNITS.get(unit, 1)
    restarts, non_finite_loss = record.find_incidents(x)
    scaled_restarts = [(lost / size, restart / size) for lost, restart in restarts]
    for curve in curves:
        spans = filter(None, (curve.non_finite, non_finite_loss if curve.name == "loss" else None))
        found = [(since / size, place / size, text) for since, place, text in spans]
        first = min(found, key=lambda span: (span[1], -span[0]), default=None)
        steps = [step / size for step in curve.steps]
        yield replace(curve, steps=steps, start=curve.start / size, non_finite=first, restarts=scaled_restarts)


def _join_seeds(curves: list[Curve]) -> list[Curve]:
    """The curves, with runs that differ in seeds alone as one run, and their means.

    Runs that ended differently are apart, so that the legend says what became of each.
    """
    groups: dict[str, dict[str, str]] = {}
    settings = {c.run: {name: value for name, value in c.settings.items() if name not in SEEDS} for c in curves}
    for curve in (curve for curve in curves if curve.settings):
        seeds = str([curve.settings.get(name) for name in SEEDS])
        groups.setdefault(f"{settings[curve.run]} {curve.state}", {})[curve.run] = seeds
    # Runs with the same seed differ in something else.
    for runs in (runs for runs in groups.values() if len(runs) == len({*runs.values()}) > 1):
        first = next(iter(runs))
        facts: dict[str, Any] = {"run": f"{first} … ({len(runs)} seeds)", "settings": settings[first]}
        members = [replace(curve, member=curve.run, **facts) for curve in curves if curve.run in runs]
        curves = [curve for curve in curves if curve.run not in runs]
        for name in dict.fromkeys(curve.name for curve in members):
            parts = [curve for curve in members if curve.name == name]
            mean = _mean_of(parts) if len(parts) == len(runs) and name not in PANELS[SHARES] else []
            curves += [*(replace(curve, best=None) for curve in parts), *mean] if mean else parts
    # In the order of the runs.
    return sorted(curves, key=lambda curve: [*settings].index(curve.run.partition(" … (")[0]))


def _mean_of(curves: list[Curve]) -> list[Curve]:
    """The mean of a curve of several seeds, if there are places where all have finite values."""
    points = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = [step for step in points[0] if all(math.isfinite(found.get(step, math.nan)) for found in points)]
    mean = [statistics.fmean(found[step] for found in points) for step in steps]
    # The best value of a metric is its lowest or its highest.
    choose = min if all(c.best is not None and c.values[c.best] == min(c.finite) for c in curves) else max
    best = mean.index(choose(mean)) if mean and curves[0].best is not None else None
    facts: dict[str, Any] = {"member": "", "best": best, "restarts": (), "non_finite": None, "pace": ()}
    return [replace(curves[0], steps=steps, values=mean, **facts)] if mean else []


def _find_best_runs(curves: list[Curve], arguments: dict[str, Any]) -> set[str]:
    """The runs with the best value that has a star, of the first metric; none if it reads the same in all runs."""
    name = next((curve.name for curve in curves if curve.best is not None), "")
    evaluated = [curve for curve in curves if curve.name == name and not curve.member]
    values = {curve.run: curve.values[curve.best] for curve in evaluated if curve.best is not None}
    choose = metrics.choose_best(name, arguments)
    best = format_number(choose(values.values()) if choose and values else None)
    runs = {run for run, value in values.items() if format_number(value) == best}
    # Those without a star have no finite value.
    return runs if len(runs) < len(evaluated) else set()


def explain_empty(record: RunRecord, x: str) -> str | None:
    """Why a run has nothing to draw over the axis `x`, if so."""
    state, _ = record.read_log(x)
    logged = metrics.logged(state.log_history, with_speeds=True)
    if any(name != "epoch" and metrics.is_number(value) for _, name, value in logged):
        return None
    facts = record.facts
    if facts.step < (facts.logging_steps or 0):
        place = f"{describe_step(facts)}, before its first log line at step {facts.logging_steps:,}"
        return f"{record.folder}: {place}: there is nothing to draw."
    if x == "time" and not state.log_history:
        return f"{record.folder} has no times (it ran without observe=True): leave out --x time or that run."
    return f"{record.folder}: the log has nothing to draw: set logging_steps."


def curves_of_run(state: TrainerState) -> list[Curve]:
    """The curves of one run."""
    return _with_styles(_plain_curves(state, {}, {}))


def _plain_curves(state: TrainerState, places: dict[float, float], arguments: dict[str, Any]) -> Iterator[Curve]:
    """The curves of a log, without styles; the best are of models without NaN. `places`: on another axis → steps."""
    panels = metrics.logged_curves(state)
    losses = panels["loss"].get("loss", ([], []))[0]
    in_steps = {name: ([places.get(x, x) for x in xs], values) for name, (xs, values) in panels["loss"].items()}
    last = math.inf if (span := metrics.nan_span(in_steps, None)) is None else span.usable
    pace = metrics.seconds_of_steps(state.log_history)
    for panel, panel_curves in panels.items():
        for name, (steps, values) in panel_curves.items():
            usable = [y if places.get(x, x) <= last else math.nan for x, y in zip(steps, values, strict=True)]
            curve = Curve(panel, name, steps, values, metrics.best_index(name, usable, state, arguments))
            if curve.gaps:
                place = steps[curve.gaps[0]]
                before = steps[curve.gaps[0] - 1] if curve.gaps[0] else 0
                step = places.get(place, place)
                # An evaluation is of its step alone.
                first = step if name.startswith("eval_") else min(step, places.get(before, before) + 1)
                since = place if first == step else before
                curve = replace(curve, non_finite=(since, place, f"at step {format_span(first, step)}"))
            # Without a journal, speeds may be logged from a later start on.
            start = max((step for step in losses if step < steps[0]), default=0)
            yield replace(curve, start=start, pace=[pace.get(step, 0.0) for step in steps])


def _with_styles(plain_curves: Iterable[Curve]) -> list[Curve]:
    """The curves with their colours and dashes, in the order of the panels, without shares that are always 0."""
    curves = _arrange_in_panels(_in_milliseconds(list(plain_curves)))
    runs = list(dict.fromkeys(curve.run for curve in curves))
    panels = {curve.panel: [other for other in curves if other.panel == curve.panel] for curve in curves}
    styled = (_with_style(curve, panels[curve.panel], runs) for curve in curves)
    return [_with_width(curve, curves[place:]) for place, curve in enumerate(styled, 1)]


def _arrange_in_panels(curves: list[Curve]) -> list[Curve]:
    """The curves with the titles of their panels, in the order of these.

    Each metric has a panel, with its curves of all datasets; those that one of several runs has alone are last. Of
    several runs' shares of time only that of training is shown.
    """
    has_runs = any(curve.run for curve in curves)
    curves = [curve for curve in curves if not has_runs or curve.panel != SHARES or curve.name == "step_share"]
    runs = {curve.run for curve in curves}
    shown = metrics.sort_names([curve.name for curve in curves if curve.panel != SHARES or any(curve.values)])
    titles = _panel_titles(curves, len(runs))
    curves = [curve for curve in curves if curve.name in shown]
    curves.sort(key=lambda curve: (list(PANELS).index(curve.panel), shown.index(curve.name)))
    curves = [replace(curve, panel=titles.get(curve.name, curve.panel)) for curve in curves]
    panels = {curve.panel: {other.run for other in curves if other.panel == curve.panel} for curve in curves}
    alone = {panel for panel, found in panels.items() if len(found) == 1 < len(runs)} - {*PANELS}
    return sorted(curves, key=lambda curve: (curve.panel in alone, list(panels).index(curve.panel)))


def _panel_titles(curves: list[Curve], runs: int) -> dict[str, str]:
    """Names of curves of so many runs → the titles of their panels, if not those of the log."""
    # Several evaluation sets have their names in losses, as `eval_val_loss`, and in metrics.
    datasets = "|".join(re.escape(curve.name[5:-5]) for curve in curves if re.fullmatch("eval_.+_loss", curve.name))
    titles = {c.name: re.sub(f"^eval_({datasets})_", "eval_", c.name) for c in curves if c.panel == "metrics"}
    if any(curve.run for curve in curves):
        titles["step_share"] = "share of time spent training so far"
    losses = [curve for curve in curves if curve.panel == "loss" and curve.finite]
    evaluations = [curve for curve in losses if re.fullmatch("eval_(.*_)?loss", curve.name)]
    if runs >= MANY_RUNS or metrics.hides_rise([c.finite for c in evaluations], [c.finite for c in losses]):
        titles |= dict.fromkeys((curve.name for curve in evaluations), EVALUATION_LOSS)
    return titles


def _with_style(curve: Curve, panel: list[Curve], runs: list[str]) -> Curve:
    """A curve with the colour and the mark of its run, and the dash of its name among the curves of its panel."""
    names = list(dict.fromkeys(other.name for other in panel))
    dash = names.index(curve.name)
    run = runs.index(curve.run)
    most = max(len(other.finite) for other in panel if other.name == curve.name)
    extent = curve.steps[-1] / (max(other.steps[-1] for other in panel) or 1) or 1
    colour = COLOURS[(run if curve.run else dash) % len(COLOURS)]
    if curve.panel == SHARES and curve.name == "step_share":
        colour = "#d9d9d9"
    owner = ""
    if len({other.run for other in panel}) == 1 < len(runs):
        owner = f"only {curve.run}: {curve.name}" if len(names) > 1 else f"only {curve.run}"
    mark = list(MARKS)[run % len(MARKS)]
    facts: dict[str, Any] = {"owner": owner, "most_points": most, "extent": extent}
    return replace(curve, colour=colour, dash=dash % len(DASHES), mark=mark, **facts)


def _with_width(curve: Curve, later: list[Curve]) -> Curve:
    """A curve that is wider where later curves hide it, as equal runs do, and resumed copies until they part."""
    others = [other for other in later if other.name == curve.name and not curve.member]
    shared = [metrics.count_equal((curve.steps, curve.values), (other.steps, other.values)) for other in others]
    return replace(curve, width=1.5 + 0.75 * min(2, sum(count > 1 for count in shared)), shared=max([0, *shared]))


def _in_milliseconds(curves: list[Curve]) -> list[Curve]:
    """The curves, with milliseconds per step if all runs have short steps."""
    seconds = [statistics.median(curve.finite) for curve in curves if curve.name == "step_seconds" and curve.finite]
    if not seconds or max(seconds) >= 0.1:
        return curves
    facts: dict[str, Any] = {"panel": "milliseconds per step", "name": "step_milliseconds"}
    longer = [replace(curve, values=[1000 * time for time in curve.values], **facts) for curve in curves]
    return [short if curve.name == "step_seconds" else curve for curve, short in zip(curves, longer, strict=True)]
