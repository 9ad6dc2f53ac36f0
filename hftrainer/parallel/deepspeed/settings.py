"""Reads DeepSpeed's configuration."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.errors import WrongConfig
from hftrainer.parallel.config_files import env_flag, parse_bool, read_config, why_text

AUTO = "auto"
#: ZeRO's keys for sizes of buckets and thresholds → their value for a hidden size.
BY_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
#: Keys that are filled in when the number of steps is known.
OF_SCHEDULE = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
#: Settings of accelerate's files that DeepSpeed's file has too.
_IN_FILES = {
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model", "mixed_precision"),
    *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
}
INSTALL = "install it with pip install 'hftrainer[deepspeed]'"


class DeepSpeedConfig:
    """A DeepSpeed configuration, with the methods of transformers' `HfDeepSpeedConfig`.

    Args:
        config: the configuration; it is completed in place.

    Attributes:
        config: the configuration.
        notes: sentences about values that override an argument's default, for the log.
        mismatches: sentences about values that contradict an argument.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.notes: list[str] = []
        self.mismatches: list[str] = []

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section of a key such as 'zero_optimization.stage', or None, and the last part of the key."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a key."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set and true."""
        return bool(self.get_value(ds_key_long)) and not self.is_auto(ds_key_long)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is 'auto', to be filled in from the arguments."""
        return self.get_value(ds_key_long) == AUTO

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 without ZeRO."""
        return int(self.get_value("zero_optimization.stage", 0))

    def is_zero2(self) -> bool:
        """Whether gradients are partitioned."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Whether parameters are partitioned."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are kept in CPU memory or on disk."""
        return any(self.offloads(what) for what in ("optimizer", "param"))

    def offloads(self, what: str) -> bool:
        """Whether the 'optimizer' states or the parameters ('param') are offloaded."""
        return self.get_value(f"zero_optimization.offload_{what}.device") in ("cpu", "nvme")

    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    @property
    def precision(self) -> str:
        """Lightning's name for the precision."""
        return {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}.get(self.dtype(), "32-true")

    def fill_in(self, ds_key_long: str, value: Any, arguments: str, *, is_default: bool = False) -> None:
        """Replace 'auto' by a value, and compare any other value with it.

        Args:
            ds_key_long: the key; nothing happens if it is missing.
            value: the value from the arguments.
            arguments: names of the arguments.
            is_default: whether the arguments have their defaults, so that the configuration overrides them.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            return
        if node[key] == AUTO:
            node[key] = value
        elif isinstance(value, (int, float)) and not isinstance(node[key], (int, float)):
            reason = why_text(node[key]) or "must be a number, true, false or 'auto'"
            self.mismatches.append(f"deepspeed: {ds_key_long}={node[key]!r} {reason}.")
        elif node[key] != value and is_default:
            self.notes.append(
                f"deepspeed: {ds_key_long}={node[key]!r} is used instead of the default {arguments}={value!r}."
            )
        elif node[key] != value:
            self.mismatches.append(
                f"deepspeed: {ds_key_long}={node[key]!r} contradicts {arguments}={value!r}: write 'auto' in the "
                "configuration, or give both the same value."
            )

    def completed(
        self, model: torch.nn.Module, steps: int, warmup_steps: int, *, warmup_is_default: bool
    ) -> DeepSpeedConfig:
        """A copy, completed with values that are known only in a run.

        Args:
            model: the model, whose hidden size determines the sizes of buckets.
            steps: optimizer steps of the run.
            warmup_steps: optimizer steps of the warm-up.
            warmup_is_default: whether the arguments for the warm-up have their defaults.

        Raises:
            WrongConfig: for values that contradict an argument, or that cannot be filled in.
        """
        copied = DeepSpeedConfig(copy.deepcopy(self.config))
        copied.fill_in(OF_SCHEDULE[0], steps, "the optimizer steps of this run")
        # DeepSpeed does not accept a warm-up of 0 steps.
        copied.fill_in(OF_SCHEDULE[1], max(1, warmup_steps), "warmup_steps", is_default=warmup_is_default)
        if copied.mismatches:
            raise WrongConfig("\n".join(copied.mismatches))
        asked = [key for key in BY_HIDDEN_SIZE if self.is_auto(key)]
        hidden = _hidden_size(getattr(model, "config", None)) if asked else 0
        for key in asked:
            if hidden is None:
                raise WrongConfig(
                    f"deepspeed: {key}='auto' depends on hidden_size in model.config, which is missing: give a number."
                )
            copied.fill_in(key, BY_HIDDEN_SIZE[key](hidden), "hidden_size")
        return copied


def _hidden_size(config: Any) -> int | None:
    """The model's hidden size; the largest if there are several."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            if (size := getattr(part, name, None)) is not None:
                return max(size) if isinstance(size, (list, tuple)) else int(size)
    return None


# ---- Reading --------------------------------------------------------------------------------------------------------


def read_deepspeed(given: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The configuration from the argument, or else from the launcher; None without DeepSpeed.

    Args:
        given: a dict; the path of a JSON or YAML file; JSON, also in base64; or True, for ZeRO-2 with all values from
            the arguments.
        environment: the environment variables, which hold the settings of `accelerate launch --use_deepspeed`.

    Raises:
        WrongConfig: if it cannot be read.
    """
    if given in (None, "", False):
        return _of_launcher(environment)
    if given is True or str(given).lower() == "true":
        return {"zero_optimization": {"stage": 2}}
    if isinstance(given, dict) or os.path.exists(str(given)):
        return copy.deepcopy(read_config(given, "deepspeed"))
    if not isinstance(given, (str, os.PathLike)):
        raise WrongConfig(f"deepspeed={given!r}: give a dict, the path of a JSON or YAML file, JSON, or True.")
    for decode in (str, lambda text: base64.urlsafe_b64decode(text).decode()):
        try:
            config = json.loads(decode(given))
        except ValueError:
            continue
        if isinstance(config, dict):
            return config
    raise WrongConfig(
        f"deepspeed={given!r} is neither an existing file nor a JSON object: give one of them, or a dict."
    )


def _of_launcher(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The configuration from `accelerate launch --use_deepspeed`."""
    if not env_flag("ACCELERATE_USE_DEEPSPEED", environment=environment):
        return None
    values = {
        name.removeprefix("ACCELERATE_DEEPSPEED_").lower(): value
        for name, value in environment.items()
        if name.startswith("ACCELERATE_DEEPSPEED_")
    }
    if (path := values.get("config_file", "none")) != "none":
        _check_fields(environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(","), path)
        return read_config(path, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    zero: dict[str, Any] = {"stage": _number(environment, "ACCELERATE_DEEPSPEED_ZERO_STAGE", int, 2)}
    for what in ("optimizer", "param"):
        device = values.get(f"offload_{what}_device", "none")
        if device != "none":
            zero[f"offload_{what}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{what}"]["nvme_path"] = values.get(f"offload_{what}_nvme_path")
    if parse_bool(values.get("zero3_save_16bit_model")):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = _number(environment, "ACCELERATE_GRADIENT_CLIPPING", float, AUTO)
    own: dict[str, Any] = {} if clipping == AUTO else {"gradient_clipping": clipping}
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps.isdecimal() and int(steps) > 1:  # 1 is what the launcher says of itself; others contradict the argument
        own["gradient_accumulation_steps"] = int(steps)
    return {"zero_optimization": zero, **own}


def _number(environment: Mapping[str, str], name: str, kind: type, default: Any) -> Any:
    """A number that the launcher sets; the default for none, or for 'auto'."""
    text = environment.get(name, "none")
    try:
        return default if text.lower() in ("none", AUTO) else kind(text)
    except ValueError:
        raise WrongConfig(f"The launcher sets {name}={text!r}: it must be a number, or 'auto'.") from None


def _check_fields(fields: list[str], path: str) -> None:
    """Refuse settings in accelerate's file beside those in DeepSpeed's, as accelerate does."""
    if given := sorted({field.strip() for field in fields} & _IN_FILES):
        raise WrongConfig(
            f"accelerate's file sets {' and '.join(given)} beside deepspeed_config_file ({path}): set it in one of the "
            "two, DeepSpeed's file."
        )
