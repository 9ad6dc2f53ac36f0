"""Initializes DeepSpeed's communication and checks its configuration, before the model exists."""

from __future__ import annotations

import difflib
import logging
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from hftrainer.errors import InvalidConfig
from hftrainer.parallel.config_files import describe_text
from hftrainer.parallel.processes import Processes

logger = logging.getLogger(__name__)


def connect(processes: Processes, device: torch.device, timeout: timedelta, config: Any) -> None:
    """Let DeepSpeed use the existing process group.

    Raises:
        InvalidConfig: if DeepSpeed has chosen another type of device, or refuses a key of the configuration.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if (chosen := get_accelerator().device_name()) != device.type:
        raise InvalidConfig(
            f"deepspeed: DeepSpeed uses {chosen!r} but the Trainer uses {device.type!r}: set DS_ACCELERATOR="
            f"{device.type} in the environment before Python starts, or choose the device with use_cpu."
        )
    check_config(config)
    os.environ.setdefault("LOCAL_RANK", str(processes.local_rank))  # DeepSpeed expects it from a launcher
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, verbose=False)


def check_config(config: Any) -> None:
    """Let DeepSpeed check its configuration, before the model exists.

    Raises:
        InvalidConfig: for each key that DeepSpeed refuses, with its reason.
    """
    from deepspeed.runtime.config import DeepSpeedConfig as Read

    # Without the process group, DeepSpeed cannot check the whole batch size against the number of ranks.
    given = {key: value for key, value in config.config.items() if key != "train_batch_size"}
    try:
        Read(dict(given))
    except Exception as error:  # DeepSpeed's own, pydantic's, assertions, and errors of plain values
        batch = {"train_micro_batch_size_per_gpu": 1}
        alone = {key: _error_of(Read, {**batch, key: value}) for key, value in given.items()}
        found = [line for key, of_key in alone.items() if of_key is not None for line in _reasons(key, given, of_key)]
        raise InvalidConfig("\n".join(found or [f"deepspeed: {error}: correct it."])) from error
    for key, near in _misspelled(given):
        logger.warning("deepspeed: DeepSpeed ignores the key %r: did you mean %r?", key, near)


def _misspelled(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that no part of DeepSpeed reads, with the key that each resembles; DeepSpeed ignores unknown sections."""
    from deepspeed.runtime import constants

    known = {value for value in vars(constants).values() if isinstance(value, str)}
    for key in config.keys() - known:
        if near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            yield key, near[0]


def _error_of(read: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Exception | None:
    try:
        read(config)
    except Exception as error:
        return error
    return None


def _reasons(key: str, config: dict[str, Any], error: Exception) -> Iterator[str]:
    """A sentence for each value that DeepSpeed refuses in the value of a key."""
    what_to_do = "correct it, or leave it out"
    details = getattr(error, "errors", None)  # pydantic's
    if not callable(details):
        yield f"deepspeed: {key}={reprlib.repr(config[key])} is refused by DeepSpeed ({error}): {what_to_do}."
        return
    for detail in details():
        place = [str(part) for part in detail["loc"]]
        path = ".".join(place if place[:1] == [key] else [key, *place])
        shown = f"deepspeed: {path}={reprlib.repr(detail['input'])}"
        if detail["type"] == "extra_forbidden":
            yield f"{shown}: DeepSpeed has no such key: {what_to_do}."
        else:
            yield f"{shown} is refused by DeepSpeed ({describe_text(detail['input']) or detail['msg']}): {what_to_do}."
