"""What the panels of a plot show, whichever library draws them: axes, titles, marks and vertical lines."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from hftrainer.base.messages import count_of, format_number
from hftrainer.checkpointing.saved_arguments import describe, is_shared
from hftrainer.errors import MissingPackage, cause_if_installed
from hftrainer.monitoring.run_facts import DIVERGED
from hftrainer.reporting.curves import TIME_UNITS, WORDS, Curve
from hftrainer.reporting.metrics import EVALUATION_LOSS, LOSSES, PANEL_OF, PANELS, SHARES, SPEEDS

#: Number of losses of a panel from which a few high ones may leave it.
MIN_CLIPPED_POINTS = 10
#: Losses leave a panel with a linear scale if they span this many times the range of the others.
CLIP_RATIO = 3
#: Spikes of a loss leave a panel with a logarithmic scale from this many times the highest of the others on.
LOG_CLIP_RATIO = 10
#: Number of runs whose highest value above a panel is named.
MAX_PEAK_TEXTS = 4
#: Number of triangles at the upper edge of a panel for each of these runs.
MAX_TRIANGLES = 30
MEMORY_PANEL = "peak memory (MB)"
#: The share of a panel's height that a row of marks has. Each is a value that is not finite.
MARK_ROW = 0.04
#: The share of a panel's height that all rows of such marks have at most.
MAX_MARK_ROWS = 0.3
#: Number of parts of the horizontal axis, each of which has at most one mark in a row.
MAX_MARKS = 60


def non_finite_marks(curves: list[Curve]) -> list[tuple[float, list[float], Curve]]:
    """The marks of values that are not finite: of each curve that has some the height of their row, and their places.

    Values that are so near to one before that their marks would run into each other have none.
    """
    rows = [curve for curve in curves if curve.gaps]
    size = min(MARK_ROW, MAX_MARK_ROWS / max(1, len(rows)))
    part = (max(step for curve in curves for step in curve.steps) or 1) / MAX_MARKS
    marks = [_keep_distant(np.take(curve.steps, curve.gaps).tolist(), part) for curve in rows]
    return [((row + 0.5) * size, marks[row], curve) for row, curve in enumerate(rows)]


def _keep_distant(places: list[float], distance: float) -> list[float]:
    """The places, without those that are nearer to the one kept before."""
    kept = places[:1]
    for place in places[1:]:
        if place - kept[-1] >= distance:
            kept.append(place)
    return kept


def vertical_axis(curves: list[Curve]) -> tuple[str, tuple[float, float]]:
    """The scale of a panel, 'linear' or 'log', and its range, with space for `non_finite_marks`."""
    scale, (low, high) = _axis_of_values(curves)
    rows = non_finite_marks(curves)
    if not rows or not any(curve.finite for curve in curves):
        return scale, (low, high)
    space = 2 * rows[0][0] * len(rows)
    share = space / (1 - space)
    return scale, (low * (low / high) ** share if scale == "log" else low - share * (high - low), high)


def _axis_of_values(curves: list[Curve]) -> tuple[str, tuple[float, float]]:
    """The scale of a panel, and the range of its values.

    Peak learning rates that differ 50-fold have a logarithmic scale; there a warm-up and a decay to 0 go below the
    panel. A metric has a linear scale.
    """
    name = curves[0].name
    panel = curves[0].panel
    curves = [curve for curve in curves if curve.finite]
    if name in PANELS[SHARES] or not curves:
        return "linear", (0, 1.05 if name in PANELS[SHARES] and panel != SHARES else 1)
    parts = [list(filter(math.isfinite, curve.drawable)) for curve in curves]
    if panel in (*LOSSES, "gradient norm"):
        return _axis_of_losses(curves, parts)
    if PANEL_OF.get(name) in SPEEDS:
        return _axis_of_speeds(parts)
    lowest = min(map(min, parts))
    highs = list(map(max, parts))
    if panel == "learning rate" and lowest >= 0 and max(highs) >= 50 * min(highs) > 0:
        return log_axis(min(highs) / 100, max(highs))
    return "linear", axis_range([lowest, max(highs)])


def _axis_of_speeds(parts: list[list[float]]) -> tuple[str, tuple[float, float]]:
    """The scale and the range of a panel of speeds or memory, which begins at 0.

    The range ends at twice the 90th percentile of a curve, or at a level that lasts, if others are twice as high as
    this. If the percentile is ten times the median of a curve, or so many values are above the end that they are no
    spikes, the scale is logarithmic instead.
    """
    usual = max(float(np.percentile(part, 90, method="lower")) for part in parts)
    high = max(map(max, parts))
    end = max(2 * usual, *map(_lasting_height, parts)) or high
    is_noisy = high > 2 * end and any(sum(value > end for value in part) > max(2, len(part) / 50) for part in parts)
    if is_noisy or 0 < 10 * min(map(statistics.median, parts)) <= usual:
        return log_axis(min(value for part in parts for value in part if value > 0), high)
    return "linear", (0, 1.05 * (high if high <= 2 * end else end) or 1)


def _axis_of_losses(curves: list[Curve], parts: list[list[float]]) -> tuple[str, tuple[float, float]]:
    """The scale and the range of a panel of losses or gradient norms.

    The range ends at three times the height of the 95th percentile of a curve without spikes, or at a level that lasts,
    if others are `CLIP_RATIO` times as high, so that a few do not flatten the rest. If these span two orders of
    magnitude, or evaluation losses a factor of 3, the scale is logarithmic instead, and begins at a third of the lowest
    mean above 0; it leaves out spikes from `LOG_CLIP_RATIO` times the others on. Of several runs, those that reach 100
    times the median of the curves' highest values leave the panel.
    """
    is_evaluation = curves[0].panel == EVALUATION_LOSS
    bottom, top, high = _range_of_losses(curves, parts)
    # Evaluations are few, and the first show how a run converges.
    is_cut = top < high and not is_evaluation
    shown = [(value, 3 if curve.mean else 1) for curve in curves for value in curve.mean or curve.drawable]
    # Zeros are at the foot.
    low = min((value / factor for value, factor in shown if value > 0), default=math.inf)
    end = top if is_cut else high
    if end >= (3 if is_evaluation else 100) * low and not any(value < 0 for value, _ in shown):
        least = min(value for part in parts for value in part if value > 0)
        return log_axis(least if least > low / 2 else low, high)
    # A mark of what leaves the panel needs space.
    return "linear", axis_range([bottom, end + (end - bottom) / 10 if is_cut else end])


def _range_of_losses(curves: list[Curve], parts: list[list[float]]) -> tuple[float, float, float]:
    """The lowest value to show, the highest of a linear scale, and the highest of a logarithmic one.

    The second is less than the third if so high values are rare that they are cut off.
    """
    calm = [list(filter(math.isfinite, curve.without_spikes)) for curve in curves]
    end = _highest_usual_loss(calm, is_comparison=bool(curves[0].run))
    high = max(value for part in parts for value in part if value <= max(end, LOG_CLIP_RATIO * end))
    # A dip of positive values flattens nothing.
    lowest = min(map(min, parts))
    bottom = lowest if lowest >= 0 else min(map(min, calm))
    usual = max(float(np.percentile(part, 95, method="lower")) for part in calm)
    top = max(value for part in calm for value in part if value - bottom <= 3 * (usual - bottom))
    top = max(top, *(height for height in map(_lasting_height, calm) if height <= end))
    # Cutting off less than that would hardly enlarge the others.
    is_cut = _may_cut(parts, calm) and usual > bottom and high - bottom > CLIP_RATIO * (top - bottom)
    return bottom, top if is_cut else high, high


def _highest_usual_loss(calm: list[list[float]], *, is_comparison: bool) -> float:
    """The highest value of curves without spikes, in a comparison without runs that rose far above the others."""
    highs = list(map(max, calm))
    return max(high for high in highs if not is_comparison or high <= abs(100 * statistics.median_low(highs)))


def _may_cut(parts: list[list[float]], calm: list[list[float]]) -> bool:
    """Whether values may leave a panel: of many values, or one of 100 times that before it, which is surely a spike."""
    has_spike = any(later > 100 * abs(earlier) for part in parts for earlier, later in pairwise(part))
    return has_spike or sum(map(len, calm)) >= MIN_CLIPPED_POINTS


def height_of_zeros(curves: list[Curve]) -> tuple[float, str]:
    """The height in a logarithmic panel at which its zeros are drawn, and a text for the legend on what is below.

    It is minus infinity if there are no zeros, or but single ones under a mean.
    """
    if curves[0].name == "learning_rate":
        return -math.inf, ""
    scale, (low, high) = _axis_of_values(curves)
    if scale == "linear":
        return -math.inf, ""
    if all(0 not in (curve.mean or curve.drawable) for curve in curves):
        below = [value for curve in curves for value in curve.finite if value < low]
        text = f"{count_of(len(below), 'values')} below the axis, down to {format_number(min(below, default=0))}"
        return -math.inf, text if below else ""
    count = sum(curve.values.count(0) for curve in curves)
    # Seen above the edge, and below the lowest value.
    return low * (high / low) ** 0.02, f"{count_of(count, 'values')} of 0: at the foot"


def _lasting_height(values: list[float]) -> float:
    """The height of the highest level that lasts for a twentieth of the values of a curve, as in a slow phase."""
    return max(float(np.median(part)) for part in np.array_split(values, max(1, min(20, len(values) // 5))))


def log_axis(low: float, high: float) -> tuple[str, tuple[float, float]]:
    """The scale and the range of a logarithmic axis, with a margin."""
    first, last = axis_range([math.log10(low), math.log10(high)])
    return "log", (10**first, 10**last)


def axis_range(values: list[float]) -> tuple[float, float]:
    """The range of a linear axis: its values, or from 0 if they are equal, to 1 or twice them; and a margin of 5 %."""
    low, high = min(values), max(values)
    if low == high:
        # A share, such as an accuracy, ends at 1.
        low, high = min(0, 2 * high), 1 if 0.5 < high <= 1 else max(0, 2 * high) or int(not low)
    margin = (high - low) / 20
    return low - margin, high + margin


def horizontal_range(curves: list[Curve]) -> tuple[float, float]:
    """The range of all horizontal axes, from 0, with space for a marker at 0."""
    steps = [step for curve in curves for step in curve.steps]
    return min(0, min(steps) - (max(steps) or 1) / 60), axis_range([0, *steps])[1]


def axis_label(curves: list[Curve], scale: str) -> str:
    """The label of a vertical axis: words, or the name of the only curve; and its scale, or that it has none."""
    name, panel = curves[0].name, curves[0].panel
    words = panel if panel.startswith("eval_") else panel[0].upper() + panel[1:]
    label = name if {curve.name for curve in curves} == {name} - set(PANEL_OF) else words
    if not any(curve.finite for curve in curves):
        return f"{label} (none is finite)"
    return f"{label} (log scale)" if scale == "log" else label


def clipped_peaks(curves: list[Curve], top: float) -> Iterator[tuple[Curve, list[float], str]]:
    """What leaves a panel, of each run its highest curve: the places of marks, and a text for the legend."""
    runs: dict[str, list[Curve]] = {}
    for curve in sorted((curve for curve in curves if curve.peaks(top)), key=lambda curve: -max(curve.finite)):
        runs.setdefault(curve.member or curve.run, []).append(curve)
    for curve, *others in list(runs.values())[:MAX_PEAK_TEXTS]:
        places = curve.peaks(top)
        first = next(index for index, value in enumerate(curve.values) if value > top)
        after = [value for value in curve.values[first:] if math.isfinite(value)]
        count = sum(value > top for value in curve.finite)
        text = f"{len(places):,} spikes, " if len(places) > 1 else f"{count:,} values, " if count > 1 else ""
        peak = max(curve.finite)
        where = f" at {curve.describe_place(curve.values.index(peak))}"
        if len(after) > 2 and 2 * sum(value > top for value in after) > len(after):
            text = f"above the axis from {curve.describe_place(first)}, "
            where = ""
            places = [first]
        # The label of the axis names the only curve.
        name = curve.member or curve.run or (curve.label if any(c.name != curve.name for c in curves) else "")
        text = f"{name}: {text}max" if name else f"{text}max"
        also = ", ".join(f"{other.name} {format_number(max(other.finite))}" for other in others)
        places = sorted(places, key=curve.values.__getitem__, reverse=True)[:MAX_TRIANGLES]
        text = f"{text} {format_number(peak)}{where}"
        yield curve, [curve.steps[place] for place in places], f"{text} ({also})" if also else text


def title_and_notes(name: str, curves: list[Curve]) -> list[str]:
    """The runs; and notes for below: first what became of a run; and which runs have no speeds."""
    runs = list(dict.fromkeys(curve.run for curve in curves))
    count = len({curve.member or curve.run for curve in curves} - {curve.run for curve in curves if curve.member})
    names = f"{', '.join(runs[:-1])} and {runs[-1]}" if len(runs) < 4 else f"{count} training runs"
    alone = f"Training runs {runs[0]}" if runs[0] else f"Training run {name}"
    title = [f"Comparison of {names}" if len(runs) > 1 else alone]
    state = "" if curves[0].run else _state(curves)
    has_pauses = any(curve.restarts and curve.x in TIME_UNITS for curve in curves)
    pauses = "the time leaves out the pauses before a run resumed" if has_pauses else ""
    seeds = "thin: a run of each seed; thick: their mean" if any(curve.member for curve in curves) else ""
    title += filter(None, [state, pauses, _constants(curves), _constant_memory(curves), seeds])
    settings = list({curve.run: curve.settings for curve in curves}.values())
    shared = {name: value for run in settings for name, value in run.items() if is_shared(name, value, settings)}
    title += [f"most runs: {describe(shared, [])}"] if shared else []
    observed = {curve.run for curve in curves if PANEL_OF.get(curve.name) in SPEEDS}
    if observed and (others := ", ".join(run for run in runs if run not in observed)):
        title.append(f"{others} ran without observe=True: no speed, time or memory")
    return title


def opacity_under_mean(curves: list[Curve]) -> float:
    """The opacity of curves under their mean; less of several runs, which overlap."""
    return 0.5 if len({curve.run for curve in curves}) == 1 else 0.35


def group_by_panel(curves: list[Curve]) -> dict[str, list[Curve]]:
    """The panels. What is constant and equal in all runs has none, if others have: a note below the title has it."""
    panels = {panel: list(panel_curves) for panel, panel_curves in groupby(curves, key=lambda curve: curve.panel)}
    return {panel: panel_curves for panel, panel_curves in panels.items() if not _is_constant(panel_curves)} or panels


def _is_constant(curves: list[Curve]) -> bool:
    """Whether a panel says no more than its first value: no loss, no metric with a best value, no speed."""
    panel = curves[0].panel
    values = [value for curve in curves for value in curve.finite]
    if panel == MEMORY_PANEL:
        return bool(values) and max(values) < 1.05 * min(values)
    is_needed = panel in LOSSES or PANEL_OF.get(curves[0].name) in SPEEDS
    is_special = any(curve.owner or curve.gaps or curve.best is not None or len(curve.values) < 2 for curve in curves)
    return not is_needed and not is_special and len(set(values)) == 1


def _constants(curves: list[Curve]) -> str:
    """The names and values of what has no panel, but memory."""
    shown = {MEMORY_PANEL, *group_by_panel(curves)}
    found = {f"{curve.name} {curve.format(curve.values[0])}": 0 for curve in curves if curve.panel not in shown}
    return f"constant: {', '.join(found)}" if found else ""


def _constant_memory(curves: list[Curve]) -> str:
    """The peak memory of all runs in words, if it has no panel."""
    memory = [value for curve in curves if curve.panel == MEMORY_PANEL for value in curve.finite]
    if not memory or MEMORY_PANEL in group_by_panel(curves):
        return ""
    upper = "at most " if len({curve.run for curve in curves}) > 1 else ""
    return f"{MEMORY_PANEL}: {upper}{format_number(max(memory))}"


def vertical_lines(curves: list[Curve]) -> Iterator[tuple[float, float, str, str, str]]:
    """The restarts of runs, and each run's first non-finite values: start, step, text, colour and dash.

    What is between start and step of a restart was lost. The text is empty if another line or the entry of the run has
    it. A log line has the values since the one before, so that the first non-finite one may be anywhere between both.
    """
    for curve in {curve.member or curve.run: curve for curve in curves}.values():
        for number, (lost, restart) in enumerate(curve.restarts):
            text = f"{curve.member or curve.run}: resumed" if curve.run else "resumed"
            text += " (shaded: steps done again)" if any(lost < place for lost, place in curve.restarts) else ""
            colour = curve.colour if curve.run else "#808080"
            yield lost, restart, text if curve.panel == "loss" and not number else "", colour, "--"
    found = sorted(((*c.non_finite, c.label, c) for c in curves if c.non_finite), key=lambda mark: mark[1])
    runs = {run: [mark for mark in found if mark[4].run == run] for run in dict.fromkeys(mark[4].run for mark in found)}
    for (since, step, place, label, curve), *others in runs.values():
        colour = curve.colour if curve.run else "red"
        also = "".join(f", {WORDS.get(other.name, other.name)} {place}" for _, _, place, _, other in others)
        # The entry of one of several runs says it.
        is_said = bool(curve.run) and curve.state.startswith(DIVERGED)
        yield since, step, "" if is_said else f"{label} is not finite {place}{also}", colour, ":"
    # In the other panels of such a run, a thinner line.
    for curve in {curve.run: curve for curve in curves if curve.run not in runs}.values():
        yield from ((step, step, "", curve.colour if curve.run else "red", ":") for step in curve.diverged)


def _state(curves: list[Curve]) -> str:
    """What became of a run, after the mark at its last loss, if it has one."""
    return f"✖ {curves[0].state}" if any(curve.end is not None for curve in curves) else curves[0].state


def describe_run(run: str, curves: list[Curve]) -> str:
    """The name of a run and of one with equal values, where its arguments differ, its best value, and the rest."""
    points: dict[str, list[Any]] = {curve.run: [] for curve in curves}
    for curve in (curve for curve in curves if PANEL_OF.get(curve.name) not in SPEEDS):
        points[curve.run].append((curve.name, curve.steps, curve.finite))
    first = next(other for other, found in points.items() if found == points[run])
    run_curves = [curve for curve in curves if curve.run == run]
    best = (f"★ best {c.name}\xa0{c.format_best()}" for c in run_curves if c.best is not None)
    settings = {curve.run: curve.settings for curve in curves}
    text = describe(settings[run], [*settings.values()])
    text = text if settings[run] or not any(settings.values()) else "arguments unknown"
    facts = (_state(run_curves), text, next(best, ""))
    name = f"{run} (best)" if run_curves[0].is_best else run
    name += f" (equal to {first})" if first != run else ""
    return " · ".join(filter(None, (name, *facts)))


def import_plotting(module: str) -> Any:
    """Import a module of a plotting library, or raise `MissingPackage`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from cause_if_installed(error)
