"""`python -m hftrainer ask`: makes a live run save, evaluate, stop, or trace its next steps."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hftrainer.cli.parser import Parser


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "ask",
        help="make a live run save, evaluate, stop, or trace its next steps",
        epilog="example: %(prog)s out save",
        description="Send a request to the run that writes to OUTPUT_DIR: all its processes act after the same step. "
        "'stop' saves first; 'profile' writes a trace of ten steps. Exits with 1 if the run does not answer.",
    )
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="the run's output folder")
    parser.add_argument("request", choices=("save", "evaluate", "stop", "profile"), help="what the run should do")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default: %(default)g")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.errors import InvalidArgument
    from hftrainer.monitoring.journal import check_folder
    from hftrainer.monitoring.page import WatchedRun
    from hftrainer.monitoring.requests import send_request

    if not 0 <= options.timeout <= 86_400:
        parser.error(f"--timeout {options.timeout:g}: use a number of seconds from 0 to 86400")
    try:
        check_folder(options.folder)
    except InvalidArgument as error:
        parser.fail(error)
    reason = ""
    try:
        run = WatchedRun(options.folder).read()
        # Another run without a journal may have started since.
        if run["state"] == "killed" or (run["state"] == "unobserved" and run["step"] >= run["max_steps"]):
            reason = f"the run ended at step {run['step']}"
    # A run that has saved nothing yet raises this error.
    except InvalidArgument:
        reason = "no run has saved anything here yet"
    if reason:
        waits = f"waiting for {options.timeout:g} s, in case a run has started here"
        print(f"{options.folder}: {reason}; {waits}.", file=sys.stderr)
    answer = send_request(options.folder, options.request, options.timeout)
    if answer is None:
        parser.fail(
            f"{options.folder}: no answer within {options.timeout:g} s: no run writes here now (pass the output_dir "
            "of a live run), or a step takes longer (--timeout).",
            status=1,
        )
    print(json.dumps({"answer": answer}) if options.json else f"{options.request}: {answer}")
    parser.exit(1 if answer.startswith("refused") else 0)
