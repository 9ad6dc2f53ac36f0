"""What DeepSpeed needs before there is a model: the process group, and that transformers knows the configuration."""

from __future__ import annotations

import importlib
import importlib.util
import os
from datetime import timedelta
from typing import Any

import torch

from hftrainer_lightning.config import WrongConfig
from hftrainer_lightning.processes import Processes

_PEER = "transformers.integrations.deepspeed"


def announced() -> Any:
    """The configuration by which transformers makes models now, or None."""
    if importlib.util.find_spec("transformers") is None:
        return None
    reference = importlib.import_module(_PEER)._hf_deepspeed_config_weak_ref
    return None if reference is None else reference()


def announce(config: Any) -> None:
    """Tell transformers by which configuration models are made; it keeps no reference of its own.

    With ZeRO-3 `from_pretrained` then partitions a model while it is loaded.
    """
    if importlib.util.find_spec("transformers") is None:
        return
    peer = importlib.import_module(_PEER)
    if config is None:
        peer.unset_hf_deepspeed_config()
    else:
        peer.set_hf_deepspeed_config(config)


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
