"""Draws runs as pictures, with matplotlib: from their folders, and at the end of training."""

from __future__ import annotations

import logging
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hftrainer.callbacks.progress_bar import is_in_notebook, show_in_notebook
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing import layout
from hftrainer.errors import InvalidArgument
from hftrainer.monitoring.run_facts import RunRecord
from hftrainer.reporting import panels
from hftrainer.reporting.curves import DASHES, MANY, X_AXES, Curve, curves_of_run, explain_empty, read_curves
from hftrainer.reporting.metrics import PANEL_OF, PANELS, SHARES
from hftrainer.reporting.page import draw_html

logger = logging.getLogger(__name__)

#: Inches of a picture.
LEFT_MARGIN, RIGHT_MARGIN, COLUMN_GAP, PANEL_HEIGHT, TICK_LABELS, AXIS_LABEL = 1.0, 0.25, 1.15, 2.75, 0.3, 0.25
#: Number of metrics in a picture; a page has all.
MAX_METRICS = 12


def read_charts(runs: Sequence[RunRecord | str], x: str, *, with_others: bool) -> dict[str, list[Curve]]:
    """Horizontal axis → the curves to draw: over `x`, and over the others if all runs have something to draw there.

    Raises:
        InvalidArgument: if a run has nothing to draw over `x`.
    """
    records = [RunRecord(run) if isinstance(run, str) else run for run in runs]
    others = [other for other in ("step", "epoch", "time") if other != x] if with_others else []
    found = [x, *(other for other in others if not any(explain_empty(record, other) for record in records))]
    return {axis: read_curves(records, axis, join_seeds=True) for axis in found}


@dataclass(frozen=True)
class _Layout:
    """What a picture has, and where, in inches from its left and upper edge.

    Attributes:
        rows: the rows of panels; a panel is the list of its curves.
        width: of the picture.
        notes: the lines below the title.
        runs: the texts of a legend of runs, and their colours and markers.
        columns: of that legend.
        legend_top: where that legend begins.
        panels_top: where the first row begins.
    """

    rows: list[list[list[Curve]]]
    width: float
    notes: list[str]
    runs: dict[str, dict[str, str]]
    columns: int
    legend_top: float
    panels_top: float


def draw_picture(curves: list[Curve], path: str, title: str) -> None:
    """Write the panels as PNG, SVG or PDF; without pyplot, so that no window or notebook shows the figure."""
    title, *notes = panels.title_and_notes(title, curves)
    layout = _make_layout(curves, notes)
    figure = panels.import_plotting("matplotlib.figure").Figure()
    # tight_layout is slow.
    height = _draw_rows(figure, layout, panels.horizontal_range(curves))
    figure.suptitle(title, y=1 - 0.15 / height)
    figure.text(0.5, 1 - 0.38 / height, "\n".join(layout.notes), ha="center", va="top", fontsize=9, color="0.4")
    handles = [figure.axes[-1].plot([], [], label=label, **style)[0] for label, style in layout.runs.items()]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - layout.legend_top / height), "borderaxespad": 0}
    figure.legend(handles=handles, fontsize=9, frameon=False, ncols=layout.columns, **place)
    figure.savefig(path, dpi=120)


def _choose_panels(curves: list[Curve]) -> tuple[list[list[Curve]], list[str]]:
    """The panels of a picture, and a note about those that only a page has."""
    found = panels.group_by_panel(curves)
    if "samples per second" in found:
        # They mirror them.
        found = {name: panel for name, panel in found.items() if not name.endswith("seconds per step")}
    metrics = [name for name, (curve, *_) in found.items() if curve.name not in PANEL_OF and name not in PANELS]
    hidden = sorted(metrics, key=lambda name: all(curve.best is None for curve in found[name]))[MAX_METRICS:]
    note = f"without {len(hidden)} of {len(metrics)} metrics, which are in the page of --html"
    return [panel for name, panel in found.items() if name not in hidden], [note] if hidden else []


def _make_layout(curves: list[Curve], notes: list[str]) -> _Layout:
    """The layout of a picture with these notes, and others about its panels."""
    shown, omitted = _choose_panels(curves)
    columns = min(len(shown), 2 if len(shown) <= 6 else 3)
    # If a row has fewer panels it is the first, and they are wider.
    first = len(shown) % columns or columns
    rows = [shown[:first], *(shown[n : n + columns] for n in range(first, len(shown), columns))]
    width = (6 if columns < 3 else 4.5) * columns
    means = f"faint: logged values; strong: centred mean without spikes, from {MANY} points on"
    notes = [*notes, *([means] if any(curve.mean for curve in curves) else []), *omitted]
    lines = [line for note in notes for line in textwrap.wrap(note, max(80, 60 * columns))]
    styles = {curve.run: {"color": curve.colour, "marker": curve.mark} for curve in curves if curve.run}
    runs = {textwrap.fill(panels.describe_run(run, curves), 60 * columns): style for run, style in styles.items()}
    texts = [line for text in runs for line in text.split("\n")]
    # An inch has 15 characters, and a sample is as wide as 8.
    legend_columns = max(1, min(3, int(15 * width) // max((8 + len(text) for text in texts), default=8)))
    legend_top = 0.4 + 0.17 * len(lines)
    panels_top = legend_top + 0.19 * -(-len(texts) // legend_columns) + 0.05
    return _Layout(rows, width, lines, runs, legend_columns, legend_top, panels_top)


def _draw_rows(figure: Any, layout: _Layout, limits: tuple[float, float]) -> float:
    """Draw the panels over a horizontal axis with these limits, and return the height of the picture."""
    places = []
    bottom = layout.panels_top
    for row in layout.rows:
        width = (layout.width - LEFT_MARGIN - RIGHT_MARGIN + COLUMN_GAP) / len(row) - COLUMN_GAP
        legends = [_draw_panel(figure.add_subplot(), panel, width) for panel in row]
        bottom += PANEL_HEIGHT + 0.15 + 0.18 * max(legends)
        places += [(LEFT_MARGIN + number * (width + COLUMN_GAP), bottom, width) for number in range(len(row))]
        bottom += TICK_LABELS
    # Only the lowest row names the horizontal axis, which all panels share.
    for axis, (curve, *_) in zip(figure.axes[-len(row) :], row, strict=True):
        axis.set_xlabel(X_AXES[curve.x])
    height = bottom + AXIS_LABEL
    figure.set_size_inches(layout.width, height)
    # Inches of a label and the space after it.
    label_width = 0.25 + 0.075 * len(f"{limits[1]:,.0f}")
    for axis, (left, bottom, width) in zip(figure.axes, places, strict=True):
        axis.xaxis.get_major_locator().set_params(nbins=min(9, int(width / label_width)))
        axis.set_position((left / layout.width, 1 - bottom / height, width / layout.width, PANEL_HEIGHT / height))
        axis.set_xlim(limits)
    return height


def _draw_panel(axis: Any, curves: list[Curve], width: float) -> int:
    """Draw the curves of a panel of so many inches, and return the number of rows of the legend above it."""
    is_stacked = curves[0].panel == SHARES and all(curve.steps == curves[0].steps for curve in curves)
    handles = _draw_areas(axis, curves) if is_stacked else _draw_lines(axis, curves)
    handles |= _draw_incidents(axis, curves)
    scale, limits = panels.vertical_axis(curves)
    axis.set(ylabel=panels.axis_label(curves, scale), yscale=scale, ylim=limits)
    handles |= _draw_peaks(axis, curves, limits[1], int(15 * width) - 8)
    if curves[0].x == "step":
        axis.xaxis.set_major_formatter("{x:,.7g}")
    values = {value for curve in curves for value in curve.drawable if math.isfinite(value)}
    format_ticks(axis.yaxis, scale, limits, is_share=curves[0].name in PANELS[SHARES])
    if len(values) < 2:
        ticks = sorted({0.0, *values}) if values else []
        axis.set_yticks(ticks, [f"{tick:.2g}" if abs(tick) >= 1e6 else curves[0].format(tick) for tick in ticks])
    axis.xaxis.get_major_locator().set_params(integer=curves[0].x == "step", min_n_ticks=1)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    # The label of the axis names the only curve.
    if {curve.legend_entry for curve in curves} == {curves[0].name}:
        handles.pop(curves[0].name, None)
    if not handles:
        return 0
    # An inch has 15 characters, and a sample is as wide as 8.
    lengths = [8 + max(map(len, text.split("\n"))) for text in handles]
    counts = range(len(handles), 1, -1)
    columns = next((n for n in counts if sum(map(max, np.array_split(lengths, n))) <= 15 * width), 1)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.1 / width, 0.98), "ncols": columns}
    axis.legend(handles.values(), handles.keys(), fontsize=9, frameon=False, **place)
    return -(-len(handles) // columns) + sum(text.count("\n") for text in handles)


def _draw_areas(axis: Any, curves: list[Curve]) -> dict[str, Any]:
    """Draw shares on top of each other, and return the samples of the legend by their text."""
    points = [curve.points(curve.drawable) for curve in curves]
    colours = [curve.colour for curve in curves]
    areas = axis.stackplot(points[0][0], [values for _, values in points], colors=colours)
    return dict(zip((curve.label for curve in curves), areas, strict=True))


def _draw_lines(axis: Any, curves: list[Curve]) -> dict[str, Any]:
    """Draw the curves with their best values, and return the samples of the legend by their text."""
    handles: dict[str, Any] = {}
    top = panels.vertical_axis(curves)[1][1]
    floor, text = panels.height_of_zeros(curves)
    for curve in curves:
        style = {"color": curve.colour, "linestyle": list(DASHES)[curve.dash], "linewidth": 1.5}
        # Marks tell runs apart, and are most of what is seen of a few points.
        marks = {"marker": curve.mark, "markersize": 5 if curve.run or len(curve.values) < 5 else 3}
        entry = {"color": curve.legend_colour, "marker": curve.mark if curve.owner else ""}
        handles.setdefault(curve.legend_entry, axis.plot([], [], **(style | entry))[0])
        if curve.mean or curve.peaks(top) or curve.member:
            faint = {"linewidth": 0.8, "alpha": panels.opacity_under_mean(curves)}
            axis.plot(*curve.points(curve.drawable, floor), **(style | faint))
        if curve.member:
            continue
        values = curve.mean or curve.below(top)
        axis.plot(*curve.shared_points(values, floor), **(style | {"linewidth": curve.width}))
        axis.plot(*curve.points(values, floor), markevery=curve.marked, **marks, **style)
        # Both are seen where they meet.
        for point, shape, size in ((curve.best, "*", 14), (curve.end, "X", 7)):
            if point is not None:
                mark = {"color": curve.colour, "markeredgecolor": "black", "markersize": size, "zorder": 20 - size}
                axis.plot(curve.steps[point], max(floor, curve.drawable[point]), shape, **mark)
    handles |= {text: axis.plot([], [], "_", color="grey")[0]} if text else {}
    return handles


def _draw_incidents(axis: Any, curves: list[Curve]) -> dict[str, Any]:
    """Mark restarts and what is not finite, and return the samples of the legend by their text."""
    handles: dict[str, Any] = {}
    for start, step, text, colour, dash in panels.vertical_lines(curves):
        line = axis.axvline(step, color=colour, linestyle=dash, linewidth=1.5 if text else 0.8)
        axis.axvspan(start, step, color=colour, alpha=0.12, linewidth=0)
        handles |= {text: line} if text else {}
    for height, steps, curve in panels.non_finite_marks(curves):
        # In the unit of the panel's height.
        style = {"color": curve.colour, "markersize": 6, "transform": axis.get_xaxis_transform()}
        handles.setdefault("not finite", axis.plot(steps, [height] * len(steps), "|", **style)[0])
    return handles


def _draw_peaks(axis: Any, curves: list[Curve], top: float, line_length: int) -> dict[str, Any]:
    """Mark what leaves a panel at its upper edge, and return the samples of the legend by their text."""
    handles: dict[str, Any] = {}
    for curve, steps, text in panels.clipped_peaks(curves, top):
        style = {"color": curve.colour, "markersize": 5, "transform": axis.get_xaxis_transform()}
        handles[textwrap.fill(text, line_length)] = axis.plot(steps, [0.98] * len(steps), "^", **style)[0]
    return handles


def format_ticks(axis: Any, scale: str, limits: tuple[float, float], *, is_share: bool) -> None:
    """Write the values of a vertical axis; of a linear one with one exponent and equal decimals: not 1e-4 and 5e-05."""
    if scale == "log" and limits[1] < 1000 * limits[0]:
        axis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7) if limits[1] < 10 * limits[0] else (1, 2, 5))
    axis.set_minor_formatter("")
    power = max(-300, math.floor(math.log10(max(map(abs, limits)))))
    exponent = 0 if -4 < power < 6 else power

    def write(value: float, _: int) -> str:
        ticks = (f"{tick / 10**exponent:.9f}" for tick in axis.get_majorticklocs())
        decimals = max(len(tick.rstrip("0").partition(".")[2]) for tick in ticks)
        # Zero without a sign.
        number = round(value / 10**exponent, decimals) + 0.0
        text = f"{number:,.{decimals}f}"
        return f"{text}e{exponent}" if exponent and number else text

    if is_share:
        axis.set_major_formatter("{x:.0%}")
    elif scale == "log":
        axis.set_major_formatter(
            (lambda value, _: f"{value:,.9f}".rstrip("0").rstrip(".")) if -8 < power < 6 else "{x:.0e}"
        )
    else:
        axis.set_major_formatter(write)


def plot(
    folders: list[str],
    *,
    html: bool | str = False,
    out: str | None = None,
    x: str = "step",
    charts: dict[str, list[Curve]] | None = None,
    table: str = "",
) -> list[str]:
    """Draw runs, and return the paths of the new files.

    Args:
        folders: output folders, each with a `trainer_state.json` or a checkpoint.
        html: also write an HTML page; "cdn" for one that fetches plotly's script, of 5 MB, from the network.
        out: the PNG, SVG or PDF to write; the page has its name with '.html'. Default: `training.png` in the folder,
            or `comparison.png` in the first of several; for `checkpoint-5`, `training-5.png` in its parent folder.
        x: the horizontal axis: 'step', 'epoch', or 'time', for which a run needs `observe=True`. A page has a choice.
        charts: what `read_charts` returned, if it has been called already.
        table: the values of the runs as text, for the page.

    Raises:
        InvalidArgument: if a folder contains no run. The error names the folder.
        MissingPackage: if matplotlib is missing, or plotly for the page.
    """
    name = "training" if len(folders) == 1 else "comparison"
    folder = folders[0]
    if (step := layout.step_of(os.path.realpath(folder))) is not None:
        folder = os.path.normpath(os.path.join(folder, ".."))
        name = f"{name}-{step}"
    picture = Path(out) if out is not None else Path(folder) / f"{name}.png"
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(f"{picture}: the file name must end in .png, .svg or .pdf.")
    charts = charts or read_charts(folders, x, with_others=bool(html))
    title = Path(os.path.realpath(folders[0])).name
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(charts[x], str(picture), title)
    page = str(picture.with_suffix(".html"))
    if html:
        draw_html(charts, page, title, table=table, plotlyjs=html)
    return [str(picture), page] if html else [str(picture)]


class PlotCallback(TrainerCallback):
    """Draws the run at the end of training: `training.png` in `output_dir`, in a notebook also below the cell.

    Raises:
        MissingPackage: in the constructor, if matplotlib is not installed.
    """

    def __init__(self) -> None:
        panels.import_plotting("matplotlib.figure")

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
