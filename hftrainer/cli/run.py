"""`python -m hftrainer run script.py …`: runs an unmodified Trainer script on Lightning, in one or more processes."""

from __future__ import annotations

import argparse
import functools
import glob
import logging
import os
import re
import runpy
import sys
import traceback
from collections.abc import Collection
from types import TracebackType
from typing import Any, NoReturn

from hftrainer.base.messages import DIM, TRACEBACK_VARIABLE, paint, print_interrupt_notes, wrap_text
from hftrainer.cli.parser import Parser
from hftrainer.errors import suggest
from hftrainer.plugins import import_adapter

_USAGE = "%(prog)s [--nproc N ...] [-m] SCRIPT [arguments …]\n       %(prog)s --tpu [-m] SCRIPT [arguments …]"
#: torchrun's options for how machines find each other. Without any, one machine uses a free port.
_RENDEZVOUS = {"nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port"}
_HELP = """\
Run an unmodified Trainer script on Lightning, in this process or in several.
What follows SCRIPT is for the script.

  -m             SCRIPT is the name of a module, as for python -m
  --nproc N      how many processes torchrun starts, or auto, cpu, gpu, xpu
  --tpu          one process per TPU core of this machine; on a pod, run this
                 on each host
  --num-cores N  with --tpu: 1 core, or all cores of this machine
  -h, --help     show this help message

Torchrun's options are accepted too, such as --nnodes N and --rdzv-endpoint HOST;
torchrun --help lists them.
"""
#: torchrun's names of the options that say which program to start.
_SCRIPT = ("module", "training_script", "training_script_args")


def add_subcommand(commands: Any) -> None:
    """Add the subcommand. It has torchrun's options, but imports their parser only if one is used."""
    text = "run an unmodified Trainer script, in one or more processes"
    parser = commands.add_parser("run", help=text, usage=_USAGE, description=_HELP, add_help=False)
    parser.epilog = f"example: {parser.prog} --nproc 2 train.py --learning_rate 3e-5"
    parser.add_argument("script_words", nargs=argparse.REMAINDER)


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    if options.script_words[:1] in (["-h"], ["--help"]):
        print(f"{parser.format_usage()}\n{_HELP}\n{parser.epilog}")
        return
    as_module = options.script_words[:1] == ["-m"]
    script, *arguments = options.script_words[as_module:] or [""]
    if script.startswith("-"):
        launch(parser, options.script_words)
    if not script:
        parser.error("a script is missing")
    check_script(parser, script, as_module=as_module)
    run_script(script, arguments, parser.prog, as_module=as_module)


def check_script(parser: Parser, script: str, *, as_module: bool) -> None:
    """Exit with an error if the script is not a file. Modules are not checked here."""
    if not as_module and not os.path.isfile(script):
        problem = "is not a file" if os.path.exists(script) else "does not exist"
        scripts = glob.glob(os.path.join(glob.escape(os.path.dirname(script)), "*.py"))
        hint = suggest(script, scripts, ": pass the path of a file, or -m and a module")
        parser.fail(f"the script {script!r} {problem}{hint}")


def run_script(target: str, arguments: list[str], prog: str, *, as_module: bool = False) -> None:
    """Run a script as `python` would, but with our Trainer in `transformers`.

    Exit codes, exceptions and Ctrl-C propagate. Tracebacks start in the script.

    Args:
        target: path of the script, or with `as_module` the name of a module.
        arguments: the script's arguments, in `sys.argv` after its name.
        prog: the command, for the error if the module does not exist.
        as_module: run it as `python -m` would.
    """
    from hftrainer.parallel.environment import find_rank_info

    sys.excepthook = _print_early_traceback
    # The ranks have the same warnings of torch's C++ code, which reads this variable when it is imported.
    if find_rank_info({}, int).rank:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    elif sys.stderr.isatty():
        print(paint(f"[hftrainer] Loading torch and transformers for {target}", DIM, sys.stderr), file=sys.stderr)
    from hftrainer.cli.install import install

    install()
    sys.excepthook = functools.partial(_print_script_traceback, script=target)
    if find_rank_info({}, int).world_size > 1:
        from hftrainer.parallel.rank_errors import show_errors_once

        show_errors_once()
    sys.argv = [target, *arguments]
    if as_module:
        sys.path[0] = os.getcwd()
        try:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        except ImportError as error:
            # An import inside the module has a frame.
            if _script_frames(error.__traceback__) is not None:
                raise
            Parser(prog=prog).fail(error if "is a package" in str(error) else f"no module named {target!r}")
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def _print_script_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, script: str = ""
) -> None:
    """Print an uncaught exception without the frames outside the script, and of a Ctrl-C only the script's line."""
    from hftrainer.parallel.environment import find_rank_info

    # The first rank's training notes below a Ctrl-C what is saved.
    if print_interrupt_notes(error) or (isinstance(error, KeyboardInterrupt) and find_rank_info({}, int).rank):
        return
    if isinstance(error, KeyboardInterrupt) and os.environ.get(TRACEBACK_VARIABLE) != "full":
        lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
        print(f"\nInterrupted in line {lines[-1]} of {script}." if lines else "\nInterrupted.", file=sys.stderr)
        return
    # A script that cannot be parsed has no frame.
    traceback.print_exception(kind, error, _script_frames(trace) or (None if issubclass(kind, SyntaxError) else trace))


def _print_early_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception from before the script begins, and of a Ctrl-C only that."""
    if isinstance(error, KeyboardInterrupt) and os.environ.get(TRACEBACK_VARIABLE) != "full":
        print("\nInterrupted before the script began.", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames before the script; None if it has no other."""
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    before = (os.path.dirname(os.path.dirname(__file__)), "<frozen ", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(before):
        trace = trace.tb_next
    return trace


class _Launcher(Parser):
    """A parser of torchrun's options and ours."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; the name of torchrun's argument is not shown."""
        super().error("a script is missing" if "training_script" in message else message)


def launch(parser: Parser, words: list[str]) -> NoReturn:
    """Start the processes, forward signals to them, and wait for them.

    Raises:
        SystemExit: with 0, with the status of the first process that failed, or with 128 + the number of a signal.
    """
    # Ctrl-C may come during the import.
    sys.excepthook = _print_early_traceback
    from torch.distributed.run import get_args_parser

    launcher = _Launcher(
        prog=parser.prog, usage=_USAGE, parents=[get_args_parser()], add_help=False, epilog=parser.epilog
    )
    launcher.add_argument("--nproc", dest="nproc_per_node", default=argparse.SUPPRESS)
    launcher.add_argument("--tpu", action="store_true")
    launcher.add_argument("--num-cores", "--num_cores", type=int, metavar="N")
    defaults = vars(launcher.parse_args(["SCRIPT"]))
    # An unknown option is named even if the script, or the last option's value, is missing.
    if unknown := launcher.parse_known_args([*words, "SCRIPT", "SCRIPT"])[1]:
        launcher.refuse(unknown[0])
    # argparse keeps the value of an existing attribute, so an option that is still None was not set.
    parsed = launcher.parse_args(words, argparse.Namespace(**dict.fromkeys(defaults)))
    set_options = {name: value for name, value in vars(parsed).items() if value is not None}
    options = argparse.Namespace(**{**defaults, **set_options})
    if error := _find_option_error(options, set_options):
        parser.error(error)
    on_tpu, cores = (vars(options).pop(name) for name in ("tpu", "num_cores"))
    script, arguments, as_module = options.training_script, options.training_script_args, options.module
    check_script(parser, script, as_module=as_module)
    if on_tpu and not prepare_torch_tpu(options, cores):
        launch_on_tpu(parser, script, arguments, as_module, cores)
        raise SystemExit(0)
    options.standalone |= set_options.keys().isdisjoint(_RENDEZVOUS)
    if "rdzv_endpoint" in set_options and "rdzv_backend" not in set_options:
        options.rdzv_backend = "c10d"
    if options.nproc_per_node.isdecimal() and int(options.nproc_per_node) > 1:
        # Torchrun would set this too, with a warning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.module, options.training_script = True, "hftrainer"
    options.training_script_args = ["run", *(["-m"] if as_module else []), script, *arguments]
    run_torchrun(options)


def run_torchrun(options: argparse.Namespace) -> NoReturn:
    """Start processes with torchrun, and exit with their status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    # Torchrun's variable for the level of its messages.
    if "LOGLEVEL" not in os.environ:
        # The processes say why they end, and the line below which was the first.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status, name = failure.exitcode, failure.signal_name()
        how = f"by {name}" if status < 0 else f"with status {status}"
        hint = ", as when the memory is full" if name == "SIGKILL" else ""
        print(wrap_text(f"[hftrainer] Rank {rank} ended first, {how}{hint}.", sys.stderr), file=sys.stderr)
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    raise SystemExit(0)


def _find_option_error(options: argparse.Namespace, set_options: Collection[str]) -> str | None:
    """The first error in the options that torchrun would miss or explain badly."""
    nodes = re.fullmatch("([1-9][0-9]*)(?::([1-9][0-9]*))?", options.nnodes)
    min_nodes, max_nodes = (int(nodes[1]), int(nodes[2] or nodes[1])) if nodes else (1, 0)
    if min_nodes > max_nodes:
        return f"--nnodes {options.nnodes} is neither a number >= 1 nor MIN:MAX"
    if not re.fullmatch("[1-9][0-9]*|auto|cpu|gpu|xpu", options.nproc_per_node):
        return f"--nproc {options.nproc_per_node} is neither a number >= 1 nor auto, cpu, gpu or xpu"
    if not 0 <= options.node_rank < max_nodes:
        return f"--node-rank {options.node_rank} must be at least 0, and below --nnodes {options.nnodes}"
    if max_nodes > 1 and options.standalone:
        return f"--standalone is for one machine, but --nnodes {options.nnodes} asks for more: remove one of them"
    if max_nodes > 1 and "rdzv_endpoint" not in set_options and "master_addr" not in set_options:
        return f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank N"
    if options.num_cores is not None and not options.tpu:
        return "--num-cores is for TPUs: add --tpu, or use --nproc for processes on GPUs and CPUs"
    if options.num_cores is not None and options.num_cores < 1:
        return f"--num-cores {options.num_cores} is not a number >= 1"
    if options.tpu and not {"tpu", "num_cores", *_SCRIPT}.issuperset(set_options):
        return "--tpu starts processes with torch_xla; the other options configure torchrun: remove one or the other"
    return None


def prepare_torch_tpu(options: argparse.Namespace, cores: int | None) -> bool:
    """Prepare the environment and options for torchrun with torch_tpu; False if it is not installed."""
    import torch

    from hftrainer.parallel import devices

    if not devices.torch_tpu.is_available():
        return False
    processes = cores or devices.torch_tpu.device_count()
    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)  # type: ignore[attr-defined]
    options.nproc_per_node = str(processes)
    return True


def launch_on_tpu(parser: Parser, script: str, arguments: list[str], as_module: bool, cores: int | None) -> None:
    """Start one process per core with torch_xla, and wait for them.

    With one core, the script runs in this process.

    Raises:
        SystemExit: if the script raises it.
    """
    from hftrainer.parallel import devices

    if not devices.has_torch_xla():
        parser.error(f"--tpu needs torch_xla: {devices.INSTALL_TORCH_XLA}; or {devices.INSTALL_TORCH_TPU}")
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    target = (script, arguments, parser.prog, as_module, cores)
    import_adapter("xla", "devices").import_torch_xla().launch(_run_on_core, target, debug_single_process=cores == 1)


def _run_on_core(_: int, script: str, arguments: list[str], prog: str, as_module: bool, cores: int | None) -> None:
    """Run the script on one TPU core."""
    from torch_xla import runtime

    if cores not in (None, 1, runtime.local_device_count()):
        raise SystemExit(
            f"--num-cores {cores}: torch_xla uses one core or all, and this machine has {runtime.local_device_count()}."
        )
    run_script(script, arguments, prog, as_module=as_module)
