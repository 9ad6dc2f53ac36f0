"""The small public names of the Trainer: strategies, outputs, seeds and timings."""

from __future__ import annotations

import difflib
import enum
import inspect
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hftrainer.checkpointing.folders import get_last_checkpoint
from hftrainer.checkpointing.names import PREFIX_CHECKPOINT_DIR
from hftrainer.errors import InvalidArgument

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "BestRun",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExplicitEnum",
    "HPSearchBackend",
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "PredictionOutput",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "default_compute_objective",
    "default_hp_space_optuna",
    "default_hp_space_ray",
    "default_hp_space_wandb",
    "denumpify_detensorize",
    "enable_full_determinism",
    "get_last_checkpoint",
    "has_length",
    "is_main_process",
    "number_of_arguments",
    "seed_worker",
    "set_seed",
    "speed_metrics",
    "spelled",
]


class ExplicitEnum(str, enum.Enum):
    """A string enumeration whose error names the allowed values and the nearest one.

    Members equal their plain string, and so the members of transformers' enumerations too. `str()` of one gives what it
    gives in transformers, with the name of the class: `spelled` gives the string alone.
    """

    @classmethod
    def _missing_(cls, value: object) -> ExplicitEnum:
        allowed = [str(member.value) for member in cls]
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(f"{value!r} is not a valid {cls.__name__}: choose one of {', '.join(allowed)}{hint}")


def spelled(choice: Any) -> str:
    """The plain string of a member of an enumeration, ours or transformers'; any other value as text."""
    return str(getattr(choice, "value", choice))


class IntervalStrategy(ExplicitEnum):
    """When something happens during training."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(ExplicitEnum):
    """When a checkpoint is written; 'best' (since v4.47) means at each new best metric."""

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
    """Names of learning-rate schedules."""

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
    """Names of optimizers, of all releases."""

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
    """How many processes and devices one training uses.

    The members named after SageMaker are there for scripts that compare with them: no run here is of that kind.
    """

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


class EvalPrediction:
    """What `compute_metrics` receives.

    Args:
        predictions: the model's outputs, an array of shape `(samples, ...)` or a tuple of them.
        label_ids: the labels, an array of shape `(samples, ...)` or a tuple of them.
        inputs: the model's main input, when `include_for_metrics` asks for it.
        losses: the losses, when `include_for_metrics` asks for them.

    Unpacks and indexes as `(predictions, label_ids[, inputs][, losses])`.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = (predictions, label_ids, *(part for part in (inputs, losses) if part is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"EvalPrediction has {len(self.elements)} elements, there is none at {index}")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns: optimizer steps done, mean loss over them, final metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The best trial of a hyperparameter search.

    Attributes:
        run_id: its checkpoints are in the folder `run-{run_id}` of `output_dir`.
        objective: a number, or one for each direction.
        hyperparameters: what was chosen.
        run_summary: the backend's own summary, where it has one: Ray's `ExperimentAnalysis`; of Optuna see
            `trainer.hp_study`.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


class HPSearchBackend(ExplicitEnum):
    """Libraries that search for hyperparameters; 'sigopt', whose service has ended, until v4.57."""

    OPTUNA = "optuna"
    RAY = "ray"
    SIGOPT = "sigopt"
    WANDB = "wandb"


def is_measured(name: str) -> bool:
    """Whether a metric tells what something cost in time or memory."""
    return (
        name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
        or "_mem_cpu" in name
        or "_mem_gpu" in name
    )


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The loss of an evaluation; if it has other metrics, their sum, without times and memory."""
    others = [value for name, value in metrics.items() if name not in ("eval_loss", "epoch") and not is_measured(name)]
    return sum(others) if others else metrics.get("eval_loss")  # type: ignore[return-value]  # None is refused


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and batch size, suggested by a trial of Optuna."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:  # noqa: ARG001 - the server has not chosen yet
    """A sweep at random over learning rate, epochs, seed and batch size."""
    return {
        "method": "random",
        "parameters": {
            "learning_rate": {"distribution": "uniform", "min": 1e-6, "max": 1e-4},
            "num_train_epochs": {"distribution": "int_uniform", "min": 1, "max": 6},
            "seed": {"distribution": "int_uniform", "min": 1, "max": 40},
            "per_device_train_batch_size": {"values": [4, 8, 16, 32, 64]},
        },
    }


def default_hp_space_ray(trial: Any) -> dict[str, Any]:  # noqa: ARG001 - every hp_space gets one
    """The same as distributions of Ray Tune, which draws from them itself."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.uniform(1, 40),
        "per_device_train_batch_size": tune.choice([4, 8, 16, 32, 64]),
    }


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices); `deterministic` also restricts torch to deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and allow deterministic kernels only.

    Sets the environment variables that CUDA and flash attention read for it.

    Args:
        seed: seed of all generators.
        warn_only: warn about an operation without a deterministic kernel instead of raising.
    """
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:  # noqa: ARG001 - torch gives the id
    """Seed a loading process: the `worker_init_fn` of the training loader."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)


def has_length(dataset: Any) -> bool:
    """Whether `len(dataset)` gives a number."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):
        return False


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Run time in seconds, and samples, steps and tokens per second, since `start_time` (from `time.time()`)."""
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return result
    for name, amount in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if amount is not None:
            result[f"{split}_{name}_per_second"] = round(amount / runtime, 3)
    return result


def denumpify_detensorize(metrics: Any) -> Any:
    """Replace NumPy scalars and one-element tensors by Python numbers, so that metrics can be written as JSON."""
    if isinstance(metrics, (list, tuple)):
        return type(metrics)(denumpify_detensorize(value) for value in metrics)
    if isinstance(metrics, Mapping):
        return type(metrics)({key: denumpify_detensorize(value) for key, value in metrics.items()})  # type: ignore[call-arg]
    if isinstance(metrics, np.generic) or (isinstance(metrics, torch.Tensor) and metrics.numel() == 1):
        return metrics.item()
    return metrics


def number_of_arguments(function: Callable[..., Any]) -> int:
    """How many arguments `function` takes by position; `*args` counts as one, what a `partial` has bound as none."""
    kind = inspect.Parameter
    by_position = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD, kind.VAR_POSITIONAL)
    return sum(parameter.kind in by_position for parameter in inspect.signature(function).parameters.values())


def is_main_process(local_rank: int) -> bool:
    """Whether this is the process that writes and prints, by its local rank (-1: only one process)."""
    return local_rank in (-1, 0)
