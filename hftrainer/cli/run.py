"""`python -m hftrainer run script.py …`: an unmodified Trainer script on Lightning, in one process or in several."""

from __future__ import annotations

import argparse
import functools
import os
import re
import runpy
import sys
import traceback
from types import TracebackType
from typing import Any, NoReturn

from hftrainer.cli.parser import Parser
from hftrainer.plugins import load


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


#: Values of --nproc that torchrun resolves to a number.
_COUNTED = ("auto", "cpu", "gpu")
#: Options passed on to torchrun: name → help text and metavar.
_PASSED = {
    "nnodes": ("machines, 'N' or 'LEAST:MOST'; with the same command on each (default 1)", "N"),
    "node_rank": ("rank of this machine, from 0, if the machines do not determine it themselves", "N"),
    "rdzv_id": ("name of the run, the same on all machines", "NAME"),
    "rdzv_backend": ("how machines find each other: 'c10d', 'etcd-v2', 'static' ...", "NAME"),
    "rdzv_endpoint": ("where machines find each other: HOST:PORT", "HOST:PORT"),
    "master_addr": ("host of machine 0, with --node-rank", "HOST"),
    "master_port": ("a free port on that host", "PORT"),
}
#: Options for how machines find each other.
_MEETING = ("rdzv_endpoint", "master_addr")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of processes. Each may be written with '_' for '-', as for torchrun."""
    group = parser.add_argument_group("several processes", "The options of torchrun, which starts them.")
    spellings = ("--nproc", "--nproc-per-node", "--nproc_per_node")
    group.add_argument(*spellings, type=_processes, metavar="N", help="processes on this machine, or auto, cpu, gpu")
    kinds: dict[str, Any] = {"nnodes": _nodes, "node_rank": _at_least(0), "master_port": _at_least(1)}
    for name, (text, metavar) in _PASSED.items():
        options = [f"--{name.replace('_', '-')}"] + ([f"--{name}"] if "_" in name else [])
        group.add_argument(*options, type=kinds.get(name, str), metavar=metavar, help=text)
    on_tpu = parser.add_argument_group(
        "TPUs", "torch_xla starts the processes, on each host of a pod that runs this; with torch_tpu, torchrun does."
    )
    on_tpu.add_argument("--tpu", action="store_true", help="one process for each TPU core of this machine")
    on_tpu.add_argument(
        "--num-cores", "--num_cores", type=_at_least(1), metavar="N", help="number of cores: 1, or all of this machine"
    )
    group.add_argument(
        "--standalone", action="store_true", help="one machine, at a free port (the default for one machine)"
    )


def is_launch(options: argparse.Namespace) -> bool:
    """Whether any of the options starts processes."""
    return _is_torchrun(options) or options.tpu or options.num_cores is not None


def _is_torchrun(options: argparse.Namespace) -> bool:
    return (
        options.nproc is not None or options.standalone or any(getattr(options, name) is not None for name in _PASSED)
    )


def launch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> NoReturn:
    """Start the processes and wait for them; forward signals to them.

    Raises:
        SystemExit: with 0, with the status of the first process that failed, or with 128 + the number of a signal.
    """
    if wrong := _contradiction(options):
        parser.error(wrong)
    if options.tpu and not prepare_torch_tpu(options):
        launch_on_tpu(parser, options)
        raise SystemExit(0)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_words(options)))
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    raise SystemExit(0)


def _contradiction(options: argparse.Namespace) -> str | None:
    machines = [int(number) for number in (options.nnodes or "1").split(":")]
    meeting = any(getattr(options, name) is not None for name in _MEETING)
    if options.node_rank is not None and options.node_rank >= machines[-1]:
        return f"--node-rank {options.node_rank} must be below --nnodes {options.nnodes or 1}"
    if machines[-1] > 1 and options.standalone:
        return f"--standalone is for one machine, and --nnodes {options.nnodes} asks for more: leave out one of them"
    if machines[-1] > 1 and not meeting:
        return f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank N"
    if options.num_cores is not None and not options.tpu:
        return "--num-cores is for TPUs: add --tpu, or use --nproc for processes on GPUs and CPUs"
    if options.tpu and _is_torchrun(options):
        return "--tpu starts processes by torch_xla, the other options by torchrun: use --tpu or the others"
    if not options.as_module and not os.path.isfile(options.script):
        return f"the script {options.script!r} does not exist"
    return None


def _words(options: argparse.Namespace) -> list[str]:
    """The command line of torchrun."""
    given = {name: value for name in _PASSED if (value := getattr(options, name)) is not None}
    words = [f"--nproc-per-node={options.nproc or 1}"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    if options.standalone or not given:
        words.append("--standalone")
    elif "rdzv_endpoint" in given and "rdzv_backend" not in given:
        words.append("--rdzv-backend=c10d")
    module = ["-m"] if options.as_module else []
    return [*words, "-m", "hftrainer", "run", *module, options.script, *options.arguments]


def _processes(text: str) -> str:
    if text not in _COUNTED and not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number >= 1 nor {', '.join(_COUNTED)}")
    return text


def _nodes(text: str) -> str:
    least, _, most = text.partition(":")
    if not re.fullmatch("[1-9][0-9]*(:[1-9][0-9]*)?", text) or int(least) > int(most or least):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number >= 1 nor LEAST:MOST")
    return text


def _at_least(least: int) -> Any:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number >= {least}")
        return int(text)

    return read


def prepare_torch_tpu(options: argparse.Namespace) -> bool:
    """Let torchrun start the processes, after setting what torch_tpu's all need; returns False without torch_tpu."""
    import torch

    from hftrainer.parallel import devices

    if not devices.torch_tpu.is_available():
        return False
    processes = options.num_cores or devices.torch_tpu.device_count()
    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)  # type: ignore[attr-defined]
    options.nproc = str(processes)
    return True


def launch_on_tpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Start a process for each core by torch_xla and wait for them; a single core is used by this process.

    Raises:
        SystemExit: when the script ends with it.
    """
    from hftrainer.parallel import devices

    if not devices.has_torch_xla():
        parser.error(f"--tpu needs torch_xla: {devices.INSTALL_TORCH_XLA}; or {devices.INSTALL_TORCH_TPU}")
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    torch_xla = load("xla", "devices").load()
    target = (options.script, options.arguments, options.as_module, options.num_cores)
    torch_xla.launch(_run_on_core, target, debug_single_process=options.num_cores == 1)


def _run_on_core(_: int, script: str, arguments: list[str], as_module: bool, cores: int | None) -> None:
    """Run the script on one core."""
    from torch_xla import runtime

    if cores not in (None, 1, runtime.local_device_count()):
        raise SystemExit(
            f"--num-cores {cores}: torch_xla uses one core or all, and this machine has {runtime.local_device_count()}."
        )
    run_script(script, arguments, as_module=as_module)
