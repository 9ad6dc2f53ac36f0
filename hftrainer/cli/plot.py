"""`python -m hftrainer plot`: plots runs or a search, and displays the plots if possible."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hftrainer.cli.parser import Parser


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plot",
        help="draw the losses, metrics and learning rates of runs, or the trials of a search",
        epilog="example: %(prog)s out",
        usage="%(prog)s [--html] [--json] [--out FILE] OUTPUT_DIR ...\n"
        "       %(prog)s [--html] [--json] --study STORAGE\n"
        "           [--study-name NAME] [--output DIR]",
        description="Write a plot and show it: in a notebook below the cell, in a terminal by the desktop viewer; "
        "without a desktop, print the first, last, lowest and highest value of each curve. If the output is a pipe or "
        "a file, nothing is shown. For several runs, print a table too.",
    )
    parser.add_argument("folders", metavar="OUTPUT_DIR", nargs="*", help="a run's output folder; several are compared")
    parser.add_argument("--html", action="store_true", help="write interactive pages too")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file for runs, .png, .svg or .pdf; default: training.png, or for several runs comparison.png "
        "in the first folder; for checkpoint-5, training-5.png in its parent folder",
    )
    parser.add_argument(
        "--study", metavar="STORAGE", help="a search: sqlite:///search.db, another URL, or a journal file"
    )
    parser.add_argument("--study-name", metavar="NAME", help="the study's name, if the storage holds several")
    parser.add_argument("--output", metavar="DIR", help="the folder for a study's plots; default: the current one")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.errors import InvalidArgument, MissingPackage
    from hftrainer.reporting.plot import plot
    from hftrainer.search.plots import plot_study

    if bool(options.folders) == (options.study is not None):
        parser.error("pass the output folders of runs, or --study for a search")
    unsuitable = ("--out",) if options.study is not None else ("--study-name", "--output")
    for option in unsuitable:
        if getattr(options, option.strip("-").replace("-", "_")) is not None:
            parser.error(f"{option} is for {'runs' if options.study is not None else '--study'}")
    try:
        if options.study is not None:
            paths = plot_study(options.study, options.study_name, out=options.output or ".", html=options.html)
        else:
            paths = plot(options.folders, html=options.html, out=options.out)
    except (InvalidArgument, MissingPackage, OSError) as error:
        parser.fail(error)
    if options.json:
        print(json.dumps({"files": paths}, indent=2))
        return
    print("\n".join(paths))
    if len(options.folders) > 1:
        print(f"\n{_compare(options.folders)}")
    _show(paths, options.folders)


def _compare(folders: list[str]) -> str:
    """A table with one row per run."""
    from hftrainer.cli.watch import format_duration, format_number
    from hftrainer.monitoring.page import WatchedRun
    from hftrainer.reporting.plot import align, run_names

    pages = [WatchedRun(folder).read() for folder in folders]
    metrics = list(dict.fromkeys(name for page in pages for name in page["metrics"] if name.startswith("eval_")))[:2]
    best = [f"best {name}" for name in metrics]
    rows = [("", "steps", "loss", *best, "samples/s", "tokens/s", "time", "goodput")]
    for name, page in zip(run_names(folders), pages, strict=True):
        metrics_of_run, values, goodput = page["metrics"], page["values"], page["goodput"]
        rates = [values.get(rate, values.get(f"train_{rate}")) for rate in ("samples_per_second", "tokens_per_second")]
        seconds = page["updated"] - page["started"] if page["started"] else values.get("train_runtime")
        numbers = (
            page["step"],
            metrics_of_run.get("loss", {}).get("last"),
            *(metrics_of_run.get(each, {}).get("best") for each in metrics),
        )
        time = "" if seconds is None else format_duration(seconds)
        rows.append((name, *map(format_number, (*numbers, *rates)), time, "" if goodput is None else f"{goodput:.0%}"))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    table = align(list(zip(*columns, strict=True)), width)
    return f"{table}\n\ngoodput: kept steps / all time" if columns[-1][0] == "goodput" else table


def _show(paths: list[str], folders: list[str]) -> None:
    from hftrainer.callbacks.progress import is_in_notebook
    from hftrainer.reporting.plot import describe, lines, show_in_notebook

    pages = [path for path in paths if path.endswith(".html")]
    if is_in_notebook():
        for path in paths:
            if path not in pages:
                show_in_notebook(path)
    elif sys.stdout.isatty() and _has_desktop():
        import webbrowser

        for path in pages or paths:
            webbrowser.open(Path(path).resolve().as_uri())
    elif sys.stdout.isatty() and len(folders) == 1:
        print(describe(list(lines(folders))))


def _has_desktop() -> bool:
    """Whether a window can open on a screen."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
