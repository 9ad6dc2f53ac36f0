"""Draws the curves of one run or of several, with matplotlib or plotly."""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import os
import statistics
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hftrainer.base.messages import format_number
from hftrainer.callbacks.progress_bar import is_in_notebook, show_in_notebook
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing import names
from hftrainer.checkpointing.saved_arguments import describe
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed
from hftrainer.reporting.curves import DASHES, MARKS, TIME_UNITS, X_AXES, Curve, curves_of_run, read_curves
from hftrainer.reporting.metrics import PANEL_OF, PANELS, SHARES, SPEEDS, is_finite

logger = logging.getLogger(__name__)

#: Let a phone show one column without plotly's buttons, and turn white into black where the reader prefers that.
STYLE = """<meta name="viewport" content="width=device-width"><style>html { scrollbar-gutter: stable; }
html body { background: white; font: 14px sans-serif; height: auto; } h1 { font-size: 16px; margin: 0; }
@media (max-width: 600px) { .modebar { display: none !important; } }
@media (prefers-color-scheme: dark) { html { filter: invert(0.9) hue-rotate(180deg); } }</style>"""
#: Controls of a page, which `page.js` handles.
BOX = """&emsp;<small><label><input type="checkbox"%s>losses on a log scale</label></small>"""
SELECT = "&emsp;<small>smoothing <select><option>off<option selected>light<option>strong</select></small>"
#: Smoothing of a page → the number of parts of a curve, over one of which its mean goes.
SMOOTHING = {"light": 30, "strong": 8}
#: Columns of a page → the least width of its window, in pixels.
COLUMN_WIDTHS = {3: 1500, 2: 900, 1: 0}
#: Say why a page is blank.
OFFLINE = """<script>window.Plotly || document.querySelector("h1").after("The plot needs https://cdn.plot.ly, which "
+ "did not load. Make a page that works offline: hftrainer plot OUTPUT_DIR --html ")</script></body>"""
#: Number of losses from which a few high ones may leave a panel, their least ratio to its end, and numbers of marks.
MIN_POINTS, CUT, MAX_PEAKS, MAX_TRIANGLES = 10, 1.5, 4, 30
MEMORY = "peak memory (MB)"
#: Inches of a picture: the edges, the gap between columns, the height of a panel, and the space below it.
LEFT, RIGHT, GAP, HIGH, LOW = 0.9, 0.25, 1.05, 2.75, 0.55
#: Number of metrics in a picture; a page has all.
MAX_METRICS = 12


def _vertical_axis(curves: list[Curve]) -> tuple[str, tuple[float, float]]:
    """The scale of a panel, 'linear' or 'log', and its range.

    Speeds and memory begin at 0, and end at twice the 95th percentile of a curve if others are `CUT` times as high. If
    that is ten times the median of a curve, the scale is logarithmic instead. Losses and gradient norms end at three
    times its height if others are `CUT` times as high, so that a few do not flatten the rest. If these span two orders
    of magnitude, the scale is logarithmic instead, and ends at a third of the lowest mean; so it is if the peak
    learning rates of curves differ 50-fold. Of several runs, losses and gradient norms that reach 1000 times the median
    of the curves' highest values leave the panel.
    """
    curves, name, panel = [curve for curve in curves if curve.finite], curves[0].name, curves[0].panel
    if name in PANELS[SHARES] or not curves:
        return "linear", (0, 1.05 if name in PANELS[SHARES] and panel != SHARES else 1)
    parts = [list(filter(is_finite, curve.usual)) for curve in curves]
    values, highs = [value for part in parts for value in part], list(map(max, parts))
    usual = max(float(np.percentile(part, 95, method="lower")) for part in parts)
    if PANEL_OF.get(name) in SPEEDS:
        if 0 < 10 * min(map(statistics.median, parts)) <= usual:
            return _log_axis(min(value for value in values if value > 0), max(highs))
        return "linear", (0, 1.05 * (max(highs) if max(highs) <= 2 * CUT * usual else 2 * usual or max(highs)) or 1)
    bottom, high, is_steep = min(values), max(highs), panel in ("loss", "gradient norm")
    if curves[0].run and is_steep:
        high = max(high for high in highs if high <= abs(1000 * statistics.median_low(highs)))
    top = max(value for value in values if value - bottom <= 3 * (usual - bottom))
    # To cut off less would not show the others larger.
    is_squeezed = is_steep and len(values) >= MIN_POINTS and usual > bottom and high - bottom > CUT * (top - bottom)
    top = top if is_squeezed else high
    # A warm-up from 0 and a decay to 0 go below the panel.
    lows = [min(filter(is_finite, c.mean or c.drawable)) / (3 if c.mean else 1) for c in curves]
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
    """The range of a linear axis: its values, and a margin of 5 %."""
    low, high = min(values), max(values)
    margin = (high - low) / 20 or abs(high) / 20 or 1
    return low - margin, high + margin


def _horizontal_range(curves: list[Curve]) -> tuple[float, float]:
    """The range of all horizontal axes, from 0, with space for a marker at 0."""
    steps = [step for curve in curves for step in curve.steps]
    return min(0, min(steps) - (max(steps) or 1) / 60), axis_range([0, *steps])[1]


def _label(curves: list[Curve], scale: str) -> str:
    """The label of a vertical axis: words, or the name of the only curve; and its scale."""
    name, panel = curves[0].name, curves[0].panel
    label = name if {curve.name for curve in curves} == {name} - set(PANEL_OF) else panel[0].upper() + panel[1:]
    return label + " (log scale)" * (scale == "log")


def _clipped_peaks(curves: list[Curve], top: float) -> Iterator[tuple[Curve, float, str, str, int]]:
    """What leaves a panel most: curve, step, text with its anchor, and row below the marks. The highest has a text."""
    peaks = [(curve, places) for curve in curves if (places := curve.peaks(top))]
    peaks.sort(key=lambda peak: -max(peak[0].finite))
    for row, (curve, places) in enumerate(peaks[:MAX_PEAKS]):
        text = f"{len(places):,} spikes, max " * (len(places) > 1) + format_number(max(curve.finite))
        for place in sorted(places, key=curve.values.__getitem__, reverse=True)[:MAX_TRIANGLES]:
            step, is_late = curve.steps[place], curve.steps[place] > 0.6 * curve.steps[-1]
            yield curve, step, text, "right" if is_late else "left", row + 1
            text = ""


def _title(name: str, curves: list[Curve]) -> list[str]:
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


def _opacity(curves: list[Curve]) -> float:
    """The opacity of curves under their mean; less of many runs."""
    return 0.3 if len({curve.run for curve in curves}) < 4 else 0.12


def _group_by_panel(curves: list[Curve]) -> dict[str, list[Curve]]:
    """The panels. A constant memory has none: the title or the legend names it."""
    panels = {panel: list(panel_curves) for panel, panel_curves in groupby(curves, key=lambda curve: curve.panel)}
    memory = [value for curve in panels.get(MEMORY, ()) for value in curve.finite]
    is_flat = memory and len(panels) > 1 and max(memory) < 1.05 * min(memory)
    return {panel: panel_curves for panel, panel_curves in panels.items() if panel != MEMORY or not is_flat}


def _constant_memory(run: str, curves: list[Curve]) -> str:
    """A run's peak memory in words, if it has no panel."""
    memory = [value for curve in curves if curve.panel == MEMORY and curve.run == run for value in curve.finite]
    return f"{MEMORY}: {format_number(max(memory))}" if memory and MEMORY not in _group_by_panel(curves) else ""


def _vertical_lines(curves: list[Curve]) -> Iterator[tuple[float, float, str, str, str]]:
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


def draw_picture(curves: list[Curve], path: str, title: str) -> None:
    """Write the panels as PNG, SVG or PDF; without pyplot, so that no window or notebook shows the figure."""
    all_panels = _group_by_panel(curves)
    metrics = [panel for panel, (curve, *_) in all_panels.items() if curve.name not in PANEL_OF and panel not in PANELS]
    hidden = sorted(metrics, key=lambda panel: all(curve.best is None for curve in all_panels[panel]))[MAX_METRICS:]
    panels = [panel_curves for panel, panel_curves in all_panels.items() if panel not in hidden]
    columns = min(len(panels), 2 if len(panels) <= 6 else 3)
    # If a row has fewer panels it is the first, and they are wider.
    first = len(panels) % columns or columns
    rows = [panels[:first], *(panels[n : n + columns] for n in range(first, len(panels), columns))]
    runs = {curve.run: {"color": curve.colour, "marker": curve.mark} for curve in curves if curve.run}
    width = (6 if columns < 3 else 4.5) * columns
    labels = [textwrap.fill(_describe_run(run, curves), 60 * columns) for run in runs]
    title, *notes = _title(title, curves)
    notes += [f"without {len(hidden)} of {len(metrics)} metrics, which are in the page of --html"] * bool(hidden)
    notes = [line for note in notes for line in textwrap.wrap(note, 80)]
    figure = import_plotting("matplotlib.figure").Figure()
    # tight_layout is slow. In inches from the top: the title, all that is above the panels, and each row.
    head = 0.4 + 0.17 * len(notes)
    height, places = head + 0.19 * sum(label.count("\n") + 1 for label in labels) + 0.05, []
    for row in rows:
        wide = (width - LEFT - RIGHT + GAP) / len(row) - GAP
        axes = [figure.add_subplot() for _ in row]
        height += HIGH + 0.15 + 0.18 * max(_draw_panel(*pair, wide) for pair in zip(axes, row, strict=True))
        places += [(axis, LEFT + n * (wide + GAP), height, wide) for n, axis in enumerate(axes)]
        height += LOW
    figure.set_size_inches(width, height)
    for axis, left, bottom, wide in places:
        axis.set_position((left / width, 1 - bottom / height, wide / width, HIGH / height))
        axis.set_xlim(_horizontal_range(curves))
        axis.yaxis.set_label_coords(-0.7 / wide, 0.5)
    figure.suptitle(title, y=1 - 0.15 / height)
    figure.text(0.5, 1 - 0.38 / height, "\n".join(notes), ha="center", va="top", fontsize=9, color="0.4")
    handles = [axis.plot([], [], label=label, **style)[0] for label, style in zip(labels, runs.values(), strict=True)]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - head / height), "borderaxespad": 0}
    figure.legend(handles=handles, fontsize=9, frameon=False, **place)
    figure.savefig(path, dpi=120)


def _describe_run(run: str, curves: list[Curve]) -> str:
    """The name of a run, the arguments in which it differs, its best value, and what no panel shows."""
    run_curves = [curve for curve in curves if curve.run == run]
    best = (f"★ best {c.name}\xa0{c.format(c.values[c.best])}" for c in run_curves if c.best is not None)
    facts = (describe(run_curves[0].settings), next(best, ""), _constant_memory(run, curves), run_curves[0].state)
    return " · ".join(filter(None, (run, *facts)))


def _draw_panel(axis: Any, curves: list[Curve], width: float) -> int:
    """Draw the curves of a panel of so many inches, and return the number of rows of the legend above it."""
    handles: dict[str, Any] = {}
    faint = _opacity(curves)
    is_stacked = curves[0].panel == SHARES and all(curve.steps == curves[0].steps for curve in curves)
    if is_stacked:
        # A value is of the time since the one before.
        points = [curve.points(curve.drawable) for curve in curves]
        colours = [curve.colour for curve in curves]
        areas = axis.stackplot(points[0][0], [values for _, values in points], colors=colours, step="pre")
        handles = dict(zip((curve.label for curve in curves), areas, strict=True))
    for curve in curves if not is_stacked else ():
        style = {"color": curve.colour, "linestyle": list(DASHES)[curve.dash], "linewidth": curve.width}
        # A share is of the time since the value before.
        style["drawstyle"] = "steps-pre" if curve.name in PANELS[SHARES] else "default"
        marks = {"marker": curve.mark, "markersize": 5 if curve.run else 3, "markevery": curve.marked}
        if curve.mean:
            axis.plot(*curve.points(curve.drawable), color=curve.colour, linewidth=0.8, alpha=faint)
        axis.plot(*curve.points(curve.mean or curve.drawable), **marks, **style)
        style |= {"color": curve.legend_colour, "marker": curve.mark if curve.owner else "", "linewidth": 1.5}
        handles.setdefault(curve.legend_entry, axis.plot([], [], **style)[0])
        if curve.best is not None:
            star = {"color": curve.colour, "markeredgecolor": "black", "markersize": 10, "zorder": 3}
            axis.plot(curve.steps[curve.best], curve.drawable[curve.best], "*", **star)
    for start, step, text, colour, dash in _vertical_lines(curves):
        line = axis.axvline(step, color=colour, linestyle=dash, linewidth=1.5 if dash == ":" else 0.8)
        axis.axvspan(start, step, color=colour, alpha=0.12, linewidth=0)
        handles |= {text: line} if text else {}
    for row, curve in enumerate(curve for curve in curves if curve.gaps):
        # Above the lower edge, in the unit of the panel's height.
        missing, place = [curve.steps[index] for index in curve.gaps], axis.get_xaxis_transform()
        axis.plot(missing, [0.02 + 0.03 * row] * len(missing), "x", color=curve.colour, markersize=5, transform=place)
    scale, limits = _vertical_axis(curves)
    axis.set(xlabel=X_AXES[curves[0].x], ylabel=_label(curves, scale), yscale=scale, ylim=limits)
    for curve, step, text, anchor, row in _clipped_peaks(curves, limits[1]):
        axis.plot(step, 0.98, "^", color=curve.colour, markersize=5, transform=axis.get_xaxis_transform())
        style = {"color": curve.colour, "fontsize": 9, "va": "top", "ha": anchor, "textcoords": "offset points"}
        style["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
        axis.annotate(text, (step, limits[1]), (0, -11 * row), **style)
    axis.xaxis.set_major_formatter("{x:,.7g}")
    _format_ticks(axis.yaxis, scale, limits, is_share=curves[0].name in PANELS[SHARES])
    axis.xaxis.get_major_locator().set_params(integer=curves[0].x == "step", min_n_ticks=1)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if handles.keys() == {curves[0].name}:
        return 0
    # An inch has 15 characters, and a sample is as wide as 8.
    columns = max(1, int(15 * width) // (8 + max(map(len, handles))))
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98), "ncols": columns}
    axis.legend(handles.values(), handles.keys(), fontsize=9, frameon=False, **place)
    return -(-len(handles) // columns)


def _format_ticks(axis: Any, scale: str, limits: tuple[float, float], *, is_share: bool) -> None:
    """Write the values of a vertical axis, with one exponent for all of a linear one: not 0.0001 and 5e-05."""
    if scale == "log" and limits[1] < 1000 * limits[0]:
        axis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.set_minor_formatter("")
    power = max(-300, math.floor(math.log10(max(map(abs, limits)))))
    if is_share:
        axis.set_major_formatter("{x:.0%}")
    elif scale == "log":
        axis.set_major_formatter("{x:,.7g}" if power < 6 else "{x:.0e}")
    elif not -4 < power < 6:
        axis.set_major_formatter(lambda value, _: f"{value / 10**power:.6g}e{power}" if value else "0")
    elif not 0.1 < limits[1] < 1000:
        axis.set_major_formatter("{x:,.7g}")
    else:
        # Matplotlib's own format has equal decimals, but no separators.
        axis.get_major_formatter().set_useOffset(False)


def draw_html(curves: list[Curve], path: str, title: str, *, plotlyjs: bool | str = True) -> None:
    """Write the panels as an interactive page, whose file has plotly's script or, for "cdn", fetches it."""
    figure, (title, *notes) = import_plotting("plotly.graph_objects").Figure(), map(html.escape, _title(title, curves))
    runs = {_describe_run(curve.run, curves): curve for curve in curves if curve.run}
    for name, curve in runs.items():
        style = {"line_color": curve.colour, "marker": {"symbol": MARKS[curve.mark], "size": 9}}
        figure.add_scatter(x=[None], y=[None], xaxis="x2", yaxis="y2", name=name, legendgroup=curve.run, **style)
    title_of_x = {"text": X_AXES[curves[0].x], "standoff": 2}
    x_axis = {"title": title_of_x, "range": _horizontal_range(curves), "matches": "x2", "tickformat": ","}
    panels, box, entries = _group_by_panel(curves).values(), "", list[str]()
    for number, panel_curves in enumerate(panels, 2):
        x, y, legend = f"x{number}", f"y{number}", f"legend{number}"
        traces = [trace | {"xaxis": x, "yaxis": y} for trace in _traces(panel_curves, legend)]
        entries = entries or [trace["name"] for trace in traces if trace.get("legend") and trace["name"]]
        figure.add_traces(traces)
        scale, limits = _vertical_axis(panel_curves)
        y_axis: dict[str, Any] = {"title_text": _label(panel_curves, scale), "type": scale, "range": limits}
        y_axis |= {"tickformat": "~e" if max(map(abs, limits)) < 0.001 else ",", "hoverformat": ",.4~g"}
        y_axis |= {"tickformat": ".0%", "hoverformat": ".1%"} if panel_curves[0].name in PANELS[SHARES] else {}
        for curve, step, text, anchor, row in _clipped_peaks(panel_curves, limits[1]):
            place = {"xref": x, "x": step, "yref": f"{y} domain", "y": 1, "yanchor": "top", "showarrow": False}
            figure.add_annotation(text="▲", font_color=curve.colour, **place)
            figure.add_annotation(text=text, yshift=-14 * row, font_color=curve.colour, xanchor=anchor, **place)
        if panel_curves[0].panel == "loss":
            box = BOX % (" checked" * (scale == "log"))
        if scale == "log":
            # plotly takes powers of ten. For two ticks per decade it chooses 1, 2 and 5.
            low, high = map(math.log10, limits)
            ticks = round(2 * (high - low)) if high - low < 3 else min(8, math.ceil(high - low))
            y_axis |= {"range": [low, high], "nticks": ticks, "tickformat": ","}
        axes = {f"xaxis{number}": x_axis | {"anchor": y}, f"yaxis{number}": y_axis | {"anchor": x}}
        figure.update_layout(axes | {legend: {"orientation": "h", "yanchor": "bottom", "tracegroupgap": 0}})
    most = 3 if len(panels) > 6 else 2
    counts, texts = range(most, 0, -1), ([*runs], entries)
    layouts = [(COLUMN_WIDTHS[count], _place_panels(len(panels), count, *texts)) for count in counts]
    figure.update_layout(
        {name.replace(".", "_"): value for name, value in layouts[0][1].items()},
        legend={"x": 0, "y": 1, "yanchor": "bottom", "orientation": "h", "tracegroupgap": 0},
        **{"margin": {"b": 0, "l": 70, "r": 40}, "template": "plotly_white", "modebar": {"orientation": "v"}},
        **{"hovermode": "x unified", "hoverlabel": {"namelength": -1}},
    )
    box += SELECT * any(curve.mean for curve in curves)
    script = f"const layouts = {json.dumps(layouts)};\n{Path(__file__).with_name('page.js').read_text('utf-8')}"
    page = figure.to_html(include_plotlyjs=plotlyjs, config={"responsive": True}, post_script=script)
    page = page.replace("<head>", f"<head><title>{title}</title>{STYLE}", 1)
    heading = f"<h1>{title}</h1><small style='color: gray'>{' · '.join(notes)}</small>{box}"
    page = page.replace("<body>", f"<body>{heading}", 1)
    Path(path).write_text(page.replace("</body>", OFFLINE) if plotlyjs == "cdn" else page, encoding="utf-8")


def _place_panels(count: int, columns: int, runs: list[str], entries: list[str]) -> dict[str, Any]:
    """Where a page of so many columns has its panels and the legends, of runs and of the first panel.

    Returns:
        plotly's names → values.
    """
    # The least width of the legends, which have 50 pixels per sample and 6 per letter, the font, and the space above.
    least, font, top = (300, 10, 30) if columns == 1 else (COLUMN_WIDTHS[columns], 12, 10 if runs else 30)
    row_lengths = [max(1, least // (50 + 6 * max(map(len, texts), default=0))) for texts in (runs, entries)]
    # One row of the panel has its place below that of the runs.
    shift = 20 * max(0, math.ceil(len(entries) / row_lengths[1]) - 1)
    top += 20 * math.ceil(len(runs) / row_lengths[0]) + shift
    columns, gap = min(columns, count), 0.24 / max(2, columns)
    rows, missing = -(-count // columns), -count % columns
    layout: dict[str, Any] = {"height": 310 * rows + top, "margin.t": top, "legend.font.size": font}
    layout["legend.y"] = 1 + shift / 310 / rows
    for number in range(count):
        # If a row has fewer panels it is the first, and they are wider.
        row, column = divmod(number + missing, columns) if number >= columns - missing else (0, number)
        width = (1 + gap) / (columns if row else columns - missing)
        # A legend is above its panel, and the label of the horizontal axis below.
        left, high = column * width, 1 - (row + 0.1) / rows
        layout[f"xaxis{number + 2}.domain"] = [left, left + width - gap]
        layout[f"yaxis{number + 2}.domain"] = [high - 0.73 / rows, high]
        layout |= {f"legend{number + 2}.x": left, f"legend{number + 2}.y": high}
    return layout


def _traces(curves: list[Curve], legend: str) -> Iterator[dict[str, Any]]:
    """Plotly's curves, stars and entries of the legend of a panel."""
    named = {curve.legend_entry: curve for curve in curves}
    for curve in curves:
        style = {"color": curve.colour, "dash": list(DASHES.values())[curve.dash], "width": curve.width + 0.5}
        style |= {"shape": "vh"} if curve.name in PANELS[SHARES] else {}
        group = curve.run or curve.name
        steps, values = curve.points(curve.drawable)
        trace = {"x": steps, "y": values, "name": curve.label, "legendgroup": group, "showlegend": False, "line": style}
        if curve.panel == SHARES:
            area = {"stackgroup": "time", "fillcolor": curve.colour, "legend": legend}
            yield trace | area | {"line": {"width": 0, "shape": "vh"}, "showlegend": True}
            continue
        marked, size = set(curve.marked), 9 if curve.run else 4
        sizes = [size * (point in marked) for point in range(len(steps))]
        marks = {"size": sizes, "symbol": MARKS[curve.mark], "opacity": 1, "line_width": 0}
        trace |= {"mode": "lines+markers", "marker": marks}
        if not curve.mean:
            yield trace
        else:
            faint = {"mode": "lines", "opacity": _opacity(curves), "line": style | {"width": 1}}
            yield from (trace | faint | {"meta": "light strong"}, trace | {"meta": "off", "visible": False})
            for level, parts in SMOOTHING.items():
                mean = {"y": curve.points(curve.smooth(parts))[1], "name": f"{curve.label}, mean"}
                yield trace | mean | {"meta": level, "visible": level == "light"}
        if curve.best is not None:
            point = {"x": [curve.steps[curve.best]], "y": [curve.drawable[curve.best]], "name": f"best {curve.label}"}
            star = {"symbol": "star", "size": 12, "color": curve.colour, "line": {"width": 1, "color": "black"}}
            yield trace | point | {"mode": "markers", "marker": star}
    # Entries without points, since a curve may have two traces and, of several runs, the colour of its run.
    for curve in named.values() if named.keys() != {curves[0].name} and curves[0].panel != SHARES else ():
        style = {"color": curve.legend_colour, "dash": list(DASHES.values())[curve.dash]}
        entry = {"x": [None], "y": [None], "name": curve.legend_entry, "mode": "lines", "line": style}
        entry |= {"mode": "lines+markers", "marker": {"symbol": MARKS[curve.mark], "size": 9}} if curve.owner else {}
        yield entry | {"legend": legend, "legendgroup": f"legend {curve.name}" if curve.run else curve.name}
    low, high = _vertical_axis(curves)[1]
    for start, step, text, colour, dash in _vertical_lines(curves):
        # A line, or the outline of what was lost.
        outline: dict[str, Any] = {"x": [step, step], "y": [low, high], "name": text, "showlegend": bool(text)}
        if start < step:
            outline |= {"x": [step, step, start, start], "y": [low, high, high, low], "fill": "toself"}
        outline |= {"line": {"color": colour, "dash": DASHES[dash], "width": 2 if dash == ":" else 1}}
        outline |= {"hoverinfo": "skip", "fillcolor": "rgba(128, 128, 128, 0.15)"}
        yield outline | {"mode": "lines", "legend": legend}
    for curve in (curve for curve in curves if curve.gaps):
        yield {
            **{"x": [curve.steps[index] for index in curve.gaps], "y": [low] * len(curve.gaps), "mode": "markers"},
            **{"marker": {"symbol": "x", "size": 7, "color": curve.colour}, "cliponaxis": False, "showlegend": False},
            **{"legendgroup": curve.run or curve.name, "name": f"{curve.label}: not finite"},
        }


def import_plotting(module: str) -> Any:
    """Import a module of a plotting library, or raise `MissingPackage`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from cause_if_installed(error)


def plot(
    folders: list[str], *, html: bool | str = False, out: str | None = None, x: str = "step", read: Any = None
) -> list[str]:
    """Draw runs, and return the paths of the new files.

    Args:
        folders: output folders, each with a `trainer_state.json` or a checkpoint.
        html: also write an HTML page; "cdn" for one that fetches plotly's script, of 5 MB, from the network.
        out: the PNG, SVG or PDF to write; the page has its name with '.html'. Default: `training.png` in the folder,
            or `comparison.png` in the first of several; for `checkpoint-5`, `training-5.png` in its parent folder.
        x: the horizontal axis: 'step', 'epoch', or 'time', for which a run needs `observe=True`.
        read: the curves, if they have been read already.

    Raises:
        InvalidArgument: if a folder contains no run. The error names the folder.
        MissingPackage: if matplotlib is missing, or plotly for the page.
    """
    name = "training" if len(folders) == 1 else "comparison"
    folder, step = folders[0], names.step_of(os.path.realpath(folders[0]))
    if step is not None:
        folder, name = os.path.normpath(os.path.join(folder, "..")), f"{name}-{step}"
    picture = Path(out) if out is not None else Path(folder) / f"{name}.png"
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(f"{picture}: the file name must end in .png, .svg or .pdf.")
    run_curves = read or read_curves(folders, x)
    title = Path(os.path.realpath(folders[0])).name
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(run_curves, str(picture), title)
    page = str(picture.with_suffix(".html"))
    if html:
        draw_html(run_curves, page, title, plotlyjs=html)
    return [str(picture), page] if html else [str(picture)]


class PlotCallback(TrainerCallback):
    """Draws the run at the end of training: `training.png` in `output_dir`, in a notebook also below the cell.

    Raises:
        MissingPackage: in the constructor, if matplotlib is not installed.
    """

    def __init__(self) -> None:
        import_plotting("matplotlib.figure")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Draw the run's log."""
        if not state.is_world_process_zero:
            return
        run_curves = curves_of_run(state)
        if not run_curves:
            logger.warning("PlotCallback: the log of the run has nothing to draw; see logging_steps.")
            return
        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, "training.png")
        draw_picture(run_curves, path, os.path.basename(os.path.realpath(args.output_dir)))
        if is_in_notebook():
            show_in_notebook(path)
