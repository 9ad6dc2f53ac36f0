"""What the panels of a plot show, whichever library draws them: axes, titles, marks and vertical lines."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from hftrainer.base.messages import format_number
from hftrainer.checkpointing.saved_arguments import describe
from hftrainer.errors import MissingPackage, cause_if_installed
from hftrainer.reporting.curves import TIME_UNITS, Curve
from hftrainer.reporting.metrics import PANEL_OF, PANELS, SHARES, SPEEDS

#: Number of losses from which a few high ones may leave a panel, and their least ratio to its end.
MIN_CLIPPED_POINTS, CLIP_RATIO = 10, 1.5
#: Number of curves whose highest value is named at the upper edge, and of triangles there for each.
MAX_PEAK_TEXTS, MAX_TRIANGLES = 4, 30
MEMORY_PANEL = "peak memory (MB)"


def vertical_axis(curves: list[Curve]) -> tuple[str, tuple[float, float]]:
    """The scale of a panel, 'linear' or 'log', and its range.

    Speeds and memory begin at 0, and end at twice the 95th percentile of a curve if others are `CLIP_RATIO` times as
    high. If that is ten times the median of a curve, the scale is logarithmic instead. Losses and gradient norms end at
    three times its height if others are `CLIP_RATIO` times as high, so that a few do not flatten the rest. If these
    span two orders of magnitude, the scale is logarithmic instead, and ends at a third of the lowest mean; so it is if
    the peak learning rates of curves differ 50-fold. Of several runs, losses and gradient norms that reach 1000 times
    the median of the curves' highest values leave the panel.
    """
    curves, name, panel = [curve for curve in curves if curve.finite], curves[0].name, curves[0].panel
    if name in PANELS[SHARES] or not curves:
        return "linear", (0, 1.05 if name in PANELS[SHARES] and panel != SHARES else 1)
    parts = [list(filter(math.isfinite, curve.usual)) for curve in curves]
    values, highs = [value for part in parts for value in part], list(map(max, parts))
    usual = max(float(np.percentile(part, 95, method="lower")) for part in parts)
    if PANEL_OF.get(name) in SPEEDS:
        if 0 < 10 * min(map(statistics.median, parts)) <= usual:
            return _log_axis(min(value for value in values if value > 0), max(highs))
        return "linear", (
            0,
            1.05 * (max(highs) if max(highs) <= 2 * CLIP_RATIO * usual else 2 * usual or max(highs)) or 1,
        )
    bottom, high, is_steep = min(values), max(highs), panel in ("loss", "gradient norm")
    if curves[0].run and is_steep:
        high = max(high for high in highs if high <= abs(1000 * statistics.median_low(highs)))
    top = max(value for value in values if value - bottom <= 3 * (usual - bottom))
    # To cut off less would not show the others larger.
    is_squeezed = (
        is_steep
        and len(values) >= MIN_CLIPPED_POINTS
        and usual > bottom
        and high - bottom > CLIP_RATIO * (top - bottom)
    )
    top = top if is_squeezed else high
    # A warm-up from 0 and a decay to 0 go below the panel.
    lows = [min(filter(math.isfinite, c.mean or c.drawable)) / (3 if c.mean else 1) for c in curves]
    low = min(highs) / 100 if panel == "learning rate" else min(lows)
    limits = {"loss": 100 * low, "gradient norm": 100 * low, "learning rate": 50 * min(highs)}
    if low > 0 and top >= limits.get(panel, math.inf):
        return _log_axis(low, high)
    # A mark of what leaves the panel needs space.
    return "linear", axis_range([bottom, top + is_squeezed * (top - bottom) / 10])


def _log_axis(low: float, high: float) -> tuple[str, tuple[float, float]]:
    first, last = axis_range([math.log10(low), math.log10(high)])
    return "log", (10**first, 10**last)


def axis_range(values: list[float]) -> tuple[float, float]:
    """The range of a linear axis: its values, or from 0 if they are equal; and a margin of 5 %."""
    low, high = min(values), max(values)
    if low == high:
        low, high = min(0, 2 * high), max(0, 2 * high) or int(not low)
    margin = (high - low) / 20
    return low - margin, high + margin


def horizontal_range(curves: list[Curve]) -> tuple[float, float]:
    """The range of all horizontal axes, from 0, with space for a marker at 0."""
    steps = [step for curve in curves for step in curve.steps]
    return min(0, min(steps) - (max(steps) or 1) / 60), axis_range([0, *steps])[1]


def axis_label(curves: list[Curve], scale: str) -> str:
    """The label of a vertical axis: words, or the name of the only curve; and its scale."""
    name, panel = curves[0].name, curves[0].panel
    label = name if {curve.name for curve in curves} == {name} - set(PANEL_OF) else panel[0].upper() + panel[1:]
    return label + " (log scale)" * (scale == "log")


def clipped_peaks(curves: list[Curve], top: float) -> Iterator[tuple[Curve, float, str, str, int]]:
    """What leaves a panel most: curve, step, text with its anchor, and row below the marks. The highest has a text."""
    peaks = [(curve, places) for curve in curves if (places := curve.peaks(top))]
    peaks.sort(key=lambda peak: -max(peak[0].finite))
    for row, (curve, places) in enumerate(peaks[:MAX_PEAK_TEXTS]):
        text = f"{len(places):,} spikes, max " * (len(places) > 1) + format_number(max(curve.finite))
        for place in sorted(places, key=curve.values.__getitem__, reverse=True)[:MAX_TRIANGLES]:
            step, is_late = curve.steps[place], curve.steps[place] > 0.6 * curve.steps[-1]
            yield curve, step, text, "right" if is_late else "left", row + 1
            text = ""


def title_and_notes(name: str, curves: list[Curve]) -> list[str]:
    """The runs; and notes for below: what smooth and faint curves are, and which runs have no speeds."""
    runs = list(dict.fromkeys(curve.run for curve in curves))
    names = f"{', '.join(runs[:-1])} and {runs[-1]}" if len(runs) < 4 else f"{len(runs)} training runs"
    title = [f"Comparison of {names}" if len(runs) > 1 else f"Training run {name}"]
    if any(curve.mean for curve in curves):
        title.append("faint: logged values; strong: their exponential mean")
    if any(curve.restarts and curve.x in TIME_UNITS for curve in curves):
        title.append("the time leaves out the pauses before a run resumed")
    title += [curves[0].state] * bool(not curves[0].run and curves[0].state)
    # Of several runs, the legend has it.
    title += filter(None, [_constant_memory("", curves)])
    observed = {curve.run for curve in curves if PANEL_OF.get(curve.name) in SPEEDS}
    if observed and (others := ", ".join(run for run in runs if run not in observed)):
        title.append(f"{others} ran without observe=True: no speed, time or memory")
    return title


def opacity_under_mean(curves: list[Curve]) -> float:
    """The opacity of curves under their mean; less of many runs."""
    return 0.3 if len({curve.run for curve in curves}) < 4 else 0.12


def group_by_panel(curves: list[Curve]) -> dict[str, list[Curve]]:
    """The panels. A constant memory has none: the title or the legend names it."""
    panels = {panel: list(panel_curves) for panel, panel_curves in groupby(curves, key=lambda curve: curve.panel)}
    memory = [value for curve in panels.get(MEMORY_PANEL, ()) for value in curve.finite]
    is_flat = memory and len(panels) > 1 and max(memory) < 1.05 * min(memory)
    return {panel: panel_curves for panel, panel_curves in panels.items() if panel != MEMORY_PANEL or not is_flat}


def _constant_memory(run: str, curves: list[Curve]) -> str:
    """A run's peak memory in words, if it has no panel."""
    memory = [value for curve in curves if curve.panel == MEMORY_PANEL and curve.run == run for value in curve.finite]
    return (
        f"{MEMORY_PANEL}: {format_number(max(memory))}" if memory and MEMORY_PANEL not in group_by_panel(curves) else ""
    )


def vertical_lines(curves: list[Curve]) -> Iterator[tuple[float, float, str, str, str]]:
    """The restarts of runs, and each run's first non-finite value of a panel: start, step, text, colour and dash.

    What is between start and step was lost. The text is empty if another line has it. A log line has the values since
    the one before, so that the first step with a non-finite value may be earlier than the line.
    """
    for curve in {curve.run: curve for curve in curves if curve.panel != SHARES}.values():
        for number, (lost, restart) in enumerate(curve.restarts):
            text = f"{curve.run}: resumed" if curve.run else "resumed"
            text += " (shaded: steps done again)" * any(lost < restart for lost, restart in curve.restarts)
            colour = curve.colour if curve.run else "#808080"
            yield lost, restart, text if curve.panel == "loss" and not number else "", colour, "--"
    found = [(*curve.non_finite, curve) for curve in curves if curve.non_finite]
    firsts = {each[2].run: each for each in sorted(found, key=lambda each: -each[0])}
    for step, place, curve in firsts.values():
        colour = curve.colour if curve.run and len(firsts) > 1 else "red"
        yield step, step, f"{curve.label} is not finite {place}", colour, ":"


def describe_run(run: str, curves: list[Curve]) -> str:
    """The name of a run, the arguments in which it differs, its best value, and what no panel shows."""
    run_curves = [curve for curve in curves if curve.run == run]
    best = (f"★ best {c.name}\xa0{c.format(c.values[c.best])}" for c in run_curves if c.best is not None)
    facts = (describe(run_curves[0].settings), next(best, ""), _constant_memory(run, curves), run_curves[0].state)
    return " · ".join(filter(None, (run, *facts)))


def import_plotting(module: str) -> Any:
    """Import a module of a plotting library, or raise `MissingPackage`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from cause_if_installed(error)
