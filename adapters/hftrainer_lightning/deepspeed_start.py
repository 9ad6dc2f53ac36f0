"""What DeepSpeed needs before there is a model: its process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from hftrainer_lightning.config import WrongConfig
from hftrainer_lightning.processes import Processes


def connect(processes: Processes, device: torch.device, timeout: timedelta) -> None:
    """Let DeepSpeed use the process group that there is.

    Raises:
        WrongConfig: when DeepSpeed has chosen another kind of device.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if (chosen := get_accelerator().device_name()) != device.type:
        raise WrongConfig(
            f"deepspeed: DeepSpeed computes on {chosen!r} and the Trainer on {device.type!r}: set DS_ACCELERATOR="
            f"{device.type} in the environment before Python starts, or choose the device with use_cpu."
        )
    os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))  # which DeepSpeed wants of a launcher
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, verbose=False)
