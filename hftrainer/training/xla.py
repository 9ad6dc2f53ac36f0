"""torch_xla's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrainer.plugins import load

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer


def print_xla_metrics(trainer: Trainer) -> None:
    """Print torch_xla's metrics on the main process, if `debug="tpu_metrics_debug"`."""
    args = trainer.args
    if "tpu_metrics_debug" in (args.debug or ()) and args.device.type == "xla" and trainer.is_world_process_zero():
        load("xla", "devices").print_metrics()
