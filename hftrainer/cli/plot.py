"""`python -m hftrainer plot`: plots runs or a search, and displays the plots if possible."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import count_of, format_bytes, format_number, format_span, wrap_text
from hftrainer.cli.parser import Parser

if TYPE_CHECKING:
    from hftrainer.monitoring.run_facts import RunRecord
    from hftrainer.reporting.curves import Curve

#: Activity of a journal → the title of its share of the time.
SHARE_TITLES = {"data": "data wait", "evaluation": "evaluation", "saving": "saving"}
#: Speed in a log → its title.
SPEED_TITLES = {"samples_per_second": "samples per second", "tokens_per_second": "tokens per second"}


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plot",
        help="draw the losses, metrics and learning rates of runs, or the trials of a search",
        epilog="example: %(prog)s out",
        usage="%(prog)s [--html] [--cdn] [--json]\n           [--x {step,epoch,time}] [--output PATH] OUTPUT_DIR ...\n"
        "       %(prog)s [--html] [--cdn] [--json] --study STORAGE\n"
        "           [--study-name NAME] [--output PATH]",
        description="Write a plot into the first run's folder and show it: in a notebook below the cell, in a terminal "
        "by the desktop viewer. Without a viewer, or into a pipe or a file, print first, last, lowest and highest "
        "values of curves. For several runs, print a table too.",
    )
    parser.add_argument("folders", metavar="OUTPUT_DIR", nargs="*", help="a run's output folder; several are compared")
    parser.add_argument("--x", choices=("step", "epoch", "time"), help="the horizontal axis; time needs observe=True")
    parser.add_argument("--html", action="store_true", help="write an interactive page too, of 5 MB or more")
    small = "write a small page instead, which loads plotly from the network when opened"
    parser.add_argument("--cdn", action="store_true", help=small)
    parser.add_argument("--study", metavar="STORAGE", help="a search: sqlite:///search.db, or another URL or file")
    parser.add_argument("--study-name", metavar="NAME", help="the study's name, if the storage holds several")
    output = "the .png, .svg or .pdf, by default training.png or comparison.png; of a study the folder, by default ."
    parser.add_argument("--output", "--out", metavar="PATH", help=output)


@dataclass
class _Drawn:
    """What was drawn.

    Attributes:
        paths: the new files.
        rows: of the table that compares runs or trials: title → value.
        note: what is below the table.
        left_out: what is wrong with runs that were not drawn.
        curves: of a single run.
    """

    paths: list[str]
    rows: list[dict[str, Any]]
    note: str
    left_out: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.errors import InvalidArgument, MissingPackage

    is_search = options.study is not None
    if options.folders and is_search:
        parser.error(f"{options.folders[0]} and --study cannot go together: remove one of them")
    if not options.folders and not is_search:
        parser.error("pass the output folders of runs, or --study for a search")
    if wrong := options.x if is_search else options.study_name:
        parser.error(f"{'--x is for runs' if options.x == wrong else '--study-name is for --study'}")
    options.html = "cdn" if options.cdn else options.html
    try:
        drawn = _draw_study(options) if is_search else _draw_runs(options)
    except (InvalidArgument, MissingPackage, OSError) as error:
        parser.fail(error)
    if options.json:
        _print_json(drawn, "best_trials" if is_search else "runs")
    else:
        for line in drawn.left_out:
            print(wrap_text(f"{parser.prog}: {line}", sys.stderr), file=sys.stderr)
        for path in drawn.paths:
            print(f"{path} ({format_bytes(os.path.getsize(path))})" if path.endswith(".html") else path)
        if drawn.rows:
            note = f"\n\n{wrap_text(drawn.note, sys.stdout)}" if drawn.note else ""
            print(f"\n{_compare(drawn.rows)}{note}")
        _show(drawn.paths, drawn.curves)
    # A mistyped name is an error, although the others are drawn.
    if not all(map(os.path.exists, options.folders)):
        parser.exit(2)


def _draw_study(options: argparse.Namespace) -> _Drawn:
    """Draw a search, and compare its best trials."""
    from hftrainer.search.study_plots import best_trials, plot_study

    rows, note = best_trials(options.study, options.study_name)
    table = f"{_compare(rows)}\n\n{note}" if rows and options.html else ""
    paths = plot_study(options.study, options.study_name, out=options.output or ".", html=options.html, table=table)
    return _Drawn(paths, rows, note)


def _draw_runs(options: argparse.Namespace) -> _Drawn:
    """Draw runs, and compare several; a folder that was given twice is one run."""
    from hftrainer.reporting.curves import read_curves
    from hftrainer.reporting.metrics import sort_pattern
    from hftrainer.reporting.plot import plot, read_charts

    folders = {os.path.realpath(folder): folder for folder in options.folders}
    x = options.x or "step"
    runs, left_out = _read_runs(sort_pattern(list(folders.values())), x)
    charts = read_charts(runs, x, with_others=bool(options.html))
    shows_rows = len(runs) > 1 or options.json
    # The tables are by step, with a row for each seed.
    rows, note = _summarize_runs(runs, read_curves(runs)) if shows_rows or options.html else ([], "")
    counts = [(run.facts.step, run.state.log_history[-1].get("epoch") or 0) for run in runs]
    (fewest, few_epochs), *_, (most, epochs) = sorted([*counts, *counts])
    if x == "step" and most >= 10 * fewest > 0 and 0 < epochs < 10 * few_epochs:
        note += f"\nfrom {fewest:,} to {most:,} steps, but similar epochs: --x epoch draws them on one scale"
    table = ""
    if options.html:
        dated = [row | {"started": run.facts.started} for run, row in zip(runs, rows, strict=True)]
        table = f"{_compare(dated, by_run=True)}\n\n{note}"
    paths = plot([run.folder for run in runs], html=options.html, out=options.output, x=x, charts=charts, table=table)
    return _Drawn(paths, rows, note, left_out) if shows_rows else _Drawn(paths, [], "", left_out, charts[x])


def _print_json(drawn: _Drawn, name: str) -> None:
    """Print what was written and the rows of the table, named `name`; what is not finite is null."""
    keyed = [{title.replace(" ", "_"): value for title, value in row.items()} for row in drawn.rows]
    strict = json.loads(json.dumps(keyed), parse_constant=lambda _: None)
    note = "\n".join(filter(None, (drawn.note, *drawn.left_out)))
    found = {"files": drawn.paths} | ({name: strict} if drawn.rows else {}) | ({"note": note} if note else {})
    print(json.dumps(found, indent=2))


def _read_runs(folders: list[str], x: str) -> tuple[list[RunRecord], list[str]]:
    """The runs that can be drawn, and what is wrong with the others.

    Raises:
        InvalidArgument: or another error of the first folder, if no run can be drawn.
    """
    from hftrainer.errors import InvalidArgument
    from hftrainer.monitoring.run_facts import RunRecord
    from hftrainer.reporting.curves import explain_empty

    runs: list[RunRecord] = []
    errors: list[Exception] = []
    for folder in folders:
        try:
            run = RunRecord(folder)
            if reason := explain_empty(run, x):
                raise InvalidArgument(reason)
            runs.append(run)
        except (InvalidArgument, OSError) as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    return runs, [f"left out: {error}" for error in errors]


def _summarize_runs(runs: list[RunRecord], curves: list[Curve]) -> tuple[list[dict[str, Any]], str]:
    """The values of each run by which they are compared, and what they mean."""
    from hftrainer.monitoring.journal import run_names

    names = run_names([run.folder for run in runs])
    # The curves of a single run do not name it.
    named = [{curve.name: curve for curve in curves if curve.run in (name, "")} for name in names]
    starred = dict.fromkeys(curve.name for curve in curves if curve.best is not None)
    evaluated = [metric for run in runs for metric in run.facts.metrics if metric.startswith("eval_")]
    metrics = list(dict.fromkeys([*starred, *evaluated]))[: max(2, len(starred))] or ["loss"]
    rows = [_row_of(*values, metrics) for values in zip(names, runs, named, strict=True)]
    return rows, "\n".join(_notes(runs, rows, metrics[0]))


def _row_of(name: str, run: RunRecord, curves: dict[str, Curve], metrics: list[str]) -> dict[str, Any]:
    """The values of a run by which it is compared."""
    facts = run.facts
    unknown = "stopped" if run.early_stopping else "unknown"
    first = next(iter(curves.values()))
    spent = facts.seconds["all"]
    total = sum(spent.values())
    # The value that has a star in the plot, or else the best that is known.
    best = {metric: values.get("best") for metric, values in facts.metrics.items()}
    best |= {name: curve.values[curve.best] for name, curve in curves.items() if curve.best is not None}
    return {
        "run": name,
        "is best": first.is_best if first.run else None,
        "differs in": first.settings,
        "steps": facts.step,
        "state": "diverged" if facts.nan else facts.state.replace("unobserved", unknown),
        **{f"last {name}": facts.metrics.get(name, {}).get("last") for name in ("loss", metrics[0])},
        **{f"best {metric}": best.get(metric) for metric in metrics},
        **_speeds_and_time(run, curves),
        "downtime": facts.downtime or None,
        "goodput": facts.kept_goodput,
        **{title: spent[part] / total if total else None for part, title in SHARE_TITLES.items()},
        "diverged at": facts.nan and (facts.nan.first, facts.nan.last),
        "resumed at": [step for step, *_ in run.resumes],
        "curves": {name: curve.summary for name, curve in curves.items()},
    }


def _speeds_and_time(run: RunRecord, curves: dict[str, Curve]) -> dict[str, Any]:
    """The speeds and the seconds of a run: by its journal, else by the last line of its log, if it has them."""
    logged = run.facts.values
    if run.seconds is None and "train_runtime" in logged:
        speeds = {title: logged.get(f"train_{name}") for name, title in SPEED_TITLES.items()}
        return speeds | {"time": logged["train_runtime"]}
    pace = curves.get("step_seconds") or curves.get("step_milliseconds")
    found = {title: curves.get(name) for name, title in SPEED_TITLES.items()}
    return {title: curve and _mean_speed(curve, pace) for title, curve in found.items()} | {"time": run.seconds}


def _notes(runs: list[RunRecord], rows: list[dict[str, Any]], metric: str) -> list[str]:
    """What the values of the rows mean, and why some are missing; the best run is that by `metric`."""
    shown = {title for row in rows for title, value in row.items() if value is not None}
    notes = [f"(best): by {metric}"] if any(row["is best"] for row in rows) else []
    if any(run.seconds is not None for run in runs):
        notes.append(_explain_times(shown))
    if len(runs) > 1 and not any(run.arguments for run in runs):
        notes.append("arguments unknown: only checkpoints and observe=True save them")
    if texts := dict.fromkeys(name for run in runs for name in run.texts):
        notes.append(f"no curve, since it is text: {', '.join(texts)}")
    if "saving" in shown:
        notes.append(f"{', '.join(SHARE_TITLES.values())}: shares of the time")
    unobserved = [row for run, row in zip(runs, rows, strict=True) if run.seconds is None]
    if summarized := ", ".join(row["run"] for row in unobserved if row["time"] is not None):
        notes.append(f"{summarized}: train_runtime and the speed over it, with evaluations and saving")
    unknown = [row["run"] for row in unobserved if row["time"] is None]
    if 0 < len(unknown) < len(runs):
        notes.append(f"{', '.join(unknown)}: without observe=True no speed, time or goodput")
    return notes


def _explain_times(shown: set[str]) -> str:
    """What the times and speeds of journals mean, of the titles that are shown."""
    kept = f"steps that were kept / {'(time + downtime)' if 'downtime' in shown else 'time'}"
    meanings = {"time": "without pauses and preparation", "downtime": "pauses after failures", "goodput": kept}
    notes = [f"{title}: {meaning}" for title, meaning in meanings.items() if title in shown]
    if not shown.isdisjoint(SPEED_TITLES.values()):
        notes.append("speeds: means without evaluations and saving")
    return "; ".join(notes)


def _mean_speed(speed: Curve, pace: Curve | None) -> float | None:
    """Samples or tokens over the time of training, without evaluations and saving.

    Args:
        speed: that of each log line.
        pace: the time per step of each; without it, all steps count as equally large.
    """
    times = dict(zip(pace.steps, pace.values, strict=True)) if pace else {}
    found = zip(speed.values, [speed.start, *speed.steps[:-1]], speed.steps, strict=True)
    parts = [((step - before) * times.get(step, 1 / value), value) for value, before, step in found if value > 0]
    total = sum(time for time, _ in parts)
    return sum(time * value for time, value in parts) / total if total > 0 else None


def _compare(runs: list[dict[str, Any]], *, by_run: bool = False) -> str:
    """A table with one row per run or trial; a hyphen is a value that only others have.

    It has one column per run with `by_run`, or if only so its lines are short enough for the terminal.
    """
    from hftrainer.base.messages import format_duration
    from hftrainer.reporting.metrics import is_number

    formats: dict[str, Any] = {"time": format_duration, "downtime": format_duration}
    formats["started"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    formats |= dict.fromkeys(("goodput", *SHARE_TITLES.values()), "{:.0%}".format)
    # Of runs that are all complete, nothing is said.
    if {run.get("state") for run in runs} in ({"complete"}, {"unknown"}):
        formats["state"] = lambda _: ""
    runs = [_as_columns(run, [other.get("differs in", {}) for other in runs]) for run in runs]
    # Trials may have different hyperparameters.
    names = list(dict.fromkeys(name for run in runs for name in run))
    rows = [tuple(names) if names[0] == "trial" else ("", *names[1:])]
    missing = {name: "-" if any(run.get(name) is not None for run in runs) else "" for name in names}
    for run in runs:
        texts = {name: format_number if is_number(value) else str for name, value in run.items()} | formats
        rows.append(tuple(missing[name] if run.get(name) is None else texts[name](run[name]) for name in names))
    turned = align([column for column in zip(*rows, strict=True) if any(column[1:])])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else math.inf
    are_too_wide = [any(len(line) > width for line in table.splitlines()) for table in (align(rows), turned)]
    return turned if by_run or are_too_wide == [True, False] else align(rows, width)


def _as_columns(row: dict[str, Any], settings: list[dict[str, Any]]) -> dict[str, Any]:
    """A row with a column for each argument in which runs differ and the best run named, for a table."""
    from hftrainer.checkpointing.saved_arguments import round_argument

    if row.get("diverged at"):
        row = row | {"state": f"diverged at {format_span(*row['diverged at'])}"}
    starred = {f"best {name}": found for name, found in row.get("curves", {}).items() if found["best"] is not None}
    row = row | {title: f"{format_number(f['best'])} at step {f['best_step']:,.0f}" for title, f in starred.items()}
    row = {title: value for title, value in row.items() if title not in ("diverged at", "resumed at", "curves")}
    own = row.pop("differs in", {})
    if row.pop("is best", False):
        row["run"] += " (best)"
    first, *others = row.items()
    texts = {name: None if value is None else round_argument(name, value, settings) for name, value in own.items()}
    return dict([first, *texts.items(), *others])


def _show(paths: list[str], curves: list[Curve]) -> None:
    """Show the files, or without a desktop or a terminal the curves of one run as text."""
    from hftrainer.callbacks.progress_bar import is_in_notebook, show_in_notebook

    pages = [path for path in paths if path.endswith(".html")]
    if is_in_notebook():
        for path in (path for path in paths if path not in pages):
            show_in_notebook(path)
    elif sys.stdout.isatty() and _has_desktop():
        import webbrowser

        for path in pages or paths:
            webbrowser.open(Path(path).resolve().as_uri())
    elif curves:
        print(describe_curves(curves))


def _has_desktop() -> bool:
    """Whether a window can open on a screen."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def describe_curves(curves: list[Curve]) -> str:
    """A text table of each curve: its steps, its first, last, lowest and highest value.

    Below it are what became of the run, the best values, and what is not finite.
    """
    from hftrainer.reporting.panels import clipped_peaks, group_by_panel, vertical_axis

    axis = {"step": "steps", "epoch": "epochs"}.get(curves[0].x, curves[0].x)
    rows: list[tuple[str, ...]] = [("", axis, "first", "last", "lowest", "highest")]
    for curve in curves:
        steps = f"{format_number(curve.steps[0])} to {format_number(curve.steps[-1])}"
        rows.append((curve.label, steps, *(curve.format(curve.summary[name]) for name in rows[0][2:])))
    notes = [curves[0].state] if curves[0].state else []
    notes += [f"best {curve.label}: {curve.format_best()}" for curve in curves if curve.best is not None]
    notes += [
        f"{curve.label}: {count_of(count, 'values')} {'is' if count == 1 else 'are'} not finite, first {first[2]}"
        for curve in curves
        if (count := len(curve.gaps)) and (first := curve.non_finite)
    ]
    for panel in group_by_panel(curves).values():
        peaks = clipped_peaks(panel, vertical_axis(panel)[1][1])
        notes += [f"{curve.label}: {text.removeprefix(f'{curve.label}: ')}" for curve, _, text in peaks]
    lines = (wrap_text(note, sys.stdout) for note in notes)
    return "\n".join([align(rows, shutil.get_terminal_size().columns), *([""] if notes else []), *lines])


def align(rows: list[tuple[str, ...]], width: float = math.inf) -> str:
    """A text table of rows with a label followed by numbers, without empty columns.

    Args:
        rows: the rows, including the headings.
        width: characters per line. Columns that do not fit follow in a second table below.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    rows = list(zip(*columns, strict=True))
    first, *widths = (max(map(len, column)) for column in columns)
    count = len(widths)
    while count > 1 and first + sum(widths[:count]) + 2 * count > width:
        count -= 1
    cell_rows = ([label.ljust(first), *map(str.rjust, cells[:count], widths[:count])] for label, *cells in rows)
    table = "\n".join("  ".join(cells).rstrip() for cells in cell_rows)
    remaining_rows = [(label, *cells[count:]) for label, *cells in rows]
    return table if count == len(widths) else f"{table}\n\n{align(remaining_rows, width)}"
