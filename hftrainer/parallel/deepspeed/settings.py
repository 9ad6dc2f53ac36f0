"""DeepSpeed's configuration: read, and completed from the training arguments, as HF's Trainer documents it."""

from __future__ import annotations

import base64
import copy
import dataclasses
import difflib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.lightning_config import WrongConfig, read_config

if TYPE_CHECKING:
    from hftrainer.training_args import TrainingArguments

AUTO = "auto"
#: How much of a model is gathered at a time, by ZeRO's key → the share of its hidden size, squared or not.
_BY_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
#: Keys of v4.1's documentation → where DeepSpeed has them now.
_RENAMED = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
_GATHER = "stage3_gather_16bit_weights_on_model_save"
#: Keys that hold others.
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
#: Keys that are completed when the length of the run is known.
_OF_SCHEDULE = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
INSTALL = "install it with pip install 'hftrainer[deepspeed]'"


class DeepSpeedConfig:
    """A configuration of DeepSpeed, with the questions that transformers' `HfDeepSpeedConfig` answers.

    Args:
        config: the configuration; it is completed in place.

    Attributes:
        config: the same.
        notes: sentences on values that win over an argument's default, for the log.
        mismatches: sentences on values that contradict an argument.
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
        """Whether a key is set, and true."""
        return bool(self.get_value(ds_key_long)) and not self.is_auto(ds_key_long)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set, and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is left to the arguments."""
        return self.get_value(ds_key_long) == AUTO

    @property
    def stage(self) -> int:
        """ZeRO's stage; 0 without it."""
        return int(self.get_value("zero_optimization.stage", 0))

    def is_zero2(self) -> bool:
        """Whether gradients are partitioned."""
        return self.stage == 2

    def is_zero3(self) -> bool:
        """Whether parameters are partitioned."""
        return self.stage == 3

    def is_offload(self) -> bool:
        """Whether optimizer or parameters are kept in the host's memory or on its disks."""
        return any(self.offloads(what) for what in ("optimizer", "param"))

    def offloads(self, what: str) -> bool:
        """Whether the 'optimizer' or the 'param' are."""
        return self.get_value(f"zero_optimization.offload_{what}.device") in ("cpu", "nvme")

    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    @property
    def precision(self) -> str:
        """The same, in Lightning's words."""
        return {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}.get(self.dtype(), "32-true")

    def settle(self, ds_key_long: str, value: Any, arguments: str, *, is_default: bool = False) -> None:
        """Fill 'auto', and compare what is there.

        Args:
            ds_key_long: the key; nothing happens when it is not there.
            value: what the arguments say.
            arguments: their names.
            is_default: whether nobody has given them, so that the configuration's value is taken.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            return
        if node[key] == AUTO:
            node[key] = value
        elif isinstance(value, (int, float)) and not isinstance(node[key], (int, float)):
            self.mismatches.append(
                f"deepspeed: {ds_key_long}={node[key]!r}: it must be a number, true, false or 'auto'."
            )
        elif node[key] != value and is_default:
            self.notes.append(
                f"deepspeed: {ds_key_long}={node[key]!r} is used, and not the default {arguments}={value!r}."
            )
        elif node[key] != value:
            self.mismatches.append(
                f"deepspeed: {ds_key_long}={node[key]!r} contradicts {arguments}={value!r}: write 'auto' in the "
                "configuration, or give both the same value."
            )

    def completed(
        self, model: torch.nn.Module, steps: int, warmup_steps: int, *, warmup_is_default: bool
    ) -> DeepSpeedConfig:
        """A copy with what only a run knows.

        Args:
            model: the model, whose hidden size decides how much is gathered at a time.
            steps: optimizer steps of the run.
            warmup_steps: those of the warm-up.
            warmup_is_default: whether nobody has asked for a warm-up.

        Raises:
            WrongConfig: for values that contradict an argument, or that nothing can fill in.
        """
        copied = DeepSpeedConfig(copy.deepcopy(self.config))
        copied.settle(_OF_SCHEDULE[0], steps, "the optimizer steps of this run")
        # DeepSpeed takes no warm-up of 0 steps.
        copied.settle(_OF_SCHEDULE[1], max(1, warmup_steps), "warmup_steps", is_default=warmup_is_default)
        if copied.mismatches:
            raise WrongConfig("\n".join(copied.mismatches))
        asked = [key for key in _BY_HIDDEN_SIZE if self.is_auto(key)]
        hidden = _hidden_size(getattr(model, "config", None)) if asked else 0
        for key in asked:
            if hidden is None:
                raise WrongConfig(
                    f"deepspeed: {key}='auto' follows from the hidden_size in model.config, and there is none: give a "
                    "number."
                )
            copied.settle(key, _BY_HIDDEN_SIZE[key](hidden), "hidden_size")
        return copied


def _hidden_size(config: Any) -> int | None:
    """The model's hidden size, or its largest."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes"):
            if (size := getattr(part, name, None)) is not None:
                return max(size) if isinstance(size, (list, tuple)) else int(size)
    return None


# ---- Reading --------------------------------------------------------------------------------------------------------


def read_deepspeed(given: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The configuration that the argument gives, or without it the launcher; None when neither asks for DeepSpeed.

    Args:
        given: a dict; the path of a JSON or YAML file; JSON, also in base64; or True, for ZeRO-2 with all from the
            arguments.
        environment: where `accelerate launch --use_deepspeed` leaves its settings.

    Raises:
        WrongConfig: when it cannot be read.
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
        f"deepspeed={given!r}: there is no such file, and it is no JSON object: give one of them, or a dict."
    )


def _of_launcher(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `accelerate launch --use_deepspeed` asks for."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() not in ("true", "1"):
        return None
    values = {
        name.removeprefix("ACCELERATE_DEEPSPEED_").lower(): value
        for name, value in environment.items()
        if name.startswith("ACCELERATE_DEEPSPEED_")
    }
    if (path := values.get("config_file", "none")) != "none":
        return read_config(path, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    zero: dict[str, Any] = {"stage": int(values.get("zero_stage", "2"))}
    for what in ("optimizer", "param"):
        device = values.get(f"offload_{what}_device", "none")
        if device != "none":
            zero[f"offload_{what}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{what}"]["nvme_path"] = values.get(f"offload_{what}_nvme_path")
    if values.get("zero3_save_16bit_model", "false").lower() == "true":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    own = {} if clipping == "none" else {"gradient_clipping": float(clipping)}
    return {"zero_optimization": zero, **own}


# ---- The arguments --------------------------------------------------------------------------------------------------


def configure(args: TrainingArguments) -> DeepSpeedConfig | None:
    """The configuration completed from the arguments, with what contradicts them; None without DeepSpeed.

    Raises:
        WrongConfig: when it cannot be read.
    """
    raw = read_deepspeed(args.deepspeed)
    if raw is None:
        return None
    config = DeepSpeedConfig(raw)
    _rename_old(config)
    _check_sections(raw)
    _settle_batches(config, args)
    _settle_precision(config, args)
    defaults = {field.name: field.default for field in dataclasses.fields(args)}

    def settle(key: str, *names: str) -> None:
        values = [getattr(args, name) for name in names]
        unchanged = all(value == defaults[name] for name, value in zip(names, values, strict=True))
        config.settle(key, values if len(values) > 1 else values[0], " and ".join(names), is_default=unchanged)

    raw.setdefault("gradient_clipping", AUTO)
    settle("gradient_clipping", "max_grad_norm")
    settle("optimizer.params.lr", "learning_rate")
    settle("optimizer.params.betas", "adam_beta1", "adam_beta2")
    settle("optimizer.params.eps", "adam_epsilon")
    settle("optimizer.params.weight_decay", "weight_decay")
    if config.get_value("optimizer.params.lr") is None:
        settle("scheduler.params.warmup_max_lr", "learning_rate")
    else:
        config.settle("scheduler.params.warmup_max_lr", config.get_value("optimizer.params.lr"), "optimizer.params.lr")
    if config.is_auto("scheduler.params.warmup_min_lr"):
        config.settle("scheduler.params.warmup_min_lr", 0, "")
    if args.save_on_each_node:
        raw.setdefault("checkpoint", {})["use_node_local_storage"] = True
    raw.setdefault("steps_per_print", float("inf"))  # the Trainer logs
    return config


def _rename_old(config: DeepSpeedConfig) -> None:
    """Keys of older documents and releases, in the words of today."""
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
    """Raise for what is misspelled or of another shape than DeepSpeed's, with all that is wrong."""
    found = [
        f"deepspeed: {name}={raw[name]!r}: it must hold keys and values."
        for name in _SECTIONS
        if name in raw and not isinstance(raw[name], dict)
    ]
    if "zero_optimization" not in raw:
        near = difflib.get_close_matches("zero_optimization", raw, n=1)
        hint = f" (did you mean it by {near[0]!r}?)" if near else ""
        found.append(
            f"deepspeed: zero_optimization is missing{hint}: write at least {{'stage': 0}}, which partitions nothing."
        )
    elif isinstance(raw["zero_optimization"], dict):
        stage = raw["zero_optimization"].get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            found.append(f"deepspeed: zero_optimization.stage={stage!r}: it must be 0, 1, 2 or 3.")
    for name in ("optimizer", "scheduler"):
        if isinstance(raw.get(name), dict) and "type" not in raw[name]:
            found.append(f"deepspeed: {name} has no 'type', which names it.")
    if found:
        raise WrongConfig("\n".join(found))


def _settle_batches(config: DeepSpeedConfig, args: TrainingArguments) -> None:
    """Batch sizes are the Trainer's: DeepSpeed counts with them."""
    steps, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
    whole = args.world_size * size * steps
    for key, value, names in (
        ("train_micro_batch_size_per_gpu", size, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
        ("train_batch_size", whole, "per_device_train_batch_size * gradient_accumulation_steps * processes"),
    ):
        config.config.setdefault(key, AUTO)
        config.settle(key, value, names)


def _settle_precision(config: DeepSpeedConfig, args: TrainingArguments) -> None:
    """Half precision is asked for by the configuration, the arguments, or the launcher."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    chosen = vars(args).get("_mixed_precision")  # set by the script, in the place of the arguments
    asked = {
        name: bool(getattr(args, name) if chosen is None else chosen == name) or getattr(args, f"{name}_full_eval")
        for name in ("bf16", "fp16")
    }
    if chosen is None and not any(asked.values()) and launched in asked:
        asked[launched] = True
    for name, wanted in asked.items():
        if wanted and name not in config.config:
            config.config[name] = {"enabled": True, **({"auto_cast": True} if name == "fp16" else {})}
        config.settle(f"{name}.enabled", wanted, name, is_default=not wanted)
    if config.is_true("bf16.enabled") and config.is_true("fp16.enabled"):
        config.mismatches.append(
            f"deepspeed: fp16 and bf16 are both enabled, by the configuration or by fp16={args.fp16} and "
            f"bf16={args.bf16}: choose one."
        )


# ---- What cannot be had ---------------------------------------------------------------------------------------------

#: Optimizers that need whole parameters or modes of their own, and are given flat parts: parts of their names.
_NEED_WHOLE = ("galore", "apollo", "lomo", "schedule_free", "grokadamw", "layerwise")


def limits(args: TrainingArguments, config: DeepSpeedConfig, lightning_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each way in which DeepSpeed cannot be used as it is asked for."""
    if importlib.util.find_spec("deepspeed") is None:
        asked = f"deepspeed={args.deepspeed!r}" if args.deepspeed else "ACCELERATE_USE_DEEPSPEED=true"
        yield f"{asked} needs DeepSpeed, which is not installed: {INSTALL}."
    yield from config.mismatches
    known = (*_BY_HIDDEN_SIZE, *_OF_SCHEDULE)
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
        yield f"optim={optim!r} needs whole parameters, and deepspeed gives it flat parts: use 'adamw_torch'."
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model=True leaves nothing that deepspeed can load: set load_best_model_at_end=False."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True cannot start DeepSpeed's engine again: set per_device_train_batch_size."
    if "precision" in lightning_config:
        yield (
            f"lightning_config['precision']={lightning_config['precision']!r} is not DeepSpeed's: set bf16 or fp16, or "
            "their sections in the configuration."
        )
    if lightning_config.get("async_checkpoint"):
        yield (
            "lightning_config['async_checkpoint']=True writes from one process, and deepspeed from all: leave one of "
            "them out."
        )


def _autos(node: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{before}{key}.")
        elif value == AUTO:
            yield before + key
