"""The subcommands of `python -m hftrainer`."""

from __future__ import annotations

from hftrainer.cli import checkpoint, diff, doctor, explain, plot, run
from hftrainer.cli.parser import Parser
from hftrainer.compat.version import __version__


def make_parser() -> Parser:
    """The parser with all subcommands; each sets `execute`, which takes the parsed options."""
    parser = Parser(
        prog="python -m hftrainer", description="The Hugging Face Trainer API, with PyTorch Lightning as its engine."
    )
    parser.add_argument("--version", action="version", version=f"hftrainer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (run, explain, doctor, diff, plot, checkpoint):
        module.add(commands)
    return parser
