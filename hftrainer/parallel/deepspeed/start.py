"""Initializes DeepSpeed's communication, before there is a model."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from hftrainer.errors import WrongConfig
from hftrainer.parallel.deepspeed.settings import DeepSpeedConfig
from hftrainer.parallel.processes import Processes


def connect(processes: Processes, device: torch.device, timeout: timedelta, config: DeepSpeedConfig) -> None:
    """Let DeepSpeed use the existing process group.

    Raises:
        WrongConfig: if DeepSpeed has chosen another type of device, or does not know a key of `zero_optimization`.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if (chosen := get_accelerator().device_name()) != device.type:
        raise WrongConfig(
            f"deepspeed: DeepSpeed uses {chosen!r} but the Trainer uses {device.type!r}: set DS_ACCELERATOR="
            f"{device.type} in the environment before Python starts, or choose the device with use_cpu."
        )
    check_keys(config)
    os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))  # DeepSpeed expects it from a launcher
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, verbose=False)


def check_keys(config: DeepSpeedConfig) -> None:
    """Let DeepSpeed check the keys of `zero_optimization`, before there is a model.

    Raises:
        WrongConfig: with DeepSpeed's message.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**config.config["zero_optimization"])
    except ValueError as error:  # pydantic's error is a ValueError
        raise WrongConfig(f"deepspeed: zero_optimization: {error}") from None
