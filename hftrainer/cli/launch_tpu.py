"""`python -m hftrainer run --tpu [--num-cores N] script.py …`: launching on TPUs."""

from __future__ import annotations

import argparse
import os

from hftrainer.plugins import load


def prepare_torch_tpu(options: argparse.Namespace) -> bool:
    """Let torchrun start the processes, after setting what torch_tpu's all need; returns False without torch_tpu."""
    import torch

    from hftrainer.parallel import tpu

    if not tpu.module.is_available():
        return False
    processes = options.num_cores or tpu.module.device_count()
    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=processes)  # type: ignore[attr-defined]
    options.nproc = str(processes)
    return True


def launch_on_tpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Start a process for each core by torch_xla and wait for them; a single core is used by this process.

    Raises:
        SystemExit: when the script ends with it.
    """
    from hftrainer.parallel import tpu

    if not tpu.has_torch_xla():
        parser.error(f"--tpu needs torch_xla: {tpu.INSTALL}; or {tpu.SUCCESSOR}")
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    torch_xla = load("xla", "devices").load()
    target = (options.script, options.arguments, options.as_module, options.num_cores)
    torch_xla.launch(_run_on_core, target, debug_single_process=options.num_cores == 1)


def _run_on_core(_: int, script: str, arguments: list[str], as_module: bool, cores: int | None) -> None:
    """Run the script on one core."""
    from torch_xla import runtime

    from hftrainer.cli.run import run_script

    if cores not in (None, 1, runtime.local_device_count()):
        raise SystemExit(
            f"--num-cores {cores}: torch_xla uses one core or all, and this machine has {runtime.local_device_count()}."
        )
    run_script(script, arguments, as_module=as_module)
