"""DeepSpeed's configuration, completed from the training arguments as HF's Trainer documents it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.errors import WrongConfig, suggest
from hftrainer.parallel.deepspeed.settings import AUTO, DeepSpeedConfig, read_deepspeed

#: Keys of v4.1's documentation → DeepSpeed's current keys.
_RENAMED = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
_GATHER = "stage3_gather_16bit_weights_on_model_save"
#: Keys whose values are sections with keys of their own.
_SECTIONS = (
    "zero_optimization",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "amp",
    "checkpoint",
    "activation_checkpointing",
)


def configure(args: BaseArguments) -> DeepSpeedConfig | None:
    """The configuration completed from the arguments, with its contradictions to them; None without DeepSpeed.

    Raises:
        WrongConfig: if it cannot be read.
    """
    raw = read_deepspeed(args.deepspeed)
    if raw is None:
        return None
    config = DeepSpeedConfig(raw)
    _rename_old(config)
    _check_sections(raw)
    _fill_in_batches(config, args)
    _fill_in_precision(config, args)
    defaults = {field.name: field.default for field in dataclasses.fields(args)}

    def fill_in(key: str, *names: str) -> None:
        values = [getattr(args, name) for name in names]
        unchanged = all(value == defaults[name] for name, value in zip(names, values, strict=True))
        config.fill_in(key, values if len(values) > 1 else values[0], " and ".join(names), is_default=unchanged)

    raw.setdefault("gradient_clipping", AUTO)
    fill_in("gradient_clipping", "max_grad_norm")
    fill_in("optimizer.params.lr", "learning_rate")
    fill_in("optimizer.params.betas", "adam_beta1", "adam_beta2")
    fill_in("optimizer.params.eps", "adam_epsilon")
    fill_in("optimizer.params.weight_decay", "weight_decay")
    if config.get_value("optimizer.params.lr") is None:
        fill_in("scheduler.params.warmup_max_lr", "learning_rate")
    else:
        config.fill_in("scheduler.params.warmup_max_lr", config.get_value("optimizer.params.lr"), "optimizer.params.lr")
    if config.is_auto("scheduler.params.warmup_min_lr"):
        config.fill_in("scheduler.params.warmup_min_lr", 0, "")
    if args.save_on_each_node:
        raw.setdefault("checkpoint", {})["use_node_local_storage"] = True
    raw.setdefault("steps_per_print", float("inf"))  # the Trainer logs
    return config


def _rename_old(config: DeepSpeedConfig) -> None:
    """Rename keys of older documents and releases to the current ones."""
    if "bfloat16" in config.config:
        config.config.setdefault("bf16", config.config.pop("bfloat16"))
    zero = config.config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for old, new in _RENAMED.items():
        if zero.pop(old, False):
            zero.setdefault(new, {"device": "cpu"})
    if (gathers := zero.pop(_GATHER.replace("16bit", "fp16"), None)) is not None:
        zero.setdefault(_GATHER, gathers)
    if zero.get(_GATHER) == AUTO:  # as accelerate fills it in
        zero[_GATHER] = False


def _check_sections(raw: dict[str, Any]) -> None:
    """Raise one error for all sections that are missing, misspelled or malformed."""
    found = [
        f"deepspeed: {name}={raw[name]!r}: it must hold keys and values."
        for name in _SECTIONS
        if name in raw and not isinstance(raw[name], dict)
    ]
    if "zero_optimization" not in raw:
        found.append(
            "deepspeed: zero_optimization is missing: write at least {'stage': 0}, which partitions nothing"
            + suggest("zero_optimization", raw, ".")
        )
    elif isinstance(raw["zero_optimization"], dict):
        stage = raw["zero_optimization"].get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            found.append(f"deepspeed: zero_optimization.stage={stage!r}: it must be 0, 1, 2 or 3.")
    for name in ("optimizer", "scheduler"):
        if isinstance(raw.get(name), dict) and "type" not in raw[name]:
            found.append(f"deepspeed: {name} has no 'type': set it to the name of the {name}.")
    if found:
        raise WrongConfig("\n".join(found))


def _fill_in_batches(config: DeepSpeedConfig, args: BaseArguments) -> None:
    """Fill in the batch sizes of the Trainer, from which DeepSpeed counts steps."""
    steps, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
    whole = args.world_size * size * steps
    for key, value, names in (
        ("train_micro_batch_size_per_gpu", size, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("train_batch_size", whole, "per_device_train_batch_size * gradient_accumulation_steps * processes"),
    ):
        config.config.setdefault(key, AUTO)
        config.fill_in(key, value, names)


def _fill_in_precision(config: DeepSpeedConfig, args: BaseArguments) -> None:
    """Fill in half precision, which the configuration, the arguments or the launcher may set."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    chosen = vars(args).get("_mixed_precision")  # set by the script; overrides the arguments
    asked = {
        name: bool(getattr(args, name) if chosen is None else chosen == name) or getattr(args, f"{name}_full_eval")
        for name in ("bf16", "fp16")
    }
    if chosen is None and not any(asked.values()) and launched in asked:
        asked[launched] = True
    for name, wanted in asked.items():
        if wanted and name not in config.config:
            config.config[name] = {"enabled": True, **({"auto_cast": True} if name == "fp16" else {})}
        config.fill_in(f"{name}.enabled", wanted, name, is_default=not wanted)
    if config.is_true("bf16.enabled") and config.is_true("fp16.enabled"):
        config.mismatches.append(
            f"deepspeed: fp16 and bf16 are both enabled, by the configuration or by fp16={args.fp16} and "
            f"bf16={args.bf16}: choose one."
        )
