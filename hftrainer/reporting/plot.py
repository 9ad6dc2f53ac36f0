"""`python -m hftrainer plot OUTPUT_DIR ...`: plots of one run, or of several runs for comparison."""

from __future__ import annotations

import html
import importlib
import logging
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hftrainer.callbacks.progress import is_in_notebook
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing import names
from hftrainer.checkpointing.folder import checkpoints_newest_first
from hftrainer.compat.overrides import is_measurement
from hftrainer.errors import InvalidArgument, MissingPackage, unless_absent
from hftrainer.monitoring.journal import check_folder, read_events, without_undone

logger = logging.getLogger(__name__)

#: Panel → the log entries that it shows. 'metrics' shows all others, in one panel per order of magnitude.
PANELS = {"loss": ("loss",), "metrics": (), "learning rate": ("learning_rate",), "gradient norm": ("grad_norm",)}
#: The panels of the values that `observe=True` adds to log lines.
SPEEDS = {
    "tokens per second": ("tokens_per_second",),
    "samples per second": ("samples_per_second",),
    "seconds per step": ("step_seconds",),
    "share of time": ("data_wait", "eval_share", "save_share"),
    "model FLOPS utilization": ("mfu",),
    "peak memory in MB": ("peak_memory_mb",),
}
PANELS |= SPEEDS
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
#: Shape of a run's markers: matplotlib's name → plotly's name.
MARKS = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"},
    **{"P": "cross", "<": "triangle-left", "X": "x", ">": "triangle-right"},
}

Curves = dict[str, dict[str, tuple[list[float], list[float]]]]


def read_state(folder: str) -> TrainerState:
    """The final state of the run in `folder`, or else the state of its newest checkpoint.

    Raises:
        InvalidArgument: if both are missing, or the file cannot be read.
    """
    check_folder(folder)
    # Only the log is needed, so a checkpoint without weights is enough.
    paths = (Path(each) / names.TRAINER_STATE_NAME for each in (folder, *checkpoints_newest_first(folder)))
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise InvalidArgument(
            f"{folder}: no run has written here yet: neither it nor a checkpoint-xxx in it contains "
            f"{names.TRAINER_STATE_NAME}. A run writes it with each checkpoint and in trainer.save_state(), and watch "
            "and plot also read the journal of observe=True; pass the output_dir of a run."
        )
    try:
        return TrainerState.load_from_json(str(file))
    except ValueError as error:
        raise InvalidArgument(f"{file} cannot be read ({error}). Pass a complete checkpoint of the run.") from error


def read_run(folder: str) -> TrainerState:
    """Like `read_state`, but with newer log lines from the run's journal.

    Raises:
        InvalidArgument: if there is no run, or its log has nothing to draw.
    """
    check_folder(folder)
    events = without_undone(read_events(folder))
    try:
        state = read_state(folder)
    except InvalidArgument:
        if not events:
            raise
        state = TrainerState()
    last_step = max((line["step"] for line in state.log_history if _is_number(line.get("step"))), default=-1)
    lines = [{"step": event["step"], **event["logs"]} for event in events if event["event"] == "log"]
    state.log_history += [line for line in lines if line["step"] > last_step]
    if not any(curves(state).values()):
        raise InvalidArgument(f"{folder}: the log of the run has nothing to draw; set logging_steps in the next run.")
    return state


def curves(state: TrainerState) -> Curves:
    """The curves of a log: panel → label → optimizer steps and values.

    A non-finite number is NaN, a gap in its curve. So is a loss in a log line with a non-finite gradient norm, since
    `logging_nan_inf_filter` logs 0 instead.
    """
    panels: Curves = {panel: {} for panel in PANELS}
    all_values = list(logged(state, with_speeds=True))
    diverged_steps = {step for step, name, value in all_values if name == "grad_norm" and not _is_finite(value)}
    for step, name, value in all_values:
        if name != "epoch" and _is_number(value):
            panel = _PANEL_OF.get(name, "loss" if name.endswith("_loss") else "metrics")
            steps, values = panels[panel].setdefault(name, ([], []))
            steps.append(step)
            values.append(math.nan if not _is_finite(value) or (name == "loss" and step in diverged_steps) else value)
    return panels


def logged(state: TrainerState, *, with_speeds: bool = False) -> Iterator[tuple[float, str, Any]]:
    """Optimizer step, name and value of each log entry, except the final summary and measurements."""
    step: float = 0
    for line in state.log_history:
        # Lines that a script added may have no step.
        if _is_number(line.get("step")):
            step = line["step"]
        if not ("train_runtime" in line and "train_loss" in line):
            for name in line:
                is_shown = with_speeds if _PANEL_OF.get(name) in SPEEDS else not is_measurement(name)
                if name != "step" and is_shown:
                    yield step, name, line[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Line:
    """One curve of one run.

    Attributes:
        panel: the title of its panel.
        name: the name of the log entry.
        steps: optimizer steps.
        values: the values; some may be NaN.
        best: the index of the best value; None if unknown.
        run: the name of the run in a plot of several runs, else empty.
        colour: the colour of the run, or in a plot of one run the colour of the curve.
        dash: the index of its line style.
        mark: the shape of its markers, which distinguishes runs in black and white.
    """

    panel: str
    name: str
    steps: list[float]
    values: list[float]
    best: int | None = None
    run: str = ""
    colour: str = COLOURS[0]
    dash: int = 0
    mark: str = "o"

    @property
    def marked(self) -> list[int]:
        """The indices of the points with a marker.

        In a plot of several runs about ten points, in a plot of one run all of up to 29 points.
        """
        count = len(self.steps)
        every = max(1, count // 10)
        # Shift the markers, so that those of coinciding runs do not overlap.
        start = list(MARKS).index(self.mark) * every // len(MARKS)
        return list(range(start, count, every)) if self.run else list(range(count if count < 30 else 0))

    @property
    def label(self) -> str:
        """The name, in a plot of several runs after the name of the run."""
        return f"{self.run}: {self.name}" if self.run else self.name

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if _is_finite(value)]

    @property
    def first_gap(self) -> float | None:
        """The first step with a non-finite value; None if all are finite."""
        return next((step for step, value in zip(self.steps, self.values, strict=True) if not _is_finite(value)), None)


def run_names(folders: list[str]) -> list[str]:
    """The shortest suffixes of the paths that distinguish the runs."""
    parts = [Path(os.path.realpath(folder)).parts for folder in folders]
    depth = next((n for n in range(1, 9) if len({path[-n:] for path in parts}) == len(parts)), 8)
    return [str(Path(*path[-depth:])) for path in parts]


def lines(folders: list[str]) -> list[Line]:
    """The curves of runs.

    One run has a colour per curve; several runs have a colour and a marker per run, and a dash per curve.
    """
    runs = run_names(folders) if len(folders) > 1 else [""]
    states = [read_run(folder) for folder in folders]
    return _with_styles([line for run, state in zip(runs, states, strict=True) for line in _plain_lines(state, run)])


def lines_of(state: TrainerState) -> list[Line]:
    """The curves of one run."""
    return _with_styles(list(_plain_lines(state, "")))


def _plain_lines(state: TrainerState, run: str) -> Iterator[Line]:
    for panel, panel_curves in curves(state).items():
        for name, (steps, values) in panel_curves.items():
            yield Line(panel, name, steps, values, _best(state, name, steps, values), run)


def _with_styles(lines: list[Line]) -> list[Line]:
    """The curves with their colours and dashes, in the order of the panels."""
    styled_lines = _split_metrics(lines)
    runs = list(dict.fromkeys(line.run for line in styled_lines))
    dashes_by_panel: dict[str, dict[str, int]] = {}
    for index, line in enumerate(styled_lines):
        panel_dashes = dashes_by_panel.setdefault(line.panel, {})
        panel_dash = panel_dashes.setdefault(line.name, len(panel_dashes))
        number, dash = (runs.index(line.run) if len(runs) > 1 else panel_dash), panel_dash
        mark = list(MARKS)[runs.index(line.run) % len(MARKS)]
        styled_lines[index] = replace(line, colour=COLOURS[number % len(COLOURS)], dash=dash % 4, mark=mark)
    return styled_lines


def _split_metrics(lines: list[Line]) -> list[Line]:
    """The curves by panel; metrics above 1 get one panel per order of magnitude."""
    largest: dict[str, float] = {}
    for line in lines:
        if line.panel == "metrics":
            largest[line.name] = max([largest.get(line.name, 0.0), *map(abs, line.finite)])
    powers = {name: math.ceil(math.log10(value)) for name, value in largest.items() if value > 1}
    titles = {
        name: f"metrics up to {f'{10**power:,}' if power < 10 else f'1e{power}'}" for name, power in powers.items()
    }
    sorted_lines = sorted(lines, key=lambda line: (list(PANELS).index(line.panel), powers.get(line.name, 0)))
    return [replace(line, panel=titles.get(line.name, line.panel)) for line in sorted_lines]


def _best(state: TrainerState, name: str, steps: list[float], values: list[float]) -> int | None:
    """The index of the best model's value, or of the lowest evaluation loss; None if unknown."""
    if name in _PANEL_OF:
        return None
    if state.best_global_step in steps:
        return steps.index(state.best_global_step)
    finite = [value for value in values if _is_finite(value)]
    return values.index(min(finite)) if finite and name.endswith("_loss") else None


def _needs_log_scale(lines: list[Line]) -> bool:
    """Whether a few large gradient norms would make the others unreadable."""
    norms = [value for line in lines if line.panel == "gradient norm" for value in line.finite]
    return bool(norms) and min(norms) > 0 and max(norms) > 20 * statistics.median(norms)


def _group_by_panel(lines: list[Line]) -> dict[str, list[Line]]:
    panels: dict[str, list[Line]] = {}
    for line in lines:
        panels.setdefault(line.panel, []).append(line)
    return panels


def _find_first_gap(lines: list[Line]) -> tuple[float, str] | None:
    """The first step with a non-finite value in a panel, and a text that names the curve."""
    gaps = ((step, line.label) for line in lines if (step := line.first_gap) is not None)
    return next(((step, f"{label} is not finite at step {step:g}") for step, label in sorted(gaps)), None)


def draw_picture(lines: list[Line], path: str, title: str) -> None:
    """Write the panels as PNG, SVG or PDF; without pyplot, so that no window or notebook shows the figure."""
    panels = _group_by_panel(lines)
    columns = min(len(panels), 2 if len(panels) <= 6 else 3)
    rows = -(-len(panels) // columns)
    height = 3.6 * rows + 0.9
    figure = load("matplotlib.figure").Figure(figsize=(5.5 * columns, height))
    # tight_layout is slow.
    margins = {"left": 0.18 / columns, "right": 0.98, "bottom": 0.85 / height, "top": 1 - 0.75 / height}
    figure.subplots_adjust(**margins, wspace=0.25, hspace=0.35)
    figure.suptitle(title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    first, last = (choose(step for line in lines for step in line.steps) for choose in (min, max))
    margin = (last - first) / 40 or 1
    for axis, (panel, panel_lines) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, panel, panel_lines)
        axis.set_xlim(first - margin, last + margin)
    for axis in axes[len(panels) :]:
        axis.remove()
    runs = {line.run: {"color": line.colour, "marker": line.mark} for line in lines if line.run}
    proxy = load("matplotlib.lines").Line2D
    handles = [proxy([], [], label=_shorten(run), **style) for run, style in runs.items()]
    if handles:
        count = max(1, min(4, 26 * columns // max(len(_shorten(run)) for run in runs)))
        figure.legend(handles=handles, loc="lower center", ncols=count, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def _shorten(name: str) -> str:
    """The name of a run for a legend, without the middle of a long name."""
    return name if len(name) <= 40 else f"{name[:19]}…{name[-20:]}"


def _draw_panel(axis: Any, panel: str, lines: list[Line]) -> None:
    dashes = ["-", "--", ":", "-."]
    run_style = {"color": "black"} if lines[0].run else {}
    handles: dict[str, Any] = {}
    for line in lines:
        style = {"color": line.colour, "linestyle": dashes[line.dash], "linewidth": 1.3}
        marks = {"marker": line.mark, "markersize": 5 if line.run else 3, "markevery": line.marked}
        axis.plot(line.steps, line.values, **marks, **style)
        proxy = load("matplotlib.lines").Line2D
        handles.setdefault(line.name, proxy([], [], label=line.name, **style | run_style))
        if line.best is not None:
            star = {"marker": "*", "s": 90, "zorder": 3}
            axis.scatter(line.steps[line.best], line.values[line.best], color=line.colour, **star)
            handles["best"] = proxy(
                [], [], label="best", marker="*", markersize=9, linestyle="", **{"color": line.colour} | run_style
            )
    if gap := _find_first_gap(lines):
        axis.axvline(gap[0], color="red", linestyle=":")
        position = {"ha": "center", "va": "top", "transform": axis.transAxes}
        axis.text(0.5, -0.175, gap[1], color="red", fontsize=8, **position)
    axis.set_title(panel, fontsize=11)
    axis.set_xlabel("optimizer step")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(alpha=0.3)
    if _needs_log_scale(lines):
        axis.set_yscale("log")
    if panel == "share of time" or panel.startswith("peak memory"):
        axis.set_ylim(0, max([value for line in lines for value in line.finite], default=0) * 1.1 or 1)
    if len(handles) == 1:
        axis.set_ylabel(*handles)
    else:
        axis.legend(handles=list(handles.values()), fontsize=7, ncols=-(-len(handles) // 9), framealpha=0.6)


def describe(lines: list[Line]) -> str:
    """A text table of each curve: its steps, its first, last, lowest and highest value, and the non-finite count."""
    rows: list[tuple[str, ...]] = [("", "steps", "first", "last", "lowest", "highest", "not finite")]
    for line in lines:
        finite = line.finite or [math.nan]
        values = (line.values[0], line.values[-1], min(finite), max(finite))
        gaps = str(len(line.values) - len(line.finite) or "")
        rows.append(
            (line.label, f"{line.steps[0]:g} to {line.steps[-1]:g}", *(f"{value:.4g}" for value in values), gaps)
        )
    if not any(gaps for *_, gaps in rows[1:]):
        rows = [row[:-1] for row in rows]
    return align(rows)


def align(rows: list[tuple[str, ...]], width: int | None = None) -> str:
    """A text table of rows with a label followed by numbers.

    Args:
        rows: the rows, including the headings.
        width: characters per line. Columns that do not fit follow in a second table below. None for no limit.
    """
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    count = len(widths)
    while width is not None and count > 1 and first + sum(widths[:count]) + 2 * count > width:
        count -= 1
    cell_rows = ([label.ljust(first), *map(str.rjust, cells[:count], widths[:count])] for label, *cells in rows)
    table = "\n".join("  ".join(cells).rstrip() for cells in cell_rows)
    remaining_rows = [(label, *cells[count:]) for label, *cells in rows]
    return table if count == len(widths) else f"{table}\n\n{align(remaining_rows, width)}"


def draw_html(lines: list[Line], path: str, title: str) -> None:
    """Write the panels below each other, as an interactive HTML page that works offline."""
    subplots, objects = load("plotly.subplots"), load("plotly.graph_objects")
    panels = _group_by_panel(lines)
    spacing = 0.25 / len(panels)
    gaps = {panel: gap for panel, panel_lines in panels.items() if (gap := _find_first_gap(panel_lines))}
    titles = [f"{panel} <i>({gaps[panel][1]})</i>" if panel in gaps else panel for panel in panels]
    figure = subplots.make_subplots(
        rows=len(panels), cols=1, subplot_titles=titles, shared_xaxes="all", vertical_spacing=spacing
    )
    for row, (panel, panel_lines) in enumerate(panels.items(), 1):
        for line in panel_lines:
            style = {"color": line.colour, "dash": ["solid", "dash", "dot", "dashdot"][line.dash]}
            marker_sizes = dict.fromkeys(line.marked, 9 if line.run else 4)
            sizes = [12 if index == line.best else marker_sizes.get(index, 0) for index in range(len(line.steps))]
            shapes = ["star" if index == line.best else MARKS[line.mark] for index in range(len(line.steps))]
            group = line.run or panel
            trace = objects.Scatter(
                **{"x": line.steps, "y": line.values, "name": line.name, "mode": "lines+markers", "line": style},
                **{"marker": {"size": sizes, "symbol": shapes}, "legendgroup": group, "legendgrouptitle_text": group},
            )
            figure.add_trace(trace, row=row, col=1)
        names_shown = {line.name for line in panel_lines}
        figure.update_yaxes(title_text=panel_lines[0].name if len(names_shown) == 1 else panel, row=row, col=1)
        if panel in gaps:
            figure.add_vline(gaps[panel][0], line={"color": "red", "dash": "dot"}, row=row, col=1)
        if _needs_log_scale(panel_lines):
            figure.update_yaxes(type="log", row=row, col=1)
    figure.update_xaxes(showticklabels=True, title={"text": "optimizer step", "standoff": 2})
    legend = {"orientation": "h", "y": -0.2 / len(panels)}
    figure.update_layout(title=title, height=300 * len(panels) + 200, template="plotly_white", legend=legend)
    page = figure.to_html(include_plotlyjs=True, config={"responsive": True})
    head = f"<head><title>{html.escape(title)}</title>"
    Path(path).write_text(page.replace("<head>", head, 1), encoding="utf-8")


def load(module: str) -> Any:
    """Import a module of a plotting library.

    Raises:
        MissingPackage: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from unless_absent(error)


def plot(folders: list[str], *, html: bool = False, out: str | None = None) -> list[str]:
    """Draw runs, and return the paths of the new files.

    Args:
        folders: output folders, each with a `trainer_state.json` or a checkpoint.
        html: also write an HTML page.
        out: the PNG, SVG or PDF to write; the page has its name with '.html'. Default: `training.png` in the folder,
            or `comparison.png` in the first of several; for `checkpoint-5`, `training-5.png` in its parent folder.

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
    run_lines = lines(folders)
    title = Path(os.path.realpath(folders[0])).name if len(folders) == 1 else f"{len(folders)} runs"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(run_lines, str(picture), title)
    paths = [str(picture)]
    if html:
        page = picture.with_suffix(".html")
        draw_html(run_lines, str(page), title)
        paths.append(str(page))
    return paths


def show_in_notebook(path: str) -> None:
    """Show a PNG below the cell."""
    from IPython.display import Image, display

    display(Image(filename=path))


class PlotCallback(TrainerCallback):
    """Draws the run at the end of training: `training.png` in `output_dir`, in a notebook also below the cell.

    Raises:
        MissingPackage: in the constructor, if matplotlib is not installed.
    """

    def __init__(self) -> None:
        load("matplotlib.figure")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Draw the run's log."""
        if not state.is_world_process_zero:
            return
        run_lines = lines_of(state)
        if not run_lines:
            logger.warning("PlotCallback: the log of the run has nothing to draw; see logging_steps.")
            return
        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, "training.png")
        draw_picture(run_lines, path, os.path.basename(os.path.realpath(args.output_dir)))
        if is_in_notebook():
            show_in_notebook(path)
