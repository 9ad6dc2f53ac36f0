"""`python -m hftrainer run script.py …`: an unmodified Trainer script on Lightning."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType

from hftrainer.cli.install import install


def run_script(target: str, arguments: list[str], *, as_module: bool = False) -> None:
    """Run a script as `python` would, with `transformers`' Trainer replaced.

    Its exit code, its exceptions and Ctrl-C pass through; tracebacks begin in the script.

    Args:
        target: path of the script, or with `as_module` the name of a module.
        arguments: the script's arguments, in `sys.argv` after its name.
        as_module: run it as `python -m` would.
    """
    install()
    sys.excepthook = _begin_in_the_script
    sys.argv = [target, *arguments]
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(target):
            raise SystemExit(f"hftrainer run: the script {target!r} does not exist")
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def _begin_in_the_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception without the frames that led to the script."""
    ours = (os.path.dirname(os.path.dirname(__file__)), "<frozen runpy>", runpy.__file__)
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(ours):
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)
