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

from hftrainer.callbacks.progress_bar import is_in_notebook, show_in_notebook
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing import names
from hftrainer.checkpointing.saved_arguments import describe
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed
from hftrainer.reporting.curves import DASHES, MANY, MARKS, X_AXES, Curve, curves_of_run, read_curves
from hftrainer.reporting.metrics import PANEL_OF, PANELS, SHARES, SPEEDS, is_finite

logger = logging.getLogger(__name__)

#: Let a phone show one column, and turn white into black where the reader prefers that.
STYLE = """<meta name="viewport" content="width=device-width"><style>html { scrollbar-gutter: stable; }
html body { background: white; font: 14px sans-serif; height: auto; } h1 { font-size: 16px; margin: 0; }
@media (prefers-color-scheme: dark) { html { filter: invert(0.9) hue-rotate(180deg); } }</style>"""
#: Give a narrow window one column.
REFLOW = """const wide = matchMedia("(min-width: 900px)");
wide.onchange = () => Plotly.relayout("{plot_id}", wide.matches ? %s : %s);
if (!wide.matches) wide.onchange();"""
#: Say why a page is blank.
OFFLINE = """<script>window.Plotly || document.querySelector("h1").after("The plot needs https://cdn.plot.ly, which "
+ "did not load. Make a page that works offline: hftrainer plot OUTPUT_DIR --html ")</script></body>"""
#: Number of metrics in a picture; a page has all.
MAX_METRICS = 12


def _vertical_axis(curves: list[Curve]) -> tuple[str, tuple[float, float]]:
    """The scale of a panel, 'linear' or 'log', and its range.

    Speeds and memory begin at 0, and end at most at twice the 95th percentile of a curve. The scale is logarithmic if
    losses span two orders of magnitude, if a few gradient norms would make the others unreadable, or if the peak
    learning rates of curves differ 50-fold. It then ends at a third of the lowest running mean. Of several
    runs, losses and gradient norms that reach 1000 times the median of the curves' highest values leave the panel.
    """
    if curves[0].name in PANELS[SHARES]:
        return "linear", (0, 1 if curves[0].panel == SHARES else 1.05)
    values, panel = [value for curve in curves for value in curve.finite], curves[0].panel
    if PANEL_OF.get(curves[0].name) in SPEEDS or not values:
        usual = max((np.percentile(curve.finite, 95, method="lower") for curve in curves if curve.finite), default=0)
        high = max(values, default=0)
        return "linear", (0, 1.05 * (min(high, 2 * float(usual)) or high) or 1)
    curves = [curve for curve in curves if curve.finite]
    highs = [max(curve.finite) for curve in curves]
    if curves[0].run and panel in ("loss", "gradient norm"):
        top = max(high for high in highs if high <= abs(1000 * statistics.median_low(highs)))
        values = [value for value in values if value <= top]
    # A warm-up from 0 and a decay to 0 go below the panel.
    lows = [min(filter(is_finite, it.mean)) / 3 if it.mean and it.is_faint else min(it.finite) for it in curves]
    low = min(highs) / 100 if panel == "learning rate" else min(lows)
    limits = {"loss": 100 * low, "gradient norm": 20 * statistics.median(values), "learning rate": 50 * min(highs)}
    if low > 0 and max(values) >= limits.get(panel, math.inf):
        first, last = _range([math.log10(low), math.log10(max(values))])
        return "log", (10**first, 10**last)
    return "linear", _range(values)


def _range(values: list[float]) -> tuple[float, float]:
    """The range of a linear axis: its values, and a margin of 5 %."""
    low, high = min(values), max(values)
    margin = (high - low) / 20 or abs(high) / 20 or 1
    return low - margin, high + margin


def _horizontal_range(curves: list[Curve]) -> tuple[float, float]:
    """The range of all horizontal axes, from 0, with space for a marker at 0."""
    steps = [step for curve in curves for step in curve.steps]
    return min(0, min(steps) - max(steps) / 100), _range([0, *steps])[1]


def _label(curves: list[Curve], scale: str) -> str:
    """The label of a vertical axis: words, or the name of the only curve; and its scale."""
    name, panel = curves[0].name, curves[0].panel
    label = name if {curve.name for curve in curves} == {name} - set(PANEL_OF) else panel[0].upper() + panel[1:]
    return label + " (log scale)" * (scale == "log")


def _clipped_peaks(curves: list[Curve], top: float) -> Iterator[tuple[Curve, float, str]]:
    """The curves that leave a panel, with the step of their highest value, and a mark with the value."""
    for curve in curves:
        values = curve.mean if curve.mean and not curve.is_faint else curve.values
        value, step = max(zip(values, curve.steps, strict=True), key=lambda point: (is_finite(point[0]), point[0]))
        if value > top:
            yield curve, step, f"▲ {value:,.0f}" if 100 <= value < 1e6 else f"▲ {value:.3g}"


def _title(name: str, curves: list[Curve]) -> list[str]:
    """The runs; and notes for below: what smooth and faint curves are, and which runs have no speeds."""
    runs = list(dict.fromkeys(curve.run for curve in curves))
    names = f"{', '.join(runs[:-1])} and {runs[-1]}" if len(runs) < 4 else f"{len(runs)} training runs"
    title = [f"Comparison of {names}" if len(runs) > 1 else f"Training run {name}"]
    if any(curve.mean for curve in curves):
        faint = "faint: logged values; strong: their" if curves[0].is_faint else f"curves of {MANY} values or more: the"
        title.append(f"{faint} running mean, over a twentieth of the values")
    observed = {curve.run for curve in curves if PANEL_OF.get(curve.name) in SPEEDS}
    if observed and (others := ", ".join(run for run in runs if run not in observed)):
        title.append(f"{others} ran without observe=True: no speed, time or memory")
    return title


def _group_by_panel(curves: list[Curve]) -> dict[str, list[Curve]]:
    return {panel: list(panel_curves) for panel, panel_curves in groupby(curves, key=lambda curve: curve.panel)}


def _find_first_gap(curves: list[Curve]) -> tuple[float, str] | None:
    """The first step with a non-finite value in a panel, and a text that names the curve."""
    points = (
        (step, curve.label, value) for curve in curves for step, value in zip(curve.steps, curve.values, strict=True)
    )
    gap = min(((step, label) for step, label, value in points if not is_finite(value)), default=None)
    return gap and (gap[0], f"{gap[1]} is not finite at {curves[0].x} {gap[0]:g}")


def draw_picture(curves: list[Curve], path: str, title: str) -> None:
    """Write the panels as PNG, SVG or PDF; without pyplot, so that no window or notebook shows the figure."""
    all_panels = _group_by_panel(curves)
    metrics = [panel for panel, (curve, *_) in all_panels.items() if curve.name not in PANEL_OF and panel not in PANELS]
    hidden = sorted(metrics, key=lambda panel: all(curve.best is None for curve in all_panels[panel]))[MAX_METRICS:]
    panels = {panel: panel_curves for panel, panel_curves in all_panels.items() if panel not in hidden}
    columns = min(len(panels), 2 if len(panels) <= 6 else 3)
    rows, missing = -(-len(panels) // columns), -len(panels) % columns
    runs = {curve.run: {"color": curve.colour, "marker": curve.mark} for curve in curves if curve.run}
    width = 6 if columns < 3 else 4.5
    labels = [textwrap.fill(_describe_run(run, curves), 60 * columns) for run in runs]
    figure = import_plotting("matplotlib.figure").Figure()
    legend = 0.0
    for number, panel_curves in enumerate(panels.values(), 1):
        # If a row has fewer panels it is the first, and they are wider.
        is_first = number <= columns - missing
        axis = figure.add_subplot(rows, columns - missing * is_first, number + missing * (not is_first))
        legend = max(legend, 0.18 * _draw_panel(axis, panel_curves))
        axis.set_xlim(_horizontal_range(curves))
    title, *notes = _title(title, curves)
    notes += [f"without {len(hidden)} of {len(metrics)} metrics, which are in the page of --html"] * bool(hidden)
    notes = [line for note in notes for line in textwrap.wrap(note, 80)]
    # tight_layout is slow. In inches: the title, all that is above the panels, and the legend above each panel.
    head = 0.4 + 0.17 * len(notes)
    top = head + 0.19 * sum(label.count("\n") + 1 for label in labels) + 0.08
    height = (3.4 + legend) * rows + top
    figure.set_size_inches(width * columns, height)
    edges = (1 / width / columns, 0.55 / height, 0.98, 1 - (top + legend) / height)
    figure.suptitle(title, y=1 - 0.15 / height)
    figure.text(0.5, 1 - 0.38 / height, "\n".join(notes), ha="center", va="top", fontsize=9, color="0.4")
    figure.subplots_adjust(*edges, wspace=1.3 / width, hspace=(0.55 + legend) / 2.85)
    handles = [axis.plot([], [], label=label, **style)[0] for label, style in zip(labels, runs.values(), strict=True)]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - head / height), "borderaxespad": 0}
    figure.legend(handles=handles, fontsize=9, frameon=False, **place)
    figure.savefig(path, dpi=120)


def _describe_run(run: str, curves: list[Curve]) -> str:
    """The name of a run, the arguments in which it differs, and its best value."""
    run_curves = [curve for curve in curves if curve.run == run]
    best = (f"★ best {curve.name}\xa0{curve.values[curve.best]:.4g}" for curve in run_curves if curve.best is not None)
    return " · ".join(filter(None, (run, describe(run_curves[0].settings), next(best, ""))))


def _draw_panel(axis: Any, curves: list[Curve]) -> int:
    """Draw the curves of a panel, and return the number of rows of the legend above it."""
    handles: dict[str, Any] = {}
    is_stacked = curves[0].panel == SHARES and all(curve.steps == curves[0].steps for curve in curves)
    if is_stacked:
        # A value is of the time since the one before.
        values, colours = [[0, *(curve.mean or curve.values)] for curve in curves], [curve.colour for curve in curves]
        areas = axis.stackplot([0, *curves[0].steps], values, colors=colours, step="pre")
        handles = dict(zip((curve.label for curve in curves), areas, strict=True))
    for curve in curves if not is_stacked else ():
        style = {"color": curve.colour, "linestyle": list(DASHES)[curve.dash], "linewidth": 1.5}
        # A share is of the time since the value before.
        style["drawstyle"] = "steps-pre" if curve.name in PANELS[SHARES] else "default"
        marks = {"marker": curve.mark, "markersize": 5 if curve.run else 3, "markevery": curve.marked}
        if curve.mean and curve.is_faint:
            axis.plot(*curve.points(curve.values), color=curve.colour, linewidth=0.8, alpha=0.3)
        axis.plot(*curve.points(curve.mean or curve.values), **marks, **style)
        style |= {"color": curve.legend_colour, "marker": curve.mark if curve.owner else ""}
        handles.setdefault(curve.legend_entry, axis.plot([], [], **style)[0])
        if curve.best is not None:
            star = {"color": curve.colour, "markeredgecolor": "black", "markersize": 10, "zorder": 3}
            axis.plot(curve.steps[curve.best], curve.values[curve.best], "*", **star)
    if gap := _find_first_gap(curves):
        handles[gap[1]] = axis.axvline(gap[0], color="red", linestyle=":")
    scale, limits = _vertical_axis(curves)
    axis.set(xlabel=X_AXES[curves[0].x], ylabel=_label(curves, scale), yscale=scale, ylim=limits)
    for row, (curve, step, text) in enumerate(_clipped_peaks(curves, limits[1])):
        axis.text(step, limits[1], "\n" * row + text, color=curve.colour, fontsize=9, va="top")
    axis.xaxis.set_major_formatter("{x:,.7g}")
    if is_short := scale == "log" and limits[1] < 1000 * limits[0]:
        axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    is_share = curves[0].name in PANELS[SHARES]
    if is_short or is_share or (scale == "linear" and not 0.1 < limits[1] < 1000):
        axis.yaxis.set_major_formatter("{x:.0%}" if is_share else "{x:,.7g}")
    if scale == "linear" and 0 < (top := max(map(abs, limits))) < 0.001:
        # One exponent, not 0.0001 and 5e-05.
        power = math.floor(math.log10(top))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value / 10**power:.6g}e{power}" if value else "0")
    axis.xaxis.get_major_locator().set_params(integer=curves[0].x == "step", min_n_ticks=1)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if handles.keys() == {curves[0].name}:
        return 0
    # About 70 characters are as wide as a panel, and 8 as a sample.
    columns = max(1, 70 // (8 + max(map(len, handles))))
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98), "ncols": columns}
    axis.legend(handles.values(), handles.keys(), fontsize=9, frameon=False, **place)
    return -(-len(handles) // columns)


def draw_html(curves: list[Curve], path: str, title: str, *, plotlyjs: bool | str = True) -> None:
    """Write the panels as an interactive page, whose file has plotly's script or, for "cdn", fetches it."""
    figure, (title, *notes) = import_plotting("plotly.graph_objects").Figure(), map(html.escape, _title(title, curves))
    runs = {_describe_run(curve.run, curves): curve for curve in curves if curve.run}
    for name, curve in runs.items():
        style = {"line_color": curve.colour, "marker": {"symbol": MARKS[curve.mark], "size": 9}}
        figure.add_scatter(x=[None], y=[None], xaxis="x2", yaxis="y2", name=name, legendgroup=curve.run, **style)
    title_of_x = {"text": X_AXES[curves[0].x], "standoff": 2}
    x_axis = {"title": title_of_x, "range": _horizontal_range(curves), "matches": "x2"}
    panels = _group_by_panel(curves).values()
    for number, panel_curves in enumerate(panels, 2):
        x, y, legend = f"x{number}", f"y{number}", f"legend{number}"
        figure.add_traces([trace | {"xaxis": x, "yaxis": y} for trace in _traces(panel_curves, legend)])
        scale, limits = _vertical_axis(panel_curves)
        y_axis: dict[str, Any] = {"title_text": _label(panel_curves, scale), "type": scale, "range": limits}
        y_axis |= {"tickformat": ".0%"} if panel_curves[0].name in PANELS[SHARES] else {}
        for row, (curve, step, text) in enumerate(_clipped_peaks(panel_curves, limits[1])):
            place = {"xref": x, "x": step, "yref": f"{y} domain", "y": 1, "xanchor": "left", "yanchor": "top"}
            figure.add_annotation(text=text, yshift=-14 * row, font_color=curve.colour, showarrow=False, **place)
        if panel_curves[0].panel == "loss":
            figure.update_layout(updatemenus=[_scale_button(f"yaxis{number}", panel_curves, scale, limits)])
        if scale == "log":
            # plotly takes powers of ten. For two ticks per decade it chooses 1, 2 and 5; a format writes them in full.
            low, high = map(math.log10, limits)
            y_axis |= {"range": [low, high], "nticks": min(8, math.ceil(high - low))}
            y_axis |= {"nticks": round(2 * (high - low)), "tickformat": "~g"} if high - low < 3 else {}
        axes = {f"xaxis{number}": x_axis | {"anchor": y}, f"yaxis{number}": y_axis | {"anchor": x}}
        figure.update_layout(axes | {legend: {"orientation": "h", "yanchor": "bottom", "tracegroupgap": 0}})
    figure.update_yaxes(exponentformat="power", minexponent=4)
    wide, narrow = (_place_panels(len(panels), columns, [*runs]) for columns in (2, 1))
    figure.update_layout(
        {name.replace(".", "_"): value for name, value in wide.items()},
        legend={"x": 0, "y": 1, "yanchor": "bottom", "orientation": "h", "tracegroupgap": 0},
        **{"margin": {"b": 0, "l": 70, "r": 20}, "template": "plotly_white"},
        **{"hovermode": "x unified", "hoverlabel": {"namelength": -1}},
    )
    script = REFLOW % (json.dumps(wide), json.dumps(narrow))
    page = figure.to_html(include_plotlyjs=plotlyjs, config={"responsive": True}, post_script=script)
    page = page.replace("<head>", f"<head><title>{title}</title>{STYLE}", 1)
    page = page.replace("<body>", f"<body><h1>{title}</h1><small style='color: gray'>{' · '.join(notes)}</small>", 1)
    Path(path).write_text(page.replace("</body>", OFFLINE) if plotlyjs == "cdn" else page, encoding="utf-8")


def _scale_button(axis: str, curves: list[Curve], scale: str, limits: tuple[float, float]) -> dict[str, Any]:
    """Plotly's button that names the scale of a panel, and switches it, at the upper right."""
    values = [value for curve in curves for value in curve.finite if 0 < value <= limits[1]] or [1]
    ranges = {"log": [*map(math.log10, (min(values), 2 * max(values)))], "linear": [limits[0], 1.1 * max(values)]}
    states = [
        {f"{axis}.type": each, f"{axis}.range": ranges[each], f"{axis}.title.text": _label(curves, each)}
        | {"updatemenus[0].buttons[0].label": f"Loss axis: {each}"}
        for each in ranges
    ]
    button = {"label": f"Loss axis: {scale}", "method": "relayout", "args": states[:1], "args2": states[1:]}
    # -1: no button is pressed.
    return {"type": "buttons", "active": -1 if scale == "linear" else 0, "buttons": [button], "x": 1}


def _place_panels(count: int, columns: int, runs: list[str]) -> dict[str, Any]:
    """Where a page of so many columns has its panels and the legends: plotly's names → values."""
    # The least width of the legend, which has 50 pixels per sample and 6 per letter, its font, and the space above it.
    # Plotly's buttons need 30 pixels.
    least, font, top = (900, 12, 10 if runs else 30) if columns == 2 else (300, 10, 30)
    top += 20 * math.ceil(len(runs) / max(1, least // (50 + 6 * max(map(len, runs), default=0))))
    columns = min(columns, count)
    width, rows = (1 - 0.12 * (columns - 1)) / columns, -(-count // columns)
    layout: dict[str, Any] = {"height": 310 * rows + top, "margin.t": top, "legend.font.size": font}
    # The first of an odd number of panels fills its row.
    for number, place in enumerate([0, *range(1 + count % columns, count + count % columns)], 2):
        # A legend is above its panel, and the label of the horizontal axis below.
        left, high = place % columns * (width + 0.12), 1 - (place // columns + 0.1) / rows
        right = left + (1 if place < count % columns else width)
        layout |= {f"xaxis{number}.domain": [left, right], f"yaxis{number}.domain": [high - 0.73 / rows, high]}
        layout |= {f"legend{number}.x": left, f"legend{number}.y": high}
    return layout


def _traces(curves: list[Curve], legend: str) -> Iterator[dict[str, Any]]:
    """Plotly's curves, stars and entries of the legend of a panel."""
    named = {curve.legend_entry: curve for curve in curves}
    for curve in curves:
        style = {"color": curve.colour, "dash": list(DASHES.values())[curve.dash]}
        style |= {"shape": "vh"} if curve.name in PANELS[SHARES] else {}
        group = curve.run or curve.name
        steps, values = curve.points(curve.values)
        trace = {"x": steps, "y": values, "name": curve.label, "legendgroup": group, "showlegend": False, "line": style}
        if curve.panel == SHARES:
            area = {"stackgroup": "time", "stackgaps": "interpolate", "fillcolor": curve.colour, "legend": legend}
            points = {"x": [0, *steps], "y": [0, *curve.points(curve.mean or curve.values)[1]], "name": curve.label}
            yield trace | points | area | {"line": {"width": 0, "shape": "vh"}, "showlegend": True}
            continue
        if curve.mean:
            yield from [trace | {"mode": "lines", "opacity": 0.3}] * curve.is_faint
            trace |= {"y": curve.points(curve.mean)[1], "name": f"{curve.label}, running mean"}
        marked, size = set(curve.marked), 9 if curve.run else 4
        sizes = [size * (point in marked) for point in range(len(steps))]
        marks = {"size": sizes, "symbol": MARKS[curve.mark], "opacity": 1, "line_width": 0}
        yield trace | {"mode": "lines+markers", "marker": marks}
        if curve.best is not None:
            point = {"x": [curve.steps[curve.best]], "y": [curve.values[curve.best]], "name": f"best {curve.label}"}
            star = {"symbol": "star", "size": 12, "color": curve.colour, "line": {"width": 1, "color": "black"}}
            yield trace | point | {"mode": "markers", "marker": star}
    # Entries without points, since a curve may have two traces and, of several runs, the colour of its run.
    for curve in named.values() if named.keys() != {curves[0].name} and curves[0].panel != SHARES else ():
        style = {"color": curve.legend_colour, "dash": list(DASHES.values())[curve.dash]}
        entry = {"x": [None], "y": [None], "name": curve.legend_entry, "mode": "lines", "line": style}
        entry |= {"mode": "lines+markers", "marker": {"symbol": MARKS[curve.mark], "size": 9}} if curve.owner else {}
        yield entry | {"legend": legend, "legendgroup": f"legend {curve.name}" if curve.run else curve.name}
    if gap := _find_first_gap(curves):
        points = {"x": [gap[0]] * 2, "y": _vertical_axis(curves)[1], "name": gap[1]}
        yield points | {"mode": "lines", "line": {"color": "red", "dash": "dot"}, "legend": legend}


def import_plotting(module: str) -> Any:
    """Import a module of a plotting library, or raise `MissingPackage`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from cause_if_installed(error)


def plot(
    folders: list[str],
    *,
    html: bool | str = False,
    out: str | None = None,
    x: str = "step",
    read: list[Curve] | None = None,
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
        raise InvalidArgument(f"--out {picture}: the file name must end in .png, .svg or .pdf.")
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
