"""Normalizes and checks the values of arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hftrainer.arguments import choices, old_names
from hftrainer.arguments.accelerate import find_device_mismatch
from hftrainer.arguments.accelerator_config import as_accelerator_config
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.checks import param_group_entries
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.arguments.resolved import ResolvedArguments, asks_for_deepspeed
from hftrainer.arguments.storage_url import separate_storage
from hftrainer.base.config_files import describe_text, parse_bool
from hftrainer.errors import InvalidArgument, InvalidConfig, WrongObject
from hftrainer.plugins import import_adapter
from hftrainer.releases import followed

logger = logging.getLogger(__name__)

#: Names of v4 → current names; both always have the same value.
ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}

#: Schedules that step on an evaluation metric.
_METRIC_BASED = ("reduce_lr_on_plateau", "greedy")
_LAYERWISE = [name.value for name in choices.OptimizerNames if name.value.endswith("layerwise")]


def normalize(args: BaseArguments) -> None:
    """Convert the fields to their normal form.

    These are enums, parsed JSON, lists, and defaults that depend on other fields.

    Raises:
        InvalidArgument: for values that cannot be converted; the error also names those out of range.
    """
    if errors := [*_parse_enums(args), *_parse_json(args)]:
        raise InvalidArgument("\n".join([*errors, *check_ranges(args), *_check_intervals(args)]))
    args.param_groups = param_group_entries.read_entries(args.param_groups)
    _normalize_output_dir(args)
    if args.disable_tqdm is None:
        args.disable_tqdm = logging.getLogger("hftrainer").getEffectiveLevel() > logging.WARNING
    args.include_num_input_tokens_seen = choices.token_counting_mode(args.include_num_input_tokens_seen)
    _normalize_compilation(args)
    choose_start_method(args)
    args.debug = _debug_options(args.debug)
    args.report_to = _as_list(args.report_to)
    args.observe = choices.normalize_observe(args.observe)
    # A command line passes text.
    if isinstance(args.metrics_port, str) and args.metrics_port.isdecimal():
        args.metrics_port = int(args.metrics_port)
    _fill_dependent_defaults(args)
    args.accelerator_config = as_accelerator_config(args.accelerator_config)
    set_accumulation_steps(ResolvedArguments(args))
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if isinstance(value, float) and 1 < value < math.inf and value == int(value):
            setattr(args, name, int(value))


def _normalize_output_dir(args: BaseArguments) -> None:
    if not isinstance(args.output_dir, (str, os.PathLike, type(None))):
        raise InvalidArgument(f"output_dir={args.output_dir!r}: use the path of a folder.")
    args.output_dir = os.path.expanduser(args.output_dir if args.output_dir is not None else "trainer_output")
    separate_storage(args)
    # push_to_hub_organization alone sets 'organization/': add the folder's name.
    if str(args.hub_model_id).endswith("/"):
        args.hub_model_id = f"{args.hub_model_id}{os.path.basename(os.path.normpath(args.output_dir))}"


def _normalize_compilation(args: BaseArguments) -> None:
    if (args.torch_compile_backend or args.torch_compile_mode) and not args.torch_compile:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"


def _fill_dependent_defaults(args: BaseArguments) -> None:
    """Fill in old names, and the defaults that depend on other fields."""
    for old, new in ALIASES.items():
        if getattr(args, new) is None:
            setattr(args, new, getattr(args, old))
        setattr(args, old, getattr(args, new))
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = False
    if args.eval_strategy != choices.IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == choices.IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
        logger.info("eval_steps is not set: using logging_steps=%s.", args.logging_steps)
    _choose_best_metric(args)


def choose_start_method(args: BaseArguments) -> None:
    """Choose fork for loader workers on Apple GPUs, unless the script chose a start method."""
    if torch.backends.mps.is_available() and args.dataloader_num_workers > 1:
        args.dataloader_multiprocessing_context = args.dataloader_multiprocessing_context or "fork"


def add_missing_fields(args: BaseArguments, our_class: type[BaseArguments]) -> None:
    """Set the fields that `args` lack, from their older names or else to our defaults.

    Their own fields and the result of their `to_dict` do not change.

    Args:
        args: the training arguments; instances of `our_class` lack nothing.
        our_class: our class, with all fields.
    """
    if isinstance(args, our_class):
        return
    for field in {**our_class.__dataclass_fields__, **old_names.HIDDEN_FIELDS}.values():
        if field.name not in old_names.FIELDS and not hasattr(args, field.name):
            setattr(args, field.name, _find_missing_value(args, field))
    choose_start_method(args)
    if sentences := old_names.describe_removed_features(args):
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=3)


def _find_missing_value(args: BaseArguments, field: dataclasses.Field[Any]) -> Any:
    """The value of a field that `args` lack."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for old, new in ALIASES.items():
        if new == field.name and hasattr(args, old):
            return getattr(args, old)
    for old, rename in old_names.RENAMED.items():
        if rename.new == field.name and hasattr(args, old):
            return rename.write(default, getattr(args, old))
    return default


def check_values(resolved: ResolvedArguments, *, complete: bool = True) -> list[str]:
    """Error messages for the normalized arguments.

    Args:
        resolved: the arguments.
        complete: whether they are final; if not, scripts and libraries may still set what a run needs.
    """
    args = resolved.args
    values = {name: getattr(args, name, None) for name, kind in _TYPES.items() if kind in ("int", "float")}
    # A script may still convert text such as '1e-5'.
    words = [name for name, value in values.items() if isinstance(value, str) and describe_text(value) is None]
    # transformers refuses a negative number too.
    is_negative = isinstance(args.warmup_steps, (int, float)) and args.warmup_steps < 0
    # The other checks compare numbers.
    return [f"{name}={values[name]!r} is text: use a number." for name in words] or [
        *(_check_run(args) if complete or is_negative else ()),
        *_check_tokens_per_batch(args),
        *_check_mixture(args),
        *_check_divergence(args),
        *_check_loading(args),
        *_check_choices(args),
        *param_group_entries.check_entries(args.param_groups),
        *_check_monitoring(args),
        *_check_intervals(args),
        *_check_best_model(args),
        *_check_precision(args),
        *check_accelerator_config(resolved),
        *_check_configs(resolved),
        *followed.check_release(resolved.config_or_empty),
    ]


def _parse_enums(args: BaseArguments) -> Iterator[str]:
    for name, argument in ARGUMENTS.items():
        if isinstance(argument.choices, type):
            try:
                setattr(args, name, argument.choices(getattr(args, name)))
            except InvalidArgument:
                yield f"{name}: {choices.describe_invalid(getattr(args, name), argument.choices, name)}"


def _parse_json(args: BaseArguments) -> Iterator[str]:
    # Subclasses, such as TRL's, add fields that accept JSON objects to this list.
    for name in dict.fromkeys([*BaseArguments._VALID_DICT_FIELDS, *args._VALID_DICT_FIELDS]):
        if isinstance(value := getattr(args, name), str) and value.lstrip().startswith("{"):
            try:
                setattr(args, name, _convert_strings(json.loads(value)))
            except json.JSONDecodeError as error:
                yield f"{name} is not a valid JSON object: {error}"


def _convert_strings(value: Any) -> Any:
    """Convert numbers and booleans that are strings, as from a command line."""
    if isinstance(value, dict):
        # The release '5.10' is not a number.
        return {name: item if name == "behaviour" else _convert_strings(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def _debug_options(value: Any) -> list[Any]:
    """The options as members of their enumeration. Unknown ones are kept, and `check_values` reports them."""
    members = {option.value: option for option in choices.DebugOption}
    parts = value if isinstance(value, (list, tuple, set)) else [value or ""]
    words = [word for part in parts for word in choices.as_text(part).split()]
    return [members.get(word, word) for word in words]


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None and followed.is_before("5.0"):
        return ["all"]
    if value is None or value == "none" or value == ["none"]:
        return []
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


def _choose_best_metric(args: BaseArguments) -> None:
    if not isinstance(args.metric_for_best_model, (str, type(None))):
        raise WrongObject(f"metric_for_best_model={args.metric_for_best_model!r}: use its name, such as 'eval_loss'.")
    if args.metric_for_best_model is None and (args.load_best_model_at_end or args.lr_scheduler_type in _METRIC_BASED):
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def set_accumulation_steps(resolved: ResolvedArguments) -> None:
    """Set `gradient_accumulation_steps` from `accelerator_config`, if the argument has its default.

    Raises:
        InvalidArgument: if the config cannot be read.
    """
    args, steps = resolved.args, resolved.accelerator_config.num_steps
    if steps is not None and args.gradient_accumulation_steps == 1:
        args.gradient_accumulation_steps = steps


def check_accelerator_config(resolved: ResolvedArguments) -> Iterator[str]:
    """An error message for each conflict of `accelerator_config` with an argument or accelerate's state."""
    args, config = resolved.args, resolved.accelerator_config
    if config.num_steps is not None and args.gradient_accumulation_steps not in (1, config.num_steps):
        yield (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and accelerator_config"
            f"['gradient_accumulation_kwargs']['num_steps']={config.num_steps} contradict each other: set only one. "
            "The `AcceleratorConfig`'s `num_steps` is set but takes the argument's place only if that is 1."
        )
    if config.use_configured_state and (reason := find_device_mismatch(resolved.device)):
        yield f"accelerator_config['use_configured_state']=True: {reason}"


def _check_configs(resolved: ResolvedArguments) -> Iterator[str]:
    """Errors in `lightning_config`, `fsdp` and `deepspeed` that only the arguments cause."""
    try:
        _ = resolved.lightning_config, resolved.fsdp
        if asks_for_deepspeed(resolved.args):
            yield from import_adapter("deepspeed", "settings").check_deepspeed(resolved)
    except InvalidConfig as error:
        yield str(error)


#: Numbers without a minimum in `ARGUMENTS` for which other checks refuse nan.
_CHECKED_NUMBERS = "logging_steps eval_steps save_steps eval_minutes save_minutes divergence_threshold".split()


def check_ranges(args: BaseArguments) -> Iterator[str]:
    """An error message for each number that is out of range, or is not a number."""
    for name, argument in ARGUMENTS.items():
        value: Any = getattr(args, name, None)
        is_number = isinstance(value, (int, float))
        if argument.minimum is None:
            if is_number and math.isnan(value) and name not in _CHECKED_NUMBERS:
                yield f"{name}={value!r}: use a number."
            continue
        upper_bound = math.inf if argument.upper_bound is None else argument.upper_bound
        # This is false for nan.
        is_allowed = is_number and argument.minimum <= value < upper_bound
        if is_allowed or (value is None and argument.default is None):
            continue
        if (reason := describe_text(value)) is not None:
            yield f"{name}={value!r} {reason}."
        else:
            number = "number" if not is_number or math.isfinite(value) else "finite number"
            limit = "" if argument.upper_bound is None else f" and below {argument.upper_bound:g}"
            yield f"{name}={value!r}: use a {number} of at least {argument.minimum:g}{limit}."
    if args.num_train_epochs == math.inf and not args.max_steps > 0:
        yield "num_train_epochs=inf needs max_steps."


#: The types of arguments, noted at import: transformers' HfArgumentParser later replaces them in the fields.
_TYPES = {name: str(field.type).removesuffix(" | None") for name, field in BaseArguments.__dataclass_fields__.items()}


def check_types(args: BaseArguments) -> Iterator[str]:
    """An error message for each argument of another type: text for a number, a float for an integer, ..."""
    for name, kind in _TYPES.items():
        value = getattr(args, name, None)
        if kind in ("int", "float") and (reason := describe_text(value)):
            yield f"{name}={value!r} {reason}."
        elif isinstance(value, str) and value and kind == "bool" and not parse_bool(value):
            yield f"{name}={value!r} is text, which counts as true: write True or False, without quotes."
        elif kind == "bool" and isinstance(value, (list, dict, int, float)) and value not in (0, 1):
            yield f"{name}={value!r}: use True or False."
        elif kind == "int" and isinstance(value, float) and value % 1:
            yield f"{name}={value!r} is a float: use a whole number."
        elif kind == "int" and isinstance(value, float) and value > 0:
            is_unused = name == "per_device_eval_batch_size" and args.eval_strategy == choices.IntervalStrategy.NO
            # For these, transformers fails with a float that has no fraction too.
            if name == "max_steps" or (ARGUMENTS[name].minimum is not None and not is_unused):
                yield f"{name}={value!r} is a float: use a whole number, {value:.0f}."
        elif name.endswith("_kwargs") and value and not isinstance(value, Mapping):
            yield f"{name}={value!r}: use a dict, or the text of a JSON object."
        elif value is None and name in ("num_train_epochs", "max_steps"):
            yield f"{name}=None: use a number."


def _check_run(args: BaseArguments) -> Iterator[str]:
    """Errors in values that only a run needs."""
    yield from check_ranges(args)
    if args.save_strategy == choices.SaveStrategy.BEST and args.metric_for_best_model is None:
        yield "save_strategy='best': `args.metric_for_best_model` must be provided, as it decides which model is best."
    if args.elastic and args.auto_find_batch_size:
        yield "elastic=True keeps the samples of a step, which auto_find_batch_size=True would change: choose one."


def _check_loading(args: BaseArguments) -> Iterator[str]:
    """An error for each setting of loader workers, if there are no workers."""
    if args.dataloader_num_workers == 0:
        for name, default in (("dataloader_prefetch_factor", None), ("dataloader_persistent_workers", False)):
            if getattr(args, name) != default:
                yield f"{name}={getattr(args, name)!r} needs dataloader_num_workers of at least 1; it is 0."


def _check_choices(args: BaseArguments) -> Iterator[str]:
    interval = args.torch_empty_cache_steps
    if interval is not None and not (isinstance(interval, int) and interval > 0):
        yield f"torch_empty_cache_steps={interval!r}: use a whole number of optimizer steps, at least 1, or None."
    for name, argument in ARGUMENTS.items():
        if argument.choices is None or (value := getattr(args, name)) in list(argument.choices):
            continue
        # If the default is None, other objects are accepted, such as a multiprocessing context.
        if argument.default is not None or isinstance(value, str):
            yield f"{name}: {choices.describe_invalid(value, argument.choices, name)}"
    if unknown_options := [option for option in args.debug or () if option not in list(choices.DebugOption)]:
        allowed = " and ".join(option.value for option in choices.DebugOption)
        yield f"debug: unknown {sorted(map(str, unknown_options))}: use {allowed}."
    if isinstance(args.label_names, str):
        yield f"label_names={args.label_names!r} is text: use a list of names, [{args.label_names!r}]."


def _check_monitoring(args: BaseArguments) -> Iterator[str]:
    for name in ("save_minutes", "eval_minutes"):
        if (minutes := getattr(args, name)) is not None and not (isinstance(minutes, (int, float)) and minutes > 0):
            yield f"{name}={minutes!r}: use a number of minutes above 0, or None."
    try:
        choices.read_observe(args.observe)
        if args.metrics_port is not None:
            choices.read_address(args.metrics_port)
    except InvalidArgument as error:
        yield str(error)


def _check_intervals(args: BaseArguments) -> Iterator[str]:
    for kind in ("logging", "eval", "save"):
        if getattr(args, f"{kind}_strategy") != "steps":
            continue
        steps = args.eval_steps or args.logging_steps if kind == "eval" else getattr(args, f"{kind}_steps")
        if not isinstance(steps, (int, float)) or not steps >= 0 or (steps == 0 and kind != "save"):
            yield f"{kind}_steps={steps!r}: {kind}_strategy='steps' needs a number above 0."
        elif steps > 1 and steps % 1:
            yield f"{kind}_steps={steps!r}: use whole optimizer steps, or a fraction of all steps below 1."


def _check_best_model(args: BaseArguments) -> Iterator[str]:
    if not args.load_best_model_at_end or args.save_strategy == choices.SaveStrategy.BEST:
        return
    if args.eval_strategy != args.save_strategy:
        evaluation, saving = choices.as_text(args.eval_strategy), choices.as_text(args.save_strategy)
        both = "both to the same value, or use save_strategy='best'"
        same = f"eval_strategy={saving!r}" if evaluation == "no" else both
        yield (
            f"load_best_model_at_end needs each checkpoint evaluated, but eval_strategy={evaluation!r} and "
            f"save_strategy={saving!r} differ: set {same}."
        )
    elif args.eval_strategy == choices.IntervalStrategy.STEPS and args.eval_steps and not _is_multiple(args):
        is_comparable = (args.save_steps < 1) == (args.eval_steps < 1)
        remedy = "a multiple" if is_comparable else "two whole numbers or two fractions"
        yield (
            f"load_best_model_at_end needs each checkpoint evaluated, but save_steps={args.save_steps} is not a "
            f"multiple of eval_steps={args.eval_steps}: use {remedy}."
        )


def _is_multiple(args: BaseArguments) -> bool:
    save, evaluate = args.save_steps, args.eval_steps
    assert evaluate
    # A fraction and a count are comparable only when the number of steps is known.
    if (save < 1) != (evaluate < 1):
        return False
    # Compare whole numbers, since 0.6 % 0.2 is not 0 in floating point.
    scale = 1_000_000 if save < 1 else 1
    return round(save * scale) % round(evaluate * scale) == 0


def _check_precision(args: BaseArguments) -> Iterator[str]:
    for suffix in ("", "_full_eval"):
        if getattr(args, f"fp16{suffix}") and getattr(args, f"bf16{suffix}"):
            yield f"fp16{suffix} and bf16{suffix} are both set: choose one."
    if args.bf16 and args.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        yield "bf16=True, but this GPU does not support bfloat16: use fp16=True, or use_cpu=True."
    schedule = choices.as_text(args.lr_scheduler_type)
    if schedule in _METRIC_BASED and args.eval_strategy == choices.IntervalStrategy.NO:
        yield f"lr_scheduler_type={schedule!r} needs evaluation metrics: set eval_strategy."


def _check_tokens_per_batch(args: BaseArguments) -> Iterator[str]:
    if args.tokens_per_batch is None:
        return
    setting = f"tokens_per_batch={args.tokens_per_batch}"
    if args.tokens_per_batch < 1:
        yield f"{setting}: use a positive number."
    if args.train_sampling_strategy != "random" or getattr(args, "sortish_sampler", False):
        yield f"{setting} chooses the batches: keep train_sampling_strategy='random', without sortish_sampler."
    for name in ("elastic", "auto_find_batch_size"):
        if getattr(args, name):
            yield f"{setting} makes batches of varying sizes, but {name}=True needs a fixed size: remove one."
    if args.torch_compile and args.flatten_batches:
        yield (
            f"{setting} with flatten_batches=True makes batches of varying shapes, and torch_compile compiles each: "
            "remove one of them."
        )


def _check_mixture(args: BaseArguments) -> Iterator[str]:
    weights = args.mixture_weights
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        yield f"mixture_weights={weights!r}: use a dict, source → weight, or a function of the optimizer step."
    if callable(weights):
        try:
            pickle.dumps(weights)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            yield (
                f"mixture_weights: checkpoints contain the arguments, but this function cannot be pickled ({error}). "
                "Define it with def at the top of a module, not as a lambda or inside a function."
            )
    if weights is not None and args.mixture_temperature != 1:
        yield "mixture_temperature computes the weights from the sizes, but mixture_weights sets them: choose one."
    if not args.mixture_temperature > 0:
        yield f"mixture_temperature={args.mixture_temperature!r}: use a number above 0."


def _check_divergence(args: BaseArguments) -> Iterator[str]:
    threshold = args.divergence_threshold
    if args.on_divergence is None and (threshold is not None or args.max_rollbacks != 3):
        yield "divergence_threshold and max_rollbacks need on_divergence: set it to 'rollback' or 'stop'."
    if args.on_divergence is not None and choices.as_text(args.optim) in ("lomo", "adalomo", *_LAYERWISE):
        yield (
            f"on_divergence={args.on_divergence!r} checks a step before it changes weights, but "
            f"optim={choices.as_text(args.optim)!r} changes them during the backward pass: choose another optim."
        )
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and threshold > 0):
        yield f"divergence_threshold={threshold!r}: use a number of standard deviations above 0, such as 10, or None."
    if args.on_divergence == "rollback":
        if args.auto_find_batch_size:
            yield "on_divergence='rollback' skips batches, which auto_find_batch_size=True would change: choose one."
        if args.ignore_data_skip:
            yield "on_divergence='rollback' continues the epoch's data, but ignore_data_skip restarts it: choose one."
        if args.save_only_model:
            yield "on_divergence='rollback' needs the optimizer's state in checkpoints: set save_only_model=False."
