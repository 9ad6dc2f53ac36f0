"""DeepSpeed's configuration: read, checked, and completed from the training arguments by transformers."""

from __future__ import annotations

import base64
import copy
import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, set_hf_deepspeed_config

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.resolved import ResolvedArguments, requested_precision
from hftrainer.base.config_files import describe_text, env_flag, parse_bool, read_config
from hftrainer.errors import InvalidConfig, suggest
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import lightning_engine_module
from hftrainer_deepspeed.start import connect

AUTO = "auto"
#: Arguments whose default a value in the configuration overrides.
_OVERRIDABLE = ("max_grad_norm", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
#: The formula of `train_batch_size`, for error messages.
_TOTAL_BATCH_SIZE = "per_device_train_batch_size * gradient_accumulation_steps * processes"
#: Keys that are filled in when the model and the number of steps are known.
_RUN_KEYS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_num_steps",
)
#: Keys of v4.1's documentation → DeepSpeed's current keys.
_RENAMED = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
_GATHER = "stage3_gather_16bit_weights_on_model_save"
#: Keys whose values are nested objects.
_SECTIONS = (
    *("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "amp"),
    *("checkpoint", "activation_checkpointing"),
)
#: Name parts of optimizers that need full parameters or a train mode; DeepSpeed passes flat shards.
_NEEDS_FULL_PARAMETERS = ("galore", "apollo", "lomo", "schedule_free", "grokadamw", "layerwise")
#: Settings of accelerate's files that DeepSpeed's file has too.
_FILE_SETTINGS = {
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model", "mixed_precision"),
    *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
}


# Also derive from accelerate's class: without DeepSpeed installed, transformers' class does not.
class DeepSpeedConfig(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """A DeepSpeed configuration that transformers completes. It collects contradictions as sentences.

    Args:
        config: the configuration, which is copied.
        default_arguments: arguments that have their defaults.

    Attributes:
        config: the configuration.
        notes: sentences about values that override an argument's default, for the log.
        mismatches: sentences about values that contradict an argument.
    """

    def __init__(self, config: dict[str, Any], default_arguments: frozenset[str] = frozenset()) -> None:
        HfDeepSpeedConfig.__init__(self, config)
        self._default_arguments = default_arguments
        self.notes: list[str] = []
        self.mismatches: list[str] = []

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section of a key such as 'zero_optimization.stage', or None, and the last part of the key."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        if self.is_true("bf16.enabled"):
            return torch.bfloat16
        return torch.float16 if self.is_true("fp16.enabled") else torch.float32

    @property
    def precision(self) -> str:
        """Lightning's name for the precision."""
        return {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}.get(self.dtype(), "32-true")

    def fill_match(self, ds_key_long: str, hf_val: Any, hf_key: str = "", must_match: bool = True) -> None:
        """Replace 'auto' with an argument's value, and compare any other value with it."""
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node or ds_key_long.startswith("amp."):
            return
        if key == "warmup_num_steps":
            # DeepSpeed does not accept a warm-up of 0 steps.
            hf_val = max(1, hf_val)
        elif key == "warmup_max_lr" and (rate := self.get_value("optimizer.params.lr")) is not None:
            hf_val, hf_key = rate, "optimizer.params.lr"
        names = [_TOTAL_BATCH_SIZE] if key == "train_batch_size" else hf_key.split("|")[0].split("+")
        argument, value = " and ".join(names), node[key]
        if value == AUTO:
            node[key] = hf_val
        elif isinstance(hf_val, (int, float)) and not isinstance(value, (int, float)):
            reason = describe_text(value) or "must be a number, true, false or 'auto'"
            self.mismatches.append(f"deepspeed: {ds_key_long}={value!r} {reason}.")
        elif value != hf_val and self._default_arguments.issuperset(names):
            self.notes.append(
                f"deepspeed: {ds_key_long}={value!r} is used instead of the default {argument}={hf_val!r}."
            )
        elif value != hf_val:
            self.mismatches.append(
                f"deepspeed: {ds_key_long}={value!r} contradicts {argument}={hf_val!r}: write 'auto' in the "
                "configuration, or set both to the same value."
            )

    def complete_with_run_values(self, args: Any, model: torch.nn.Module, steps: int) -> DeepSpeedConfig:
        """A copy that is completed with the values of a run.

        Args:
            args: the arguments, for the warm-up.
            model: the model, whose hidden size determines the sizes of buckets.
            steps: optimizer steps of the run.

        Raises:
            InvalidConfig: for values that contradict an argument, or that no argument sets.
        """
        config = DeepSpeedConfig(self.config, self._default_arguments)
        try:
            config.trainer_config_finalize(args, model, steps)
        except (ValueError, AttributeError) as error:
            # transformers raises AttributeError until v4.57, for a model without a config.
            raise InvalidConfig("\n".join(config.mismatches) or f"deepspeed: {error}") from error
        return config


def make_config(args: BaseArguments) -> DeepSpeedConfig | None:
    """Build the configuration from the arguments; None without DeepSpeed. `mismatches` lists contradictions.

    Raises:
        InvalidConfig: if the configuration cannot be read.
    """
    raw = read_deepspeed(args.deepspeed)
    if raw is None:
        return None
    _rename_old_keys(raw)
    _check_sections(raw)
    raw["zero_optimization"].setdefault("stage", 0)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        raw.setdefault(key, AUTO)
    raw.setdefault("gradient_clipping", AUTO)
    # Silence DeepSpeed's own log lines: the Trainer writes them.
    raw.setdefault("steps_per_print", float("inf"))
    values = _collect_values(args)
    for name, section in (("bf16", {}), ("fp16", {"auto_cast": True})):
        if getattr(values, name):
            raw.setdefault(name, {"enabled": True, **section})
    config = DeepSpeedConfig(raw, _find_default_arguments(args, values))
    config.trainer_config_process(values)
    if config.is_true("bf16.enabled") and config.is_true("fp16.enabled"):
        config.mismatches.append(
            f"deepspeed: fp16 and bf16 are both enabled, by the configuration or by fp16={args.fp16} and "
            f"bf16={args.bf16}: choose one."
        )
    return config


def _collect_values(args: BaseArguments) -> SimpleNamespace:
    """The arguments that transformers reads. The script or the launcher sets half precision."""
    names = ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "save_on_each_node")
    requested = requested_precision(args)
    half = {name: requested == name or getattr(args, f"{name}_full_eval") for name in ("bf16", "fp16")}
    # transformers reads these until v4.57.
    apex_values = {"fp16_backend": AUTO, "fp16_opt_level": None}
    values = {name: getattr(args, name) for name in (*names, *_OVERRIDABLE)}
    return SimpleNamespace(**values, **half, **apex_values, bf16_full_eval=False, fp16_full_eval=False)


def _find_default_arguments(args: BaseArguments, values: SimpleNamespace) -> frozenset[str]:
    """Names of arguments with default values, which a configuration may override."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    names = {name for name in (*_OVERRIDABLE, "bf16", "fp16") if getattr(values, name) == defaults[name]}
    return frozenset(names if args.get_warmup_steps(1_000_000) else {*names, "warmup_steps"})


def _rename_old_keys(raw: dict[str, Any]) -> None:
    """Rename keys of older DeepSpeed releases and their documentation to the current keys."""
    if "bfloat16" in raw:
        raw.setdefault("bf16", raw.pop("bfloat16"))
    zero = raw.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for old, new in _RENAMED.items():
        if zero.pop(old, False):
            zero.setdefault(new, {"device": "cpu"})
    if (gather_flag := zero.pop(_GATHER.replace("16bit", "fp16"), None)) is not None:
        zero.setdefault(_GATHER, gather_flag)
    # accelerate also replaces 'auto' with False.
    if zero.get(_GATHER) == AUTO:
        zero[_GATHER] = False


def _check_sections(raw: dict[str, Any]) -> None:
    """Raise one error for all sections that are missing, misspelled or malformed."""
    errors = [
        f"deepspeed: {name}={raw[name]!r}: it must hold keys and values."
        for name in _SECTIONS
        if name in raw and not isinstance(raw[name], dict)
    ]
    if "zero_optimization" not in raw:
        misspelled = next((f"; {key!r} is misspelled." for key in raw if suggest(key, ["zero_optimization"])), ".")
        errors.append(
            f"deepspeed: zero_optimization is missing: write at least {{'stage': 0}}, which shards nothing{misspelled}"
        )
    elif isinstance(raw["zero_optimization"], dict):
        errors += _check_zero(raw["zero_optimization"])
    for name in ("optimizer", "scheduler"):
        if isinstance(raw.get(name), dict) and "type" not in raw[name]:
            errors.append(f"deepspeed: {name} has no 'type': set it to the name of the {name}.")
    if errors:
        raise InvalidConfig("\n".join(errors))


def _check_zero(zero: dict[str, Any]) -> Iterator[str]:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"deepspeed: zero_optimization.stage={stage!r}: it must be 0, 1, 2 or 3."
    for name in _RENAMED.values():
        offload = zero.get(name)
        if isinstance(offload, dict) and not isinstance(device := offload.get("device"), (str, type(None))):
            yield f"deepspeed: zero_optimization.{name}.device={device!r}: choose 'cpu', 'nvme' or 'none'."


def set_up_config(args: BaseArguments) -> DeepSpeedConfig | None:
    """Build the configuration, and pass it to transformers; None without DeepSpeed.

    Models that are created before the Trainer need it. With ZeRO-3 the process group starts now, and
    `from_pretrained` partitions models while it loads them, as long as these arguments exist.
    """
    config = make_config(args)
    if config is None:
        return None
    set_hf_deepspeed_config(config)
    if config.is_zero3():
        lightning_engine_module().start_other_processes(args._rank_info, args.ddp_timeout)
        processes = Processes.from_ranks(args._rank_info)
        processes.connect(args.device, args.ddp_backend, args.ddp_timeout_delta, allow_single_process=True)
        connect(processes, args.device, args.ddp_timeout_delta, config)
    return config


class DeepSpeedPlugin(accelerate.DeepSpeedPlugin):
    """The configuration under accelerate's names: `accelerator.state.deepspeed_plugin`, and `args.deepspeed_plugin`.

    Args:
        config: the configuration.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        super().__init__(hf_ds_config=config)
        self._set_selected(True)

    def _deepspeed_config_checks(self) -> None:
        """Do nothing: `read_deepspeed` has compared the launcher's settings."""


# ---- Checks ---------------------------------------------------------------------------------------------------------


def check_deepspeed(resolved: ResolvedArguments) -> Iterator[str]:
    """Yield an error if the package is missing, and for each setting that DeepSpeed does not support.

    Raises:
        InvalidConfig: if the configuration cannot be read.
    """
    args, lightning_config = resolved.args, resolved.config_or_empty
    if importlib.util.find_spec("deepspeed") is None:
        setting = f"deepspeed={args.deepspeed!r}" if args.deepspeed else "ACCELERATE_USE_DEEPSPEED=true"
        yield f"{setting} needs DeepSpeed, which is not installed: install it with pip install 'hftrainer[deepspeed]'."
    config: DeepSpeedConfig = resolved.deepspeed
    yield from config.mismatches
    if args.elastic:
        yield (
            "elastic=True is not supported with deepspeed, which reads gradient_accumulation_steps when it starts: set "
            "it so that a step keeps its samples. ds_to_universal converts checkpoints for another number of processes."
        )
    if args.param_groups:
        yield (
            "param_groups is not supported with deepspeed, which restores groups by their number: remove it, or use "
            "fsdp."
        )
    yield from _check_config(args, config)
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model=True writes nothing that deepspeed can load: set load_best_model_at_end=False."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True cannot restart DeepSpeed's engine: set per_device_train_batch_size."
    if "precision" in lightning_config:
        yield (
            f"lightning_config['precision']={lightning_config['precision']!r} does not apply to DeepSpeed: set bf16 or "
            "fp16, or their sections in the configuration."
        )
    if args.checkpoint_format == "dcp":
        yield "checkpoint_format='dcp' does not apply to deepspeed, which writes its own shards: remove it."
    if lightning_config.get("async_checkpoint"):
        yield (
            "lightning_config['async_checkpoint']=True writes from one process, but deepspeed writes from all: remove "
            "one of them."
        )


def _check_config(args: BaseArguments, config: DeepSpeedConfig) -> Iterator[str]:
    for key in _find_autos(config.config):
        if key not in _RUN_KEYS:
            yield f"deepspeed: no argument can fill in {key}='auto': set a value, or remove the key."
    for section, key in (("tensor_parallel", "autotp_size"), ("sequence_parallel_size", ""), ("pipeline", "")):
        value = config.get_value(f"{section}.{key}" if key else section)
        if value not in (None, 0, 1, {}):
            yield (
                f"deepspeed: {section} is not supported yet: remove it, or use parallelism_config without deepspeed."
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if "optimizer" not in config.config and any(part in optim for part in _NEEDS_FULL_PARAMETERS):
        yield f"optim={optim!r} needs full parameters, but deepspeed passes flat shards: use 'adamw_torch'."


def _find_autos(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _find_autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield prefix + key


# ---- Reading --------------------------------------------------------------------------------------------------------


def read_deepspeed(source: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Read the configuration from the argument, else from the launcher; None without DeepSpeed.

    Args:
        source: a dict; the path of a JSON or YAML file; JSON, also in base64; or True, for ZeRO-2 with all values from
            the arguments.
        environment: the environment variables, which hold the settings of `accelerate launch --use_deepspeed`.

    Raises:
        InvalidConfig: if the configuration cannot be read.
    """
    if source in (None, "", False):
        return _read_launcher_config(environment)
    if source is True or str(source).lower() == "true":
        return {"zero_optimization": {"stage": 2}}
    if isinstance(source, dict) or os.path.exists(str(source)):
        return copy.deepcopy(read_config(source, "deepspeed"))
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidConfig(f"deepspeed={source!r}: use a dict, the path of a JSON or YAML file, JSON, or True.")
    for decode in (str, lambda text: base64.urlsafe_b64decode(text).decode()):
        try:
            config = json.loads(decode(str(source)))
        except ValueError:
            continue
        if isinstance(config, dict):
            return config
    raise InvalidConfig(
        f"deepspeed={str(source)!r} is neither an existing file nor a JSON object: use one of them, or a dict."
    )


def _read_launcher_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The configuration from `accelerate launch --use_deepspeed`."""
    if not env_flag("ACCELERATE_USE_DEEPSPEED", environment=environment):
        return None
    values = {
        name.removeprefix("ACCELERATE_DEEPSPEED_").lower(): value
        for name, value in environment.items()
        if name.startswith("ACCELERATE_DEEPSPEED_")
    }
    if (path := values.get("config_file", "none")) != "none":
        fields = {field.strip() for field in environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")}
        # As accelerate does.
        if duplicates := sorted(fields & _FILE_SETTINGS):
            raise InvalidConfig(
                f"accelerate's file sets {' and '.join(duplicates)} beside deepspeed_config_file ({path}): set it only "
                "in DeepSpeed's file."
            )
        return read_config(path, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    zero: dict[str, Any] = {"stage": _read_number(environment, "ACCELERATE_DEEPSPEED_ZERO_STAGE", int, 2)}
    for part in ("optimizer", "param"):
        device = values.get(f"offload_{part}_device", "none")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{part}"]["nvme_path"] = values.get(f"offload_{part}_nvme_path")
    if parse_bool(values.get("zero3_save_16bit_model")):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = _read_number(environment, "ACCELERATE_GRADIENT_CLIPPING", float, AUTO)
    other_keys: dict[str, Any] = {} if clipping == AUTO else {"gradient_clipping": clipping}
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    # 1 is the launcher's default. Other values may contradict the argument.
    if steps.isdecimal() and int(steps) > 1:
        other_keys["gradient_accumulation_steps"] = int(steps)
    return {"zero_optimization": zero, **other_keys}


def _read_number(environment: Mapping[str, str], name: str, kind: type, default: Any) -> Any:
    """A number that the launcher sets; the default if it sets none, or 'auto'."""
    text = environment.get(name, "none")
    try:
        return default if text.lower() in ("none", AUTO) else kind(text)
    except ValueError:
        raise InvalidConfig(f"The launcher sets {name}={text!r}: it must be a number, or 'auto'.") from None
