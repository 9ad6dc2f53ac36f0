"""Draws curves as an interactive page, with plotly."""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

from hftrainer.reporting import panels
from hftrainer.reporting.curves import DASHES, MARKS, X_AXES, Curve
from hftrainer.reporting.metrics import LOSSES, PANELS, SHARES, SMOOTHING

#: Added to the number of a panel: its axis for marks at shares of its height, which neither scale nor zoom moves.
FRAME = 1000
#: The least width of a window, in pixels → the columns of its page. Only the narrowest has a small font.
COLUMNS = {1800: 3, 1500: 3, 1200: 2, 900: 2, 700: 1, 0: 1}


def draw_html(charts: dict[str, list[Curve]], path: str, title: str, *, table: str, plotlyjs: bool | str) -> None:
    """Write the panels as an interactive page, whose file has plotly's script or, for "cdn", fetches it.

    Args:
        charts: horizontal axis → the curves. The page shows the first, until the reader chooses another.
        path: the file.
        title: the name of the run.
        table: the values of the runs, as text.
        plotlyjs: True, or "cdn".
    """
    figures = {x: _make_figure(curves) for x, curves in charts.items()}
    shown, every = next(iter(charts)), [curve for curves in charts.values() for curve in curves]
    smoothing = "light" if any(curve.mean for curve in every) else "off"
    for figure in figures.values():
        # `meta` names the choices of smoothing at which a trace is shown.
        figure.for_each_trace(lambda trace: trace.update(visible=not trace.meta or smoothing in trace.meta))
    titles = {x: panels.title_and_notes(title, curves) for x, curves in charts.items()}
    settings: dict[str, Any] = {
        "shown": shown,
        "others": {x: json.loads(figure.to_json()) for x, figure in figures.items() if x != shown},
        "layouts": {x: _layouts(curves) for x, curves in charts.items()},
        "scales": {x: _scales_of_losses(curves) for x, curves in charts.items()},
        "parts": {level: parts for level, (parts, _) in SMOOTHING.items() if any(level in c.smoothings for c in every)},
        "level": smoothing,
        "notes": {x: " · ".join(notes) for x, (_, *notes) in titles.items()},
    }
    layout = settings["layouts"][shown][0][1]
    figures[shown].update_layout({name.replace(".", "_"): value for name, value in layout.items()})
    # The name of a run could end the script.
    script = f"const {{{', '.join(settings)}}} = {json.dumps(settings)};\n".replace("<", r"\u003c")
    script += Path(__file__).with_name("page.js").read_text("utf-8")
    texts = {"title": titles[shown][0], "notes": settings["notes"][shown], "table": table}
    fields = {name: html.escape(text) for name, text in texts.items()}
    fields["axes"] = "".join(f"<option>{x}" for x in charts)
    options = {"include_plotlyjs": plotlyjs, "config": {"responsive": True}, "post_script": script}
    fields["plot"] = figures[shown].to_html(full_html=False, **options)
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    Path(path).write_text(template.substitute(fields), encoding="utf-8")


def _make_figure(curves: list[Curve]) -> Any:
    """The panels over one horizontal axis, without their places."""
    figure = panels.import_plotting("plotly.graph_objects").Figure()
    for name, curve in _legend_of_runs(curves).items():
        style = {"line_color": curve.colour, "marker": {"symbol": MARKS[curve.mark], "size": 9}}
        figure.add_scatter(x=[None], y=[None], xaxis="x2", yaxis="y2", name=name, legendgroup=curve.run, **style)
    title_of_x = {"text": X_AXES[curves[0].x], "standoff": 2}
    x_axis = {"title": title_of_x, "range": panels.horizontal_range(curves), "matches": "x2", "tickformat": ","}
    for number, panel_curves in enumerate(panels.group_by_panel(curves).values(), 2):
        x, y, legend = f"x{number}", f"y{number}", f"legend{number}"
        scale, limits = panels.vertical_axis(panel_curves)
        figure.add_traces([trace | {"xaxis": x, "yaxis": y} for trace in _traces(panel_curves, legend)])
        place = {"xaxis": x, "yaxis": f"y{FRAME + number}", "legend": legend}
        figure.add_traces([trace | place for trace in _marks(panel_curves, limits[1])])
        y_axis = _axis_settings(panel_curves, scale, limits) | {"anchor": x}
        axes = {f"xaxis{number}": x_axis | {"anchor": y}, f"yaxis{number}": y_axis}
        axes[f"yaxis{FRAME + number}"] = {"overlaying": y, "range": [0, 1], "fixedrange": True, "visible": False}
        figure.update_layout(axes | {legend: {"orientation": "h", "yanchor": "bottom", "tracegroupgap": 0}})
    look = {"template": "plotly_white", "margin": {"b": 0}, "modebar": {"orientation": "v"}}
    look["legend"] = {"x": 0, "y": 1, "yanchor": "bottom", "orientation": "h", "tracegroupgap": 0}
    figure.update_layout(look | {"hovermode": "x unified", "hoverlabel": {"namelength": -1}})
    # Ticks keep the labels of both axes apart at the origin.
    return figure.update_xaxes(ticks="outside").update_yaxes(ticks="outside")


def _legend_of_runs(curves: list[Curve]) -> dict[str, Curve]:
    """Text → a curve of the run; empty for one run."""
    return {panels.describe_run(curve.run, curves): curve for curve in curves if curve.run}


def _axis_settings(curves: list[Curve], scale: str, limits: tuple[float, float]) -> dict[str, Any]:
    """Plotly's settings of a panel's vertical axis."""
    axis: dict[str, Any] = {"title": {"text": panels.axis_label(curves, scale)}, "type": scale, "range": limits}
    axis |= {"tickformat": "~e" if max(map(abs, limits)) < 0.001 else ",", "hoverformat": ",.4~g", "nticks": 0}
    axis |= {"tickformat": ".0%", "hoverformat": ".1%"} if curves[0].name in PANELS[SHARES] else {}
    axis |= {"nticks": 3} if len({value for curve in curves for value in curve.finite}) == 1 else {}
    axis["showticklabels"] = any(curve.finite for curve in curves)
    if scale == "log":
        # plotly takes powers of ten. For two ticks per decade it chooses 1, 2 and 5, and of a part of one others.
        low, high = map(math.log10, limits)
        decades = high - low
        ticks = 6 if decades < 1 else max(3, round(2 * decades)) if decades < 3 else min(8, math.ceil(decades))
        axis |= {"range": [low, high], "nticks": ticks, "tickformat": ","}
    return axis


def _scales_of_losses(curves: list[Curve]) -> dict[str, dict[str, dict[str, Any]]]:
    """Choice of a scale → axis of a panel of losses → plotly's settings. Any scale but its own shows all values."""
    scales: dict[str, dict[str, dict[str, Any]]] = {"automatic": {}, "linear": {}, "log": {}}
    for number, (panel, losses) in enumerate(panels.group_by_panel(curves).items(), 2):
        finite = [value for curve in losses for value in curve.drawable if math.isfinite(value)]
        powers = [math.log10(value) for value in finite if value > 0]
        if panel not in LOSSES or not powers:
            continue
        low, high = panels.axis_range(powers)
        own, ends = panels.vertical_axis(losses)
        limits = {"linear": panels.axis_range(finite), "log": (10**low, 10**high), own: ends}
        settings = {scale: _axis_settings(losses, scale, limits[scale]) for scale in limits}
        for scale, chosen in scales.items():
            chosen[f"yaxis{number}"] = settings.get(scale, settings[own])
    return scales


def _layouts(curves: list[Curve]) -> list[tuple[int, dict[str, Any]]]:
    """The least width of a window, and where it has the panels and legends; the widest first."""
    groups = panels.group_by_panel(curves).values()
    marks = (_marks(panel, panels.vertical_axis(panel)[1][1]) for panel in groups)
    lines = [[mark["name"] for mark in panel_marks if mark["showlegend"]] for panel_marks in marks]
    legends = [[*_legend_entries(panel), *texts] for panel, texts in zip(groups, lines, strict=True)]
    widths = [width for width, columns in COLUMNS.items() if columns < 3 or len(groups) > 6]
    return [(width, _place_panels(width, [*_legend_of_runs(curves)], legends)) for width in widths]


def _place_panels(width: int, runs: list[str], legends: list[list[str]]) -> dict[str, Any]:
    """Where a page of at least this width has its panels and the legends, of runs and of each panel.

    Returns:
        plotly's names → values.
    """
    # The least width of the legends, the font, and the space above.
    least, font, top = (width - 110, 12, 10 if runs else 30) if width else (300, 10, 30)
    count, shift = len(legends), 0
    columns, gap = min(COLUMNS[width], count), 0.24 / max(2, COLUMNS[width])
    rows, missing = -(-count // columns), -count % columns
    margins = (70, 40) if width else (50, 10)
    layout: dict[str, Any] = {"legend.font.size": font, "margin.l": margins[0], "margin.r": margins[1]}
    for number, entries in enumerate(legends):
        # If a row has fewer panels it is the first, and they are wider.
        row, column = divmod(number + missing, columns) if number >= columns - missing else (0, number)
        column_width = (1 + gap) / (columns if row else columns - missing)
        lines = _count_rows(entries, int((column_width - gap) * least))
        # plotly wraps a legend at the edge of the page, not of its panel.
        is_column = lines > 1 and column_width - gap < 0.99
        lines = (len(entries) if is_column else lines) + sum(text.count("<br>") for text in entries)
        # A legend is above its panel, and the label of the horizontal axis below. There is space for two lines, and
        # in the first row for as many as there are.
        left, high = column * column_width, 1 - (row + 0.1 + max(0, lines - 2) * 20 / 310 * (row > 0)) / rows
        shift = shift if row else max(shift, 20 * (lines - 1))
        layout[f"xaxis{number + 2}.domain"] = [left, left + column_width - gap]
        layout[f"yaxis{number + 2}.domain"] = [1 - (row + 0.83) / rows, high]
        layout |= {f"legend{number + 2}.x": left, f"legend{number + 2}.y": high}
        layout[f"legend{number + 2}.orientation"] = "v" if is_column else "h"
    # One line of the first row has its place below those of the runs.
    top += 20 * _count_rows(runs, least) + shift
    return layout | {"height": 310 * rows + top, "margin.t": top, "legend.y": 1 + shift / 310 / rows}


def _count_rows(texts: list[str], width: int) -> int:
    """The rows of a legend, which has 50 pixels per sample and 6 per letter."""
    rows, left = 0, 0
    for text in texts:
        size = 50 + 6 * max(map(len, text.split("<br>")))
        rows, left = (rows, left - size) if size <= left else (rows + 1, width - size)
    return rows


def _legend_entries(curves: list[Curve]) -> dict[str, Curve]:
    """Text → curve, of the legend of a panel; empty if the label of the axis has it."""
    named = {curve.label if curve.panel == SHARES else curve.legend_entry: curve for curve in curves}
    return named if named.keys() != {curves[0].name} else {}


def _traces(curves: list[Curve], legend: str) -> Iterator[dict[str, Any]]:
    """Plotly's curves, stars and entries of the legend of a panel."""
    for curve in curves:
        yield from _share_traces(curve, legend) if curve.panel == SHARES else _curve_traces(curve, curves)
    # Entries without points, since a curve may have two traces and, of several runs, the colour of its run.
    for curve in _legend_entries(curves).values() if curves[0].panel != SHARES else ():
        style = {"color": curve.legend_colour, "dash": list(DASHES.values())[curve.dash]}
        entry = {"x": [None], "y": [None], "name": curve.legend_entry, "mode": "lines", "line": style}
        entry |= {"mode": "lines+markers", "marker": {"symbol": MARKS[curve.mark], "size": 9}} if curve.owner else {}
        yield entry | {"legend": legend, "legendgroup": f"legend {curve.name}" if curve.run else curve.name}


def _heights(curve: Curve, values: list[float], floor: float) -> dict[str, Any]:
    """Plotly's vertical places. Hovering shows the values, since values of 0 may be drawn at the foot."""
    hover = {"customdata": curve.points(values)[1], "hovertemplate": "%{customdata:,.4~g}"}
    return {"y": curve.points(values, floor)[1]} | (hover if floor > -math.inf else {})


def _base_trace(curve: Curve) -> dict[str, Any]:
    """What all traces of a curve have."""
    style = {"color": curve.colour, "dash": list(DASHES.values())[curve.dash], "width": 2}
    steps, values = curve.points(curve.drawable)
    group = curve.run or curve.name
    return {"x": steps, "y": values, "name": curve.label, "legendgroup": group, "showlegend": False, "line": style}


def _share_traces(curve: Curve, legend: str) -> Iterator[dict[str, Any]]:
    """One of the areas on top of each other."""
    area = {"stackgroup": "time", "fillcolor": curve.colour, "legend": legend, "showlegend": True}
    yield _base_trace(curve) | area | {"line": {"width": 0}}


def _curve_traces(curve: Curve, curves: list[Curve]) -> Iterator[dict[str, Any]]:
    """A curve, its means and its star."""
    floor, _ = panels.height_of_zeros(curves)
    trace = _base_trace(curve) | _heights(curve, curve.drawable, floor)
    marked, size = set(curve.marked), 9 if curve.run or len(curve.values) < 5 else 4
    sizes = [size * (point in marked) for point in range(len(trace["x"]))]
    marks = {"size": sizes, "symbol": MARKS[curve.mark], "opacity": 1, "line_width": 0}
    trace |= {"mode": "lines+markers", "marker": marks}
    faint = {"mode": "lines", "opacity": panels.opacity_under_mean(curves), "line": trace["line"] | {"width": 1}}
    levels, plain = curve.smoothings, [trace | faint if curve.member else trace]
    shared = {"mode": "lines", "hoverinfo": "skip", "line": trace["line"] | {"width": curve.width + 0.5}}
    shared |= {"meta": "light" if curve.mean else "off light" if levels else ""}
    if curve.shared > 1:
        yield trace | shared | {"y": curve.shared_points(curve.mean or curve.drawable, floor)[1]}
    if curve.peaks(top := panels.vertical_axis(curves)[1][1]) and not curve.member:
        plain = [trace | faint, trace | {"y": curve.points(curve.below(top), floor)[1], "hoverinfo": "skip"}]
    if not levels:
        yield from plain
    else:
        yield trace | faint | {"meta": " ".join(levels)}
        yield from (each | {"meta": "off" if curve.mean else "off light"} for each in plain)
        for level in levels:
            mean = {"y": curve.points(curve.smooth(level), floor)[1], "hoverinfo": "skip", "hovertemplate": None}
            yield trace | mean | {"meta": level}
    for index, shape, word, size in ((curve.best, "star", "best", 14), (curve.end, "x", "last", 8)):
        if index is not None:
            place, value = curve.steps[index], curve.drawable[index]
            point = {"x": [place], "y": [max(floor, value)], "customdata": [value], "name": f"{word} {curve.label}"}
            mark = {"symbol": shape, "size": size, "color": curve.colour, "line": {"width": 1, "color": "black"}}
            # The curve has that value too.
            hover = {"hoverinfo": "skip", "hovertemplate": None} if word == "last" else {}
            yield trace | point | hover | {"mode": "markers", "marker": mark, "zorder": 20 - size}


def _marks(curves: list[Curve], top: float) -> Iterator[dict[str, Any]]:
    """Restarts, what is not finite, and what is above the panel; with heights as shares of the panel's."""
    for start, step, text, colour, dash in panels.vertical_lines(curves):
        line: dict[str, Any] = {"x": [step, step], "y": [0, 1], "name": text, "mode": "lines", "hoverinfo": "skip"}
        line |= {"legendgroup": text, "showlegend": False}
        if start < step:
            # A band without an outline, which would read as two lines.
            band = {"x": [step, step, start, start], "y": [0, 1, 1, 0], "fill": "toself", "line": {"width": 0}}
            yield line | band | {"fillcolor": "rgba(128, 128, 128, 0.15)"}
        style = {"color": colour, "dash": DASHES[dash], "width": 2 if text else 1}
        yield line | {"line": style, "showlegend": bool(text)}
    for row, (height, steps, curve) in enumerate(panels.non_finite_marks(curves)):
        marker = {"symbol": "line-ns", "size": 4, "line": {"width": 1.5, "color": curve.colour}}
        stroke = {"x": steps, "y": [height] * len(steps), "mode": "markers", "marker": marker, "showlegend": not row}
        stroke["hovertemplate"] = f"{curve.label}: not finite<extra></extra>"
        yield stroke | {"legendgroup": curve.run or curve.name, "name": "not finite"}
    _, text = panels.height_of_zeros(curves)
    if text:
        marker = {"symbol": "line-ew", "size": 9, "line": {"width": 1.5, "color": "grey"}}
        yield {"x": [None], "y": [None], "mode": "markers", "name": text, "showlegend": True, "marker": marker}
    for curve, steps, text in panels.clipped_peaks(curves, top):
        marker = {"symbol": "triangle-up", "size": 9, "color": curve.colour}
        mark: dict[str, Any] = {"x": steps, "y": [0.97] * len(steps), "mode": "markers", "hoverinfo": "skip"}
        yield mark | {"name": "<br>".join(textwrap.wrap(text, 50)), "showlegend": True, "marker": marker}
