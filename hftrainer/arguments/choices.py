"""Enumerations: the named values of arguments, and the backends of a search."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from hftrainer.base.messages import LEVELS, command_name
from hftrainer.errors import InvalidArgument, suggest

#: Names of log levels → Python's numbers; 'passive' does not change the level.
LOG_LEVELS = {**LEVELS, "passive": -1}


class ExplicitEnum(str, enum.Enum):
    """A string enumeration whose error names the allowed values and the nearest one.

    Members equal their plain string, and therefore the members of transformers' enumerations. `str()` of a member
    contains the name of the class, as in transformers; `as_text` returns only the string.
    """

    @classmethod
    def _missing_(cls, value: object) -> ExplicitEnum:
        raise InvalidArgument(describe_invalid(value, cls))


def as_text(choice: Any) -> str:
    """A member of an enumeration, ours or transformers', or any other value, as a plain string."""
    return str(getattr(choice, "value", choice))


def describe_invalid(value: object, choices: Iterable[Any], argument: str = "") -> str:
    """An error message about a value that is not among the choices, or only similar to one, of an argument."""
    allowed = [*map(as_text, choices)]
    hint, remedy = suggest(value, allowed), f"Choose one of {', '.join(allowed)}"
    if hint and argument and len(allowed) > 12:
        remedy = f"{command_name()} explain {argument} lists all {len(allowed)}"
    return f"{value!r} is not valid{hint or '.'} {remedy}."


#: The measurements that `observe` selects.
OBSERVE_PARTS = ("speed", "time", "memory", "mfu", "warnings", "journal")


def normalize_observe(value: Any) -> bool | list[str]:
    """`observe` in its normal form: True for all parts, False for none, or their names."""
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or False)
    words = text.replace(",", " ").split()
    return words[0].lower() == "true" if len(words) == 1 and words[0].lower() in ("true", "false") else words


def read_observe(value: Any) -> frozenset[str]:
    """The parts that `observe` names.

    Raises:
        InvalidArgument: for an unknown part.
    """
    parts = normalize_observe(value)
    if isinstance(parts, bool):
        return frozenset(OBSERVE_PARTS if parts else ())
    if unknown := [word for word in parts if word not in OBSERVE_PARTS]:
        hint = suggest(unknown[0], OBSERVE_PARTS, f": use True for all, or some of {', '.join(OBSERVE_PARTS)}.")
        raise InvalidArgument(f"observe has no part {unknown[0]!r}{hint}")
    return frozenset(parts)


def token_counting_mode(value: str | bool) -> str:
    """Which tokens are counted: 'no', 'all' or 'non_padding'. In older releases, the value is True or False."""
    return value if isinstance(value, str) else "all" if value else "no"


def read_address(value: int | str) -> tuple[str, int]:
    """Host and port of `metrics_port`, such as 9400 or '0.0.0.0:9400'. The default host is 127.0.0.1.

    Raises:
        InvalidArgument: if the value is not a port, with or without a host.
    """
    host, _, port = str(value).rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InvalidArgument(
            f"metrics_port={value!r}: use a port from 1 to 65535, such as 9400, or an address and a port, such as "
            "'0.0.0.0:9400'."
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class IntervalStrategy(ExplicitEnum):
    """When something happens during training."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(ExplicitEnum):
    """When a checkpoint is written. 'best' (since v4.47) saves at each new best metric."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(ExplicitEnum):
    """What is uploaded to the Hub, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(ExplicitEnum):
    """Names of learning-rate schedules; `SCHEDULES` in `optimizers/schedules.py` has their functions."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    GREEDY = "greedy"


class OptimizerNames(ExplicitEnum):
    """Names of optimizers, of all releases; `OPTIMIZERS` in `optimizers/factory.py` has their functions."""

    ADAMW_HF = "adamw_hf"
    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAMW_APEX_FUSED = "adamw_apex_fused"
    ADAFACTOR = "adafactor"
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    LOMO = "lomo"
    ADALOMO = "adalomo"
    GROKADAMW = "grokadamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    STABLE_ADAMW = "stable_adamw"


class ParallelMode(enum.Enum):
    """How many processes and devices a training run uses.

    The SageMaker members exist for scripts that compare against them; hftrainer never uses them.
    """

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


class HPSearchBackend(ExplicitEnum):
    """Libraries for hyperparameter search. 'sigopt' was one until v4.57; its service has ended."""

    OPTUNA = "optuna"
    RAY = "ray"
    SIGOPT = "sigopt"
    WANDB = "wandb"


class DebugOption(ExplicitEnum):
    """Debugging aids: the values of the argument `debug`."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"
