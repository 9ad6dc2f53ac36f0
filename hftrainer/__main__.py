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
    """The parser with all subcommands; each sets `execute`, a function of its parser and the parsed options."""
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
    command = next(iter(sys.argv[1:] if words is None else words), "")
    if not command:
        parser.print_help()
        return
    if hint := suggest(command, COMMANDS) if command not in COMMANDS and not command.startswith("-") else "":
        parser.error(f"{command!r} is not a command{hint}")
    options, remaining = parser.parse_known_args(words)
    if options.command in ("run", "explain"):
        # This parser does not know the script's options: argparse returns those before the first value separately.
        options.words = remaining + options.words
    elif remaining:
        names = [name for action in options.parser._actions for name in action.option_strings]
        options.parser.error(f"unrecognized arguments: {' '.join(remaining)}{suggest(remaining[0], names)}")
    try:
        options.execute(options.parser, options)
    # The process that reads the output, such as `head`, has ended.
    except BrokenPipeError:
        if options.command == "run":
            raise
        # Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
