"""Initializes DeepSpeed's communication and checks its configuration, before the model exists."""

from __future__ import annotations

import difflib
import logging
import os
import reprlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from hftrainer.base.config_files import describe_text
from hftrainer.errors import InvalidConfig
from hftrainer.parallel.processes import Processes

logger = logging.getLogger(__name__)


def connect(processes: Processes, device: torch.device, timeout: timedelta, config: Any) -> None:
    """Let DeepSpeed use the existing process group.

    Raises:
        InvalidConfig: if DeepSpeed has chosen another type of device, or refuses a key of the configuration.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if (device_type := get_accelerator().device_name()) != device.type:
        raise InvalidConfig(
            f"deepspeed: DeepSpeed uses {device_type!r} but the Trainer uses {device.type!r}: set DS_ACCELERATOR="
            f"{device.type} in the environment before Python starts, or choose the device with use_cpu."
        )
    check_config(config)
    # DeepSpeed expects this variable from a launcher.
    os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, verbose=False)


def check_config(config: Any) -> None:
    """Let DeepSpeed check its configuration, before the model exists.

    Raises:
        InvalidConfig: for each key that DeepSpeed refuses, with its reason.
    """
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig as Config

    # Without the process group, DeepSpeed cannot check the total batch size against the number of ranks.
    values = {key: value for key, value in config.config.items() if key != "train_batch_size"}
    try:
        Config(dict(values))
    except Exception as error:
        # DeepSpeed raises its own errors, pydantic's, assertions, and errors of plain values.
        batch = {"train_micro_batch_size_per_gpu": 1}
        errors = {key: _find_error(Config, {**batch, key: value}) for key, value in values.items()}
        reasons = [line for key, error in errors.items() if error for line in _explain_error(key, values, error)]
        raise InvalidConfig("\n".join(reasons or [f"deepspeed: {error}: correct the configuration."])) from error
    known_keys = {value for value in vars(constants).values() if isinstance(value, str)}
    for key in values.keys() - known_keys:
        if matches := difflib.get_close_matches(key, known_keys, n=1, cutoff=0.8):
            logger.warning("deepspeed: DeepSpeed ignores the key %r: did you mean %r?", key, matches[0])


def _find_error(parse_config: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Exception | None:
    try:
        parse_config(config)
    except Exception as error:
        return error
    return None


def _explain_error(key: str, config: dict[str, Any], error: Exception) -> Iterator[str]:
    """Yield a sentence for each value below a key that DeepSpeed refuses."""
    advice = "correct the value, or remove the key"
    # Only pydantic's errors have this method.
    details = getattr(error, "errors", None)
    if not callable(details):
        yield f"deepspeed: {key}={reprlib.repr(config[key])} is refused by DeepSpeed ({error}): {advice}."
        return
    for detail in details():
        parts = [str(part) for part in detail["loc"]]
        path = ".".join(parts if parts[:1] == [key] else [key, *parts])
        prefix = f"deepspeed: {path}={reprlib.repr(detail['input'])}"
        if detail["type"] == "extra_forbidden":
            yield f"{prefix}: DeepSpeed has no such key: {advice}."
        else:
            yield f"{prefix} is refused by DeepSpeed ({describe_text(detail['input']) or detail['msg']}): {advice}."
