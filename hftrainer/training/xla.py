"""torch_xla's metrics."""

from __future__ import annotations

from hftrainer.plugins import load
from hftrainer.training.trainer_api import TrainerApi


def print_xla_metrics(trainer: TrainerApi) -> None:
    """Print torch_xla's metrics on the main process, if `debug="tpu_metrics_debug"`."""
    args = trainer.args
    if "tpu_metrics_debug" in (args.debug or ()) and args.device.type == "xla" and trainer.is_world_process_zero():
        load("xla", "devices").print_metrics()
