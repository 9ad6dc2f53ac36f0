"""Checks of the arguments against DeepSpeed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer_deepspeed.settings import AUTO, BY_HIDDEN_SIZE, INSTALL, OF_SCHEDULE, DeepSpeedConfig

#: Optimizers that need whole parameters or their own modes, but would get flat parts: parts of their names.
_NEED_WHOLE = ("galore", "apollo", "lomo", "schedule_free", "grokadamw", "layerwise")


def check_deepspeed(args: BaseArguments, config: DeepSpeedConfig, lightning_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting that DeepSpeed does not support."""
    if importlib.util.find_spec("deepspeed") is None:
        asked = f"deepspeed={args.deepspeed!r}" if args.deepspeed else "ACCELERATE_USE_DEEPSPEED=true"
        yield f"{asked} needs DeepSpeed, which is not installed: {INSTALL}."
    yield from config.mismatches
    known = (*BY_HIDDEN_SIZE, *OF_SCHEDULE)
    for key in _autos(config.config):
        if key not in known:
            yield f"deepspeed: no argument can fill in {key}='auto': give a value, or leave it out."
    for section, key in (("tensor_parallel", "autotp_size"), ("sequence_parallel_size", ""), ("pipeline", "")):
        value = config.get_value(f"{section}.{key}" if key else section)
        if value not in (None, 0, 1, {}):
            yield (
                f"deepspeed: {section} is not supported yet: leave it out, or use parallelism_config without deepspeed."
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if "optimizer" not in config.config and any(part in optim for part in _NEED_WHOLE):
        yield f"optim={optim!r} needs whole parameters, but deepspeed gives it flat parts: use 'adamw_torch'."
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model=True writes nothing that deepspeed can load: set load_best_model_at_end=False."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True cannot restart DeepSpeed's engine: set per_device_train_batch_size."
    if "precision" in lightning_config:
        yield (
            f"lightning_config['precision']={lightning_config['precision']!r} does not apply to DeepSpeed: set bf16 or "
            "fp16, or their sections in the configuration."
        )
    if lightning_config.get("async_checkpoint"):
        yield (
            "lightning_config['async_checkpoint']=True writes from one process, but deepspeed writes from all: leave "
            "one of them out."
        )


def _autos(node: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{before}{key}.")
        elif value == AUTO:
            yield before + key
