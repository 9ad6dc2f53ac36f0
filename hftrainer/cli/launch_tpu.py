"""`python -m hftrainer run --tpu [--num-cores N] script.py …`: launching through torch_xla."""

from __future__ import annotations

import argparse
import os


def launch_on_tpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Start a process for each core of this machine and wait for them; a single core is used by this process.

    Raises:
        SystemExit: when the script ends with it.
    """
    from hftrainer.parallel.xla import devices as xla

    if not xla.installed():
        parser.error(f"--tpu needs torch_xla: {xla.INSTALL}")
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    import torch_xla

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
