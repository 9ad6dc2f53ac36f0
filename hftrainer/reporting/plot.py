"""`python -m hftrainer plot OUTPUT_DIR ...`: plots of one run, or of several in comparison."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hftrainer.callbacks.progress import is_in_notebook
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.checkpointing import names
from hftrainer.checkpointing.folder import checkpoints_newest_first
from hftrainer.compat.overrides import is_measurement
from hftrainer.errors import InvalidArgument, MissingPackage

logger = logging.getLogger(__name__)

#: Panel → the entries of log lines that it shows; 'metrics' shows all others.
PANELS = {"loss": ("loss",), "metrics": (), "learning rate": ("learning_rate",), "gradient norm": ("grad_norm",)}
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")

Curves = dict[str, dict[str, tuple[list[float], list[float]]]]


def read_state(folder: str) -> TrainerState:
    """The state of the run in `folder`: the final one, or else that of the newest checkpoint.

    Raises:
        InvalidArgument: when there is neither, or it cannot be read.
    """
    if not Path(folder).is_dir():
        raise InvalidArgument(f"{folder}: the folder does not exist; give the output_dir of a run.")
    # Only the log is needed, so a checkpoint without weights is drawn too.
    places = (Path(place) / names.TRAINER_STATE_NAME for place in (folder, *checkpoints_newest_first(folder)))
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InvalidArgument(
            f"{folder}: neither it nor a checkpoint-xxx in it holds {names.TRAINER_STATE_NAME}; give the output_dir of "
            "a run that has saved a checkpoint, or has called trainer.save_state()."
        )
    try:
        return TrainerState.load_from_json(str(file))
    except ValueError as error:
        raise InvalidArgument(f"{file} cannot be read ({error}); give a whole checkpoint of the run.") from error


def read_run(folder: str) -> TrainerState:
    """Like `read_state`, but raises if the log has nothing to draw.

    Raises:
        InvalidArgument: when there is no run, or its log has nothing to draw.
    """
    state = read_state(folder)
    if not any(curves(state).values()):
        raise InvalidArgument(f"{folder}: the log of the run has nothing to draw; set logging_steps in the next one.")
    return state


def curves(state: TrainerState) -> Curves:
    """Panel → label → optimizer steps and values."""
    found: Curves = {panel: {} for panel in PANELS}
    for step, name, value in logged(state):
        if name != "epoch" and _is_number(value):
            steps, values = found[_panel_of(name)].setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return found


def logged(state: TrainerState) -> Iterator[tuple[float, str, Any]]:
    """Optimizer step, name and value of everything logged, except the final summary and measurements."""
    step: float = 0
    for line in state.log_history:
        if _is_number(line.get("step")):  # lines that a script has added may lack a step
            step = line["step"]
        if not ("train_runtime" in line and "train_loss" in line):
            yield from ((step, name, line[name]) for name in line if name != "step" and not is_measurement(name))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _panel_of(name: str) -> str:
    for panel, shown in PANELS.items():
        if name in shown:
            return panel
    return "loss" if name.endswith("_loss") else "metrics"


@dataclass(frozen=True)
class Line:
    """One curve of one run; `best` is the index of its best value, if that is known."""

    panel: str
    label: str
    steps: list[float]
    values: list[float]
    colour: str
    dash: int = 0
    best: int | None = None


def lines(folders: list[str]) -> Iterator[Line]:
    """The curves of runs: one run has a colour per curve; several have a colour per run and a dash per curve."""
    parts = [Path(os.path.realpath(folder)).parts for folder in folders]
    # The shortest suffix of each path that is unique.
    depth = next((n for n in range(1, 9) if len({path[-n:] for path in parts}) == len(parts)), 8)
    of_runs = [list(lines_of(read_run(folder))) for folder in folders]
    if len(of_runs) == 1:
        yield from of_runs[0]
        return
    # A curve has the same dash in all runs.
    names = {(line.panel, line.label): None for found in of_runs for line in found}
    of_panel = {panel: [name for place, name in names if place == panel] for panel in PANELS}
    for number, (path, found) in enumerate(zip(parts, of_runs, strict=True)):
        for line in found:
            label, colour = f"{Path(*path[-depth:])}: {line.label}", COLOURS[number % len(COLOURS)]
            yield replace(line, label=label, colour=colour, dash=of_panel[line.panel].index(line.label) % 4)


def lines_of(state: TrainerState) -> Iterator[Line]:
    """The curves of one run, each in a separate colour."""
    colours = itertools.cycle(COLOURS)
    for panel, found in curves(state).items():
        for name, (steps, values) in found.items():
            yield Line(panel, name, steps, values, next(colours), best=_best(state, name, steps, values))


def _best(state: TrainerState, name: str, steps: list[float], values: list[float]) -> int | None:
    """The index of the best model's value, or else of the lowest evaluation loss; None if unknown."""
    if name in ("loss", "learning_rate", "grad_norm"):
        return None
    if state.best_global_step in steps:
        return steps.index(state.best_global_step)
    return values.index(min(values)) if name.endswith("_loss") else None


def _needs_log_scale(panel: str, drawn: list[Line]) -> bool:
    """Whether a few large gradient norms would flatten all others."""
    norms = [value for line in drawn if line.panel == panel == "gradient norm" for value in line.values]
    return bool(norms) and min(norms) > 0 and max(norms) > 20 * statistics.median(norms)


def draw_png(drawn: list[Line], path: str) -> None:
    """Write the panels as a PNG, without pyplot, so that no window or notebook shows the figure."""
    per_panel = Counter(line.panel for line in drawn)
    rows = -(-sum(count for count in per_panel.values() if count > 1) // 4)  # of the legend, below the panels
    height = 7 + 0.25 * rows
    figure = load("matplotlib.figure").Figure(figsize=(11, height))
    bottom = (0.56 + 0.25 * rows) / height
    # tight_layout is slow.
    figure.subplots_adjust(left=0.1, right=0.98, bottom=bottom, top=0.95, wspace=0.25, hspace=0.3)
    of_panel = dict(zip(PANELS, figure.subplots(2, 2).flat, strict=True))
    for line in drawn:
        style = {"linestyle": ["-", "--", ":", "-."][line.dash], "color": line.colour, "linewidth": 1.3}
        mark = "o" if len(line.steps) < 30 else None
        axis = of_panel[line.panel]
        axis.plot(line.steps, line.values, label=line.label, marker=mark, markersize=3, **style)
        if line.best is not None:
            axis.scatter(line.steps[line.best], line.values[line.best], marker="*", s=90, color=line.colour, zorder=3)
    for panel, axis in of_panel.items():
        axis.set_title(panel)
        if _needs_log_scale(panel, drawn):
            axis.set_yscale("log")
        axis.set_xlabel("optimizer step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if len(axis.lines) == 1:
            axis.set_ylabel(axis.lines[0].get_label())
        elif not axis.lines:
            axis.text(0.5, 0.5, "nothing logged", ha="center", va="center", transform=axis.transAxes, color="gray")
    if rows:
        shown = [curve for axis in of_panel.values() if len(axis.lines) > 1 for curve in axis.lines]
        figure.legend(handles=shown, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120, format="png")


def describe(drawn: list[Line]) -> str:
    """A text table: the steps of each curve, and its first, last, lowest and highest value."""
    rows: list[tuple[str, ...]] = [("", "steps", "first", "last", "lowest", "highest")]
    for line in drawn:
        values = (line.values[0], line.values[-1], min(line.values), max(line.values))
        rows.append((line.label, f"{line.steps[0]:g} to {line.steps[-1]:g}", *(f"{value:.4g}" for value in values)))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    aligned = ([label.ljust(first), *map(str.rjust, cells, widths)] for label, *cells in rows)
    return "\n".join("  ".join(cells) for cells in aligned)


def draw_html(drawn: list[Line], path: str) -> None:
    """Write the panels as an interactive HTML page that works offline."""
    subplots, objects = load("plotly.subplots"), load("plotly.graph_objects")
    figure = subplots.make_subplots(rows=2, cols=2, subplot_titles=list(PANELS), vertical_spacing=0.12)
    for line in drawn:
        number = list(PANELS).index(line.panel)
        style = {"color": line.colour, "dash": ["solid", "dash", "dot", "dashdot"][line.dash]}
        sizes = [12 if index == line.best else 4 for index in range(len(line.steps))]
        shapes = ["star" if index == line.best else "circle" for index in range(len(line.steps))]
        marker = {"size": sizes, "symbol": shapes}
        trace = objects.Scatter(
            x=line.steps, y=line.values, name=line.label, mode="lines+markers", line=style, marker=marker
        )
        figure.add_trace(trace, row=number // 2 + 1, col=number % 2 + 1)
    figure.update_xaxes(title_text="optimizer step")
    for number, panel in enumerate(PANELS):
        if _needs_log_scale(panel, drawn):
            figure.update_yaxes(type="log", row=number // 2 + 1, col=number % 2 + 1)
    figure.update_layout(height=820, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def load(module: str) -> Any:
    """Import a module of a plotting library.

    Raises:
        MissingPackage: when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingPackage(f"Drawing needs {package}: pip install 'hftrainer[plot]'") from error


def plot(folders: list[str], *, html: bool = False, out: str | None = None) -> list[str]:
    """Draw runs; returns the paths that were written.

    Args:
        folders: output folders, each with a `trainer_state.json` or a checkpoint.
        html: also write an HTML page.
        out: the PNG to write; the page has its name with '.html'. Default: `training.png` in the folder, or
            `comparison.png` in the first of several.

    Raises:
        InvalidArgument: for a folder without a run; the error names it.
        MissingPackage: when matplotlib is missing, or plotly for the page.
    """
    name = "training.png" if len(folders) == 1 else "comparison.png"
    png = Path(out) if out is not None else Path(folders[0]) / name
    if png.suffix.lower() != ".png":
        raise InvalidArgument(f"--out {png}: give a file that ends in .png.")
    drawn = list(lines(folders))
    png.parent.mkdir(parents=True, exist_ok=True)
    draw_png(drawn, str(png))
    written = [str(png)]
    if html:
        page = png.with_suffix(".html")
        draw_html(drawn, str(page))
        written.append(str(page))
    return written


def show_in_notebook(path: str) -> None:
    """Show a PNG below the cell."""
    from IPython.display import Image, display

    display(Image(filename=path))


class PlotCallback(TrainerCallback):
    """Draws the run when training ends: `training.png` in `output_dir`, shown below the cell in a notebook.

    Raises:
        MissingPackage: without matplotlib, when it is made.
    """

    def __init__(self) -> None:
        load("matplotlib.figure")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Draw the run's log."""
        if not state.is_world_process_zero:
            return
        drawn = list(lines_of(state))
        if not drawn:
            logger.warning("PlotCallback: the log of the run has nothing to draw; see logging_steps.")
            return
        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, "training.png")
        draw_png(drawn, path)
        if is_in_notebook():
            show_in_notebook(path)
