"""`python -m hftrainer plot`: plots runs or a search, and displays the plot if possible."""

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
        usage="%(prog)s [--html] [--json] [--out FILE] OUTPUT_DIR ...\n"
        "       %(prog)s [--html] [--json] --study STORAGE\n"
        "           [--study-name NAME] [--output DIR]",
        description="Write a picture, and show it: in a notebook below the cell; on a terminal in the viewer of the "
        "desktop; without a desktop, the first, last, lowest and highest value of each curve. Nothing is shown if "
        "the output is a pipe or a file. Of several runs, print a table too.",
    )
    parser.add_argument("folders", metavar="OUTPUT_DIR", nargs="*", help="a run's output folder; several are compared")
    parser.add_argument("--html", action="store_true", help="write interactive pages too")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file for runs, .png, .svg or .pdf; default: training.png, or of several comparison.png in the first; "
        "of checkpoint-5, training-5.png beside it",
    )
    parser.add_argument(
        "--study", metavar="STORAGE", help="a search: sqlite:///search.db, another URL, or a journal file"
    )
    parser.add_argument("--study-name", metavar="NAME", help="the study's name, if the storage holds several")
    parser.add_argument("--output", metavar="DIR", help="the folder for a study's plots; default: the current one")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(execute=_plot, parser=parser)


def _plot(parser: Parser, options: argparse.Namespace) -> None:
    from hftrainer.errors import InvalidArgument, MissingPackage
    from hftrainer.reporting.plot import plot
    from hftrainer.search.plots import plot_study

    if bool(options.folders) == (options.study is not None):
        parser.error("give the output folders of runs, or --study for a search")
    others = ("--out",) if options.study is not None else ("--study-name", "--output")
    for option in others:
        if getattr(options, option.strip("-").replace("-", "_")) is not None:
            parser.error(f"{option} is for {'runs' if options.study is not None else '--study'}")
    try:
        if options.study is not None:
            written = plot_study(options.study, options.study_name, out=options.output or ".", html=options.html)
        else:
            written = plot(options.folders, html=options.html, out=options.out)
    except (InvalidArgument, MissingPackage, OSError) as error:
        parser.fail(error)
    if options.json:
        print(json.dumps({"files": written}, indent=2))
        return
    print("\n".join(written))
    if len(options.folders) > 1:
        print(f"\n{_compare(options.folders)}")
    _show(written, options.folders)


def _compare(folders: list[str]) -> str:
    """A table with a row a run."""
    from hftrainer.cli.watch import duration, number
    from hftrainer.monitoring.page import WatchedRun
    from hftrainer.reporting.plot import align, run_names

    pages = [WatchedRun(folder).read() for folder in folders]
    metrics = list(dict.fromkeys(name for page in pages for name in page["metrics"] if name.startswith("eval_")))[:2]
    best = [f"best {name}" for name in metrics]
    rows = [("", "steps", "loss", *best, "samples/s", "tokens/s", "time", "goodput")]
    for name, page in zip(run_names(folders), pages, strict=True):
        found, values, goodput = page["metrics"], page["values"], page["goodput"]
        rates = [values.get(rate, values.get(f"train_{rate}")) for rate in ("samples_per_second", "tokens_per_second")]
        seconds = page["updated"] - page["started"] if page["started"] else values.get("train_runtime")
        numbers = (
            page["step"],
            found.get("loss", {}).get("last"),
            *(found.get(each, {}).get("best") for each in metrics),
        )
        time = "" if seconds is None else duration(seconds)
        rows.append((name, *map(number, (*numbers, *rates)), time, "" if goodput is None else f"{goodput:.0%}"))
    known = [column for column in zip(*rows, strict=True) if any(column[1:])]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return align(list(zip(*known, strict=True)), width)


def _show(written: list[str], folders: list[str]) -> None:
    from hftrainer.callbacks.progress import is_in_notebook
    from hftrainer.reporting.plot import describe, lines, show_in_notebook

    pages = [path for path in written if path.endswith(".html")]
    if is_in_notebook():
        for path in written:
            if path not in pages:
                show_in_notebook(path)
    elif sys.stdout.isatty() and _has_desktop():
        import webbrowser

        for path in pages or written:
            webbrowser.open(Path(path).resolve().as_uri())
    elif sys.stdout.isatty() and len(folders) == 1:
        print(describe(list(lines(folders))))


def _has_desktop() -> bool:
    """Whether there is a screen on which a window can open."""
    if sys.platform in ("win32", "darwin"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
