"""`python -m hftrainer ask`: makes a live run save, evaluate, stop, or trace its next steps."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import format_duration
from hftrainer.cli.parser import Parser

if TYPE_CHECKING:
    from hftrainer.monitoring.run_facts import RunFacts

_REQUESTS = ("save", "evaluate", "stop", "profile")


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "ask",
        help="make a live run save, evaluate, stop, or trace its next steps",
        epilog="example: %(prog)s out save",
        description="Send a request to the run that writes to OUTPUT_DIR: all its processes act after the same step. "
        "'stop' saves first, unless save_strategy is 'no'; 'profile' writes a trace of ten steps. Exits with 1 if the "
        "run does not answer.",
    )
    parser.add_argument("folder", metavar="OUTPUT_DIR", type=_read_folder, help="the run's output folder")
    parser.add_argument("request", choices=_REQUESTS, help="what to do")
    parser.set_defaults(missing="name the run's output folder, then what to ask: save, evaluate, stop or profile")
    text = "how long to wait; default: 60, or not at all if the last run has ended according to its files"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=text)


def _read_folder(word: str) -> str:
    """The folder; raises ArgumentTypeError for a request in its place."""
    if word in _REQUESTS:
        raise argparse.ArgumentTypeError(f"the output folder comes before the request: ask OUTPUT_DIR {word}")
    return word


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.errors import InvalidArgument
    from hftrainer.monitoring.journal import check_folder
    from hftrainer.monitoring.run_facts import WatchedRun
    from hftrainer.monitoring.run_requests import send_request

    folder, timeout = options.folder, 60.0 if options.timeout is None else options.timeout
    if not 0 <= timeout <= 86_400:
        parser.error(f"--timeout {timeout:g}: use a number of seconds from 0 to 86400")
    try:
        check_folder(folder)
    except InvalidArgument as error:
        parser.fail(error)
    try:
        end = _describe_end(WatchedRun(folder).read())
    # A run that has saved nothing yet raises this error.
    except InvalidArgument:
        end = None
        print(f"{folder}: no run has saved anything here yet; waiting for {timeout:g} s.", file=sys.stderr)
    if end is not None and options.timeout is None:
        advice = "If another run without observe=True has started here since, wait for its answer with --timeout 60."
        parser.fail(f"{folder}: {end}, so there is no run to ask. {advice}", status=1)
    answer = send_request(folder, options.request, timeout)
    if answer is None:
        problem = f"{folder}: no answer within {timeout:g} s: {end or 'no run writes here now'}"
        parser.fail(f"{problem} (pass the output_dir of a live run), or a step takes longer (--timeout).", status=1)
    print(json.dumps({"answer": answer}) if options.json else f"{options.request}: {answer}")
    parser.exit(1 if answer.startswith("refused") else 0)


def _describe_end(facts: RunFacts) -> str | None:
    """How and when the run ended, according to its journal or newest checkpoint; None if it may be live."""
    if facts.state in ("running", "silent", "unobserved"):
        return None
    how = {"killed": "was killed after", "complete": "completed at"}.get(facts.state, f"ended ({facts.reason}) at")
    age = f", {format_duration(round(time.time() - facts.updated))} ago" if facts.updated else ""
    return f"the run {how} step {facts.step:,}{age}"
