"""The command line: `python -m hftrainer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hftrainer.cli import ask, checkpoint, diff, doctor, explain, plot, run, watch
from hftrainer.cli.parser import Parser
from hftrainer.compat.version import __version__
from hftrainer.errors import suggest

_MODULES = (run, explain, doctor, watch, diff, plot, checkpoint, ask)
#: Subcommand → its module.
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def make_parser() -> Parser:
    """The parser with all subcommands; each sets `execute`, which takes its own parser and the parsed options."""
    parser = Parser(
        prog="python -m hftrainer", description="The Hugging Face Trainer API, with PyTorch Lightning as its engine."
    )
    parser.add_argument("--version", action="version", version=f"hftrainer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in COMMANDS.values():
        module.add(commands)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand, a module of `hftrainer.cli`.

    Args:
        words: the command-line arguments; default `sys.argv[1:]`.
    """
    parser = make_parser()
    first = next(iter(sys.argv[1:] if words is None else words), "")
    if not first:
        parser.print_help()
        return
    if hint := suggest(first, COMMANDS) if first not in COMMANDS and not first.startswith("-") else "":
        parser.error(f"{first!r} is not a command{hint}")
    options, remaining = parser.parse_known_args(words)
    if options.command in ("run", "explain"):
        # Options of a script are unknown here: argparse returns those before the first value apart from the rest.
        options.words = remaining + options.words
    elif remaining:
        known = [name for action in options.parser._actions for name in action.option_strings]
        options.parser.error(f"unrecognized arguments: {' '.join(remaining)}{suggest(remaining[0], known)}")
    try:
        options.execute(options.parser, options)
    except BrokenPipeError:  # what reads the output, such as `head`, has ended
        if options.command == "run":
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(1)


if __name__ == "__main__":
    main()
