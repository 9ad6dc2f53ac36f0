"""`python -m hftrainer run script.py …`: an unmodified Trainer script on Lightning."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import Any

from hftrainer.cli.launch import add_options, is_launch, launch
from hftrainer.cli.parser import Parser


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "run",
        help="run an unmodified Trainer script, in one process or in several",
        usage="%(prog)s [--nproc N ...] [-m] SCRIPT [arguments …]",
    )
    add_options(parser)
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(execute=functools.partial(_run, parser))


def _run(parser: Parser, options: argparse.Namespace) -> None:
    if is_launch(options):
        launch(parser, options)
    run_script(options.script, options.arguments, as_module=options.as_module)


def run_script(target: str, arguments: list[str], *, as_module: bool = False) -> None:
    """Run a script as `python` would, with `transformers`' Trainer replaced.

    Its exit code, its exceptions and Ctrl-C pass through; tracebacks begin in the script.

    Args:
        target: path of the script, or with `as_module` the name of a module.
        arguments: the script's arguments, in `sys.argv` after its name.
        as_module: run it as `python -m` would.
    """
    from hftrainer.cli.install import install

    install()
    sys.excepthook = _begin_in_the_script
    sys.argv = [target, *arguments]
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(target):
            raise SystemExit(
                f"hftrainer: the script {target!r} does not exist: give the path of a file, or -m and a module"
            )
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def _begin_in_the_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception without the frames that led to the script."""
    ours = (os.path.dirname(os.path.dirname(__file__)), "<frozen runpy>", runpy.__file__)
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(ours):
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)
