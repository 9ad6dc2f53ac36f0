"""What DeepSpeed needs before there is a model: its process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from hftrainer.errors import WrongConfig
from hftrainer.parallel.deepspeed.settings import DeepSpeedConfig
from hftrainer.parallel.processes import Processes


def connect(processes: Processes, device: torch.device, timeout: timedelta, config: DeepSpeedConfig) -> None:
    """Let DeepSpeed use the process group that there is.

    Raises:
        WrongConfig: when DeepSpeed has chosen another kind of device, or does not know a key of ZeRO's.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if (chosen := get_accelerator().device_name()) != device.type:
        raise WrongConfig(
            f"deepspeed: DeepSpeed computes on {chosen!r} and the Trainer on {device.type!r}: set DS_ACCELERATOR="
            f"{device.type} in the environment before Python starts, or choose the device with use_cpu."
        )
    check_keys(config)
    os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))  # which DeepSpeed wants of a launcher
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, verbose=False)


def check_keys(config: DeepSpeedConfig) -> None:
    """Let DeepSpeed say what it does not know among ZeRO's keys, before there is a model.

    Raises:
        WrongConfig: with its words.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**config.config["zero_optimization"])
    except ValueError as error:  # pydantic's is one
        raise WrongConfig(f"deepspeed: zero_optimization: {error}") from None
