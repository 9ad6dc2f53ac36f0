"""`python -m hftrainer watch`: shows live or finished runs in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import operator
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import format_duration, format_number, format_span
from hftrainer.checkpointing.layout import step_of
from hftrainer.cli.parser import Parser
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from hftrainer.monitoring.run_facts import RunFacts, WatchedRun
    from hftrainer.reporting.metrics import NanSpan

    #: The name of a run, and its facts or, if it has not started yet, the problem.
    NamedFacts = tuple[str, RunFacts | Exception]

#: State of a run → colour of its frame and progress bar; red for other states, and if the loss is NaN.
COLOURS = {"running": "cyan", "complete": "green", "stopped": "yellow", "unobserved": "blue"}
CURVE_COLOURS = ("cyan", "yellow", "green", "magenta")
#: Columns that each run needs for several runs to be side by side.
MIN_COLUMNS = 78
#: Number of checkpoints and warnings on the page; `--json` has all.
MAX_EVENTS = 3
#: What a low page leaves out, in this order; then metrics from the last on.
LEFT_OUT = ("more details and warnings", "times", "values", "checkpoints")
#: Rows of a chart: on a page that is printed once; on a live page at most, and those for which metrics give way.
ROWS, MAX_ROWS, LOW_ROWS = 6, 30, 3
#: The bits of the dots in a braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

#: Characters of the page → ASCII; of braille, whether dots are in the upper and the lower half.
_ASCII = {0x2800 + dot: " '.:"[bool(dot & 0x1B) + 2 * bool(dot & 0xE4)] for dot in range(256)}
_ASCII |= {ord("·"): "|", ord("…"): "~"}


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "watch",
        help="show live or finished runs in the terminal: curves, speeds, time by activity, checkpoints, warnings",
        epilog="example: %(prog)s out --every 5",
        description="Show each run from the files in its folder, until Ctrl-C. A run with "
        "observe=True is shown live, any other run by its newest checkpoint.",
    )
    parser.set_defaults(missing="pass the output folders of runs")
    parser.add_argument("folders", metavar="OUTPUT_DIR", nargs="+", help="output folders of runs")
    parser.add_argument("--once", action="store_true", help="print the page once; the default for a pipe or a file")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=2.0, help="time between updates; default: 2")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.monitoring.journal import find_runs, run_names
    from hftrainer.monitoring.run_facts import WatchedRun
    from hftrainer.reporting.metrics import sort_pattern

    if not 0 < options.every <= 86_400:
        parser.error(f"--every {options.every:g}: use a number of seconds above 0, and at most 86400")
    folders = sort_pattern(options.folders)
    options.folders = [run for folder in folders for run in find_runs(folder, "") or find_runs(folder) or [folder]]
    runs = [*zip(run_names(options.folders), map(WatchedRun, options.folders), strict=True)]
    try:
        console = None if options.json else _console()
        if console is not None and sys.stdout.isatty() and not options.once:
            _show(console, runs, options.every)
            return
    except (InvalidArgument, MissingPackage, OSError) as error:
        parser.fail(error)
    read = _read_runs(runs)
    errors = [facts for _, facts in read if isinstance(facts, Exception)]
    found = [(name, facts) for name, facts in read if not isinstance(facts, Exception)]
    if errors and (console is None or not found):
        parser.fail(errors[0])
    if console is None:
        # NaN is not JSON.
        text = json.dumps([dataclasses.asdict(facts) for _, facts in found])
        print(json.dumps({"runs": json.loads(text, parse_constant=lambda _: None)}, indent=2))
    else:
        console.print(_make_page(console, found, None))
        # The other runs are above the error.
        if errors:
            parser.fail(errors[0])


def _console() -> Console:
    """The terminal.

    Raises:
        MissingPackage: if rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingPackage("watch needs rich: pip install 'hftrainer[watch]'") from cause_if_installed(error)
    return Console()


def _show(console: Console, runs: list[tuple[str, WatchedRun]], every: float) -> None:
    """Show the page until Ctrl-C.

    Raises:
        InvalidArgument: if a path is not a folder. One that does not exist is waited for.
    """
    from rich.live import Live

    from hftrainer.arguments.storage_url import explain_unreadable_url
    from hftrainer.monitoring.journal import check_folder

    for _, run in runs:
        if os.path.exists(run.folder) or explain_unreadable_url(run.folder):
            check_folder(run.folder)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_make_page(console, _read_runs(runs), console.height), refresh=True)
            time.sleep(every)
    # The terminal has its own screen again, without the page.
    console.print(_make_page(console, _read_runs(runs), None))


def _read_runs(runs: list[tuple[str, WatchedRun]]) -> list[NamedFacts]:
    from hftrainer.monitoring.journal import check_folder

    found: list[NamedFacts] = []
    for name, run in runs:
        try:
            check_folder(run.folder)
            found.append((name, run.read()))
        except (InvalidArgument, OSError) as error:
            found.append((name, error))
    return found


def _make_page(console: Console, runs: Sequence[NamedFacts], height: int | None) -> RenderableType:
    """All runs, side by side in a wide terminal.

    Args:
        console: the terminal.
        runs: what `_read_runs` found.
        height: lines of the page; None for no limit.
    """
    from rich.segment import Segments
    from rich.table import Column, Table

    columns = max(1, min(len(runs), console.width // MIN_COLUMNS))
    lines = None if height is None else max(3, height // -(-len(runs) // columns))
    grid = Table.grid(*(Column(ratio=1) for _ in range(columns)), expand=True)
    panels = [_make_panel(console, run, console.width // columns, lines) for run in runs]
    for start in range(0, len(panels), columns):
        grid.add_row(*panels[start : start + columns])
    if not console.options.ascii_only:
        return grid
    # rich draws frames of ASCII by itself.
    texts = ((part, part.text.translate(_ASCII).encode("ascii", "replace")) for part in console.render(grid))
    return Segments(part._replace(text=text.decode()) for part, text in texts)


def _make_panel(console: Console, run: NamedFacts, width: int, height: int | None) -> Panel | Text:
    """One run in a frame that is `width` characters wide; or in a line, why there is none yet."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    name, facts = run
    if isinstance(facts, Exception):
        return Text(f"Waiting for a run: {facts}", "blue")
    colour = "red" if facts.nan else COLOURS.get(facts.state, "red")
    inner = width - 4
    # A point is no curve, unless NaN follows or precedes it.
    curves = {name: each for name, each in facts.curves.items() if _finite(each) and len(each["values"]) > 1}
    # The advice is at the end of a warning, but a low page needs its lines for the curves.
    text_lines = 5 if height is None or height > 40 else 2
    make_parts = functools.partial(_measure_parts, console, facts, inner, colour, text_lines)
    parts, lines = make_parts()
    chart_lines = LOW_ROWS + 4 if curves else 2
    hidden = len(facts.warnings) - MAX_EVENTS
    note = f"earlier warnings: {hidden}, in --json" if hidden > 0 else None
    if height is not None and lines + chart_lines > height:
        note = "not all lines fit: use a taller window"
        parts, lines = _fit_parts(make_parts, len(facts.metrics), height, chart_lines)
    is_flat = all(len({*_finite(curve)}) < 2 for curve in curves.values())
    rows = min(1 if is_flat else MAX_ROWS, ROWS if height is None else height - lines - 4)
    if curves and rows >= (1 if is_flat else 2):
        parts.append(_make_charts(console, curves, inner, rows))
        lines += rows + 2
    title = Text.assemble((name, "bold"), "  ", (_state(facts), colour))
    height = height and min(height, lines + 2)
    return Panel(Group(*parts), title=title, title_align="left", subtitle=note, border_style=colour, height=height)


def _measure_parts(console: Console, facts: RunFacts, width: int, *arguments: Any) -> tuple[list[RenderableType], int]:
    """The parts above the curves, from `_make_parts`, and their lines."""
    from rich.console import Group

    parts = _make_parts(facts, width, *arguments)
    return parts, len(console.render_lines(Group(*parts), console.options.update(width=width)))


def _fit_parts(make_parts: Callable[..., Any], metrics: int, height: int, chart_lines: int) -> Any:
    """What `make_parts` returns for the parts that leave room for a chart; or else for as many as fit.

    A low page keeps three metrics and a chart rather than all else.
    """
    levels = [make_parts(LEFT_OUT[:count]) for count in range(len(LEFT_OUT) + 1)]
    levels += [make_parts(LEFT_OUT, hidden) for hidden in range(1, metrics)]
    with_metrics = levels[: max(len(LEFT_OUT) + 1, len(levels) - 2)]
    charted = (made for made in with_metrics if made[1] + chart_lines <= height)
    fitting = (made for made in levels if made[1] + 2 <= height)
    return next(itertools.chain(charted, fitting), levels[len(LEFT_OUT)])


def _state(facts: RunFacts) -> str:
    """The state of a run as text."""
    silence = format_duration(round(time.time() - (facts.updated or 0)))
    words = {
        "complete": "complete" if facts.device else "complete, by its newest checkpoint",
        "unobserved": "not finished, by its newest checkpoint",
        "running": f"running on {facts.host}",
        "silent": f"no sign of life for {silence}; process {facts.pid} on {facts.host}",
        "killed": f"killed: process {facts.pid} on {facts.host} has ended",
        "stopped": "stopped" if facts.reason in (None, "stopped") else f"stopped by {facts.reason}",
        "failed": f"ended with {facts.reason}",
    }
    if facts.state in ("complete", "unobserved") and not facts.device and step_of(facts.folder) is not None:
        return f"checkpoint at step {facts.step:,} of {facts.max_steps:,}"
    # The step that diverged was not made.
    if facts.reason == "TrainingDiverged":
        return f"diverged at step {facts.step + 1:,}"
    problem = f"loss NaN since step {format_span(nan.first, nan.last)}, " if (nan := facts.nan) else ""
    return problem + words[facts.state]


def _make_parts(
    facts: RunFacts, width: int, colour: str, text_lines: int, left_out: Sequence[str] = (), hidden_metrics: int = 0
) -> list[RenderableType]:
    """What is above the curves, without that of `left_out`; a message has at most `text_lines` lines."""
    from rich.text import Text

    now = time.time()
    is_brief = "more details and warnings" in left_out
    details = _join(_list_details(facts, now), width)
    has_times = any(facts.seconds["all"].values()) and "times" not in left_out
    warnings = (_describe_warning(warning, now) for warning in facts.warnings[-1 if is_brief else -MAX_EVENTS :])
    parts = [
        _make_progress(facts, colour),
        Text(details.split("\n")[0] if is_brief else details, "dim"),
        Text(_clean(f"{facts.reason}: {facts.message}", text_lines * width) if facts.message else "", colour),
        _make_metrics(facts, hidden_metrics),
        Text("" if "values" in left_out else _join(_list_values(facts.values), width)),
        _seconds_by_activity(facts.seconds) if has_times else "",
        Text("" if "checkpoints" in left_out else _join(_list_checkpoints(facts, now), width)),
        Text(_explain_resume(facts), "dim"),
        *(Text(_clean(warning, text_lines * width), "yellow") for warning in warnings),
    ]
    # An empty text would be an empty line.
    return [part for part in parts if part]


def _make_metrics(facts: RunFacts, hidden: int) -> Table | Text:
    """A table of losses and metrics without the last `hidden` ones; before the first, what a run waits for."""
    from rich.text import Text

    titles = {"last": "last", "best": "best", "best_step": "at step"}
    rows = [(name, *(format_number(metric[title]) for title in titles)) for name, metric in facts.metrics.items()]
    if rows:
        more = [(f"+{hidden} more",)] if hidden else []
        return _make_table(["", *titles.values()], [*rows[: len(rows) - hidden], *more])
    interval = f" (logging_steps={facts.logging_steps:g})" if facts.logging_steps else ""
    return Text(f"waiting for the first log line{interval}" if facts.state == "running" else "")


def _list_values(values: dict[str, float]) -> Iterable[str]:
    """The last learning rate, speeds and other values, in words."""
    from hftrainer.callbacks.log_lines import format_values
    from hftrainer.reporting.metrics import SHARES, SPEEDS

    # The table of activities has the shares too. Means over the run would look like speeds of the last interval.
    hidden = (*SPEEDS[SHARES], *(name for name in values if name.startswith("train_") and "step_seconds" in values))
    return map(str.strip, format_values({name: values[name] for name in values if name not in hidden}).values())


def _list_checkpoints(facts: RunFacts, now: float) -> Iterator[str]:
    """The newest checkpoints with their ages."""
    for place, save in enumerate(facts.checkpoints[: -MAX_EVENTS - 1 : -1]):
        age = _format_age(now, save["time"]) + _nan_mark(save["step"], facts.nan)
        yield f"{'' if place else 'saved: '}{os.path.basename(save['folder'])} {age}"


def _explain_resume(facts: RunFacts) -> str:
    """How to go on with a run that was interrupted."""
    # A callback stops a run on purpose.
    if facts.state not in ("stopped", "killed", "failed") or facts.reason == "stopped":
        return ""
    usable = [os.path.basename(save["folder"]) for save in facts.checkpoints if not _nan_mark(save["step"], facts.nan)]
    if usable:
        return f"to resume: trainer.train(resume_from_checkpoint={os.path.join(facts.folder, usable[-1])!r})"
    return "" if facts.checkpoints else "no checkpoint: start it again"


def _describe_warning(warning: dict[str, Any], now: float) -> str:
    # The warning may be of a step that has begun since, and name it.
    place = "" if re.search(r"(?i)\bstep \d", warning["text"]) else f", after step {warning['step']:,}"
    return f"{_format_age(now, warning['time'])}{place}: {warning['text']}"


def _clean(text: str, length: int) -> str:
    """A text in a line, without control characters."""
    return "".join(filter(str.isprintable, textwrap.shorten(text, length, placeholder=" ...")))


def _join(parts: Iterable[str], width: int) -> str:
    """Parts in lines that end between two parts, with dots between those of a line."""
    text = "\xa0· ".join("\xa0".join(part.split()) for part in parts)
    return textwrap.fill(text, width, break_on_hyphens=False).replace("\xa0·\n", "\n").replace("\xa0", " ")


def _nan_mark(step: int, nan: NanSpan | None) -> str:
    """Says of a checkpoint whether its weights are NaN."""
    if nan is None or step <= nan.usable:
        return ""
    return ", NaN" if step >= nan.last else ", maybe NaN"


def _make_progress(facts: RunFacts, colour: str) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table

    step, steps = facts.step, facts.max_steps
    grid = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), expand=True, padding=(0, 1))
    bar = ProgressBar(max(steps, step, 1), step, complete_style=colour, finished_style=colour)
    share = f"{min(step / steps, 1):.0%}" if steps else ""
    left = "" if facts.seconds_left is None else f", {format_duration(round(facts.seconds_left))} left"
    end = f", past the end at {steps:,}" if step > steps else f" of {steps:,}"
    grid.add_row(f"step {step:,}{end if steps else ''}", bar, share + left)
    return grid


def _list_details(facts: RunFacts, now: float) -> Iterator[str]:
    if facts.device:
        yield f"{facts.world_size} x {facts.device}"
    # A run trains unless it says otherwise, and its last phase began after the last evaluation or save.
    if facts.phase and facts.phase["name"] != "training":
        yield f"{facts.phase['name']} for {format_duration(round(now - facts.phase['since']))}"
    times = {"started": facts.started, "last event": facts.updated}
    yield from (f"{name} {_format_age(now, then)}" for name, then in times.items() if then)
    if facts.state == "unobserved" and step_of(facts.folder) is None:
        yield "observe=True shows a run live"
    if facts.resumed_from:
        yield f"resumed from {os.path.basename(facts.resumed_from)}"
    if (goodput := facts.kept_goodput) is not None:
        yield f"goodput {goodput:.0%} (steps that were kept)"
    if facts.downtime:
        yield f"downtime {format_duration(facts.downtime)} (pauses after failures)"


def _seconds_by_activity(seconds: dict[str, dict[str, float]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for label, spent_seconds in (("recent", seconds["recent"]), ("total", seconds["all"])):
        total = sum(spent_seconds.values()) or 1.0
        rows.append((label, format_duration(total), *(f"{part / total:.1%}" for part in spent_seconds.values())))
    # Of a short run, the last intervals are all.
    return _make_table(["after preparation", "time", *seconds["all"]], rows if rows[0][1:] != rows[1][1:] else rows[1:])


def _make_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with a column of labels and columns of numbers."""
    from rich.table import Column, Table
    from rich.text import Text

    numbers = (Column(title, justify="right") for title in titles[1:])
    table = Table(titles[0], *numbers, box=None, pad_edge=False, header_style="dim")
    for label, *cells in rows:
        table.add_row(Text(label), *cells)
    return table


def _make_charts(console: Console, curves: dict[str, Any], width: int, rows: int) -> Table:
    """A chart of the losses and one of metrics; without colour, a chart for each of the first curves."""
    from rich.table import Table

    losses = {name: curve for name, curve in curves.items() if name.endswith("loss")}
    others = {name: curve for name, curve in curves.items() if name not in losses}
    shares = {name: curve for name, curve in others.items() if all(not abs(value) > 1 for value in curve["values"])}
    first = dict(list(others.items())[:1])
    charts = list(filter(None, (losses, shares or first)))
    if console.color_system is None or console.no_color:
        single = [{name: curve} for chart in charts for name, curve in chart.items()]
        charts = single[: max(1, width // 24)]
    grid = Table.grid(padding=(0, 2))
    width = width // max(1, len(charts)) - 2
    grid.add_row(*(_make_chart(dict(list(chart.items())[: len(CURVE_COLOURS)]), width, rows) for chart in charts))
    return grid


def _finite(curve: dict[str, list[float]]) -> list[float]:
    return [value for value in curve["values"] if math.isfinite(value)]


def _make_chart(curves: dict[str, dict[str, list[float]]], width: int, rows: int) -> Text:
    """Curves in braille characters, with their names, the range of values and the range of steps."""
    from rich.text import Text

    from hftrainer.reporting.curves import Curve
    from hftrainer.reporting.panels import vertical_axis

    points = [
        (step, value, colour)
        for colour, curve in zip(CURVE_COLOURS, curves.values(), strict=False)
        for step, value in zip(curve["steps"], curve["values"], strict=True)
    ]
    values = {value: step for step, value, _ in points if math.isfinite(value)}
    panel = "loss" if all(name.endswith("loss") for name in curves) else "metrics"
    drawn = [Curve(panel, name, curve["steps"], curve["values"]) for name, curve in curves.items()]
    scale, (bottom, top) = vertical_axis(drawn)
    low, high = max(min(values), bottom), min(max(values), top)
    labels = [format_number(high), *[""] * (rows - 1)]
    # A flat curve has one value.
    if format_number(low) != labels[0]:
        labels[-1] = format_number(low)
    margin = max(map(len, labels)) + 1
    box = (min(points)[0], max(points)[0], low, high)
    columns = max(1, width - margin)
    per_step = (columns - 1) / (box[1] - box[0] or 1)
    missing = {round((step - box[0]) * per_step): colour for step, value, colour in points if not math.isfinite(value)}
    curve_offsets = [_braille(curve, box, columns, rows, is_log=scale == "log") for curve in curves.values()]
    text = Text(" " * margin, no_wrap=True)
    for colour, name in zip(CURVE_COLOURS, curves, strict=False):
        text.append(f"{name}  ", colour)
    text.append("log scale  " if scale == "log" else "", "dim")
    peak = max(values)
    text.append(f"max {format_number(peak)} at step {values[peak]:,.0f}" if high < peak else "", "dim")
    for row, label in enumerate(labels):
        text.append(f"\n{label:>{margin - 1}} ", "dim")
        for column in range(columns):
            codes = [offsets[row, column] for offsets in curve_offsets]
            colour = next((colour for colour, code in zip(CURVE_COLOURS, codes, strict=False) if code), "")
            # As in plots, a cross at the bottom is a value that is not finite.
            is_missing = not colour and row == rows - 1 and column in missing
            dots = chr(0x2800 + functools.reduce(operator.or_, codes)) if colour else "x" if is_missing else " "
            text.append(dots, missing[column] if is_missing else colour)
    first, last = f"{box[0]:,.0f}", f"step {box[1]:,.0f}"
    text.append(f"\n{'':{margin}}{first}{last:>{max(1, columns - len(first))}}", "dim")
    return text


def _braille(curve: dict[str, list[float]], box: tuple[float, ...], width: int, rows: int, *, is_log: bool) -> Any:
    """A curve as offsets of braille characters, shape `(rows, width)`.

    plotext 6.1 ends the process at a NaN; plotext 5.3 and uniplot 0.23 label axes with wrong numbers.
    """
    import numpy as np

    first, last, low, high = box
    steps, values = np.array(curve["steps"], float), np.array(curve["values"], float)
    # So many points that steep lines have no gaps.
    dense_steps = np.linspace(first, last, 8 * rows * width)
    positions = np.concatenate([steps, dense_steps])
    heights = np.concatenate([values, np.interp(dense_steps, steps, values, left=math.nan, right=math.nan)])
    # What leaves the chart is not drawn.
    is_shown = (heights >= low) & (heights <= high)
    positions, heights = positions[is_shown], heights[is_shown]
    if is_log:
        low, high, heights = math.log10(low), math.log10(high), np.log10(heights)
    dots = np.zeros((4 * rows, 2 * width), int)
    row_of_dot = (high - heights) / (high - low or 1) * (4 * rows - 1)
    column_of_dot = (positions - first) / (last - first or 1) * (2 * width - 1)
    dots[row_of_dot.round().astype(int), column_of_dot.round().astype(int)] = 1
    return np.einsum("hrwc,rc->hw", dots.reshape(rows, 4, width, 2), np.array(_DOTS))


def _format_age(now: float, then: float) -> str:
    return f"{format_duration(round(now - then))} ago"
