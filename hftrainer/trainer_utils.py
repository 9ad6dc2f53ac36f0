"""Public utilities of the Trainer: enumerations, outputs, seeds and timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hftrainer.arguments.choices import (
    ExplicitEnum as ExplicitEnum,
    HPSearchBackend as HPSearchBackend,
    HubStrategy as HubStrategy,
    IntervalStrategy as IntervalStrategy,
    SaveStrategy as SaveStrategy,
    SchedulerType as SchedulerType,
)
from hftrainer.base.nested import nested_apply
from hftrainer.base.signatures import number_of_arguments as number_of_arguments
from hftrainer.callbacks.state import is_measurement
from hftrainer.checkpointing.layout import PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR
from hftrainer.checkpointing.run_checkpoints import get_last_checkpoint as get_last_checkpoint
from hftrainer.compat.libraries import has_length as has_length
from hftrainer.data.randomness import (
    enable_full_determinism as enable_full_determinism,
    seed_worker as seed_worker,
    set_seed as set_seed,
)


class EvalPrediction:
    """The input of `compute_metrics`.

    Args:
        predictions: the model's outputs, an array of shape `(samples, ...)` or a tuple of them.
        label_ids: the labels, an array of shape `(samples, ...)` or a tuple of them.
        inputs: the model's main input, if `include_for_metrics` contains 'inputs'.
        losses: the losses, if `include_for_metrics` contains 'loss'.

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
            raise IndexError(f"EvalPrediction has {len(self.elements)} elements; index {index} is out of range")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """The result of `Trainer.evaluation_loop`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`: number of optimizer steps, mean loss, and final metrics."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The best trial of a hyperparameter search.

    Attributes:
        run_id: the id of the trial, whose checkpoints are in `run-{run_id}` in `output_dir`.
        objective: a number, or one number per direction.
        hyperparameters: the values of the hyperparameters.
        run_summary: Ray's `ExperimentAnalysis`; None for other backends. `trainer.hp_study` has Optuna's study.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The sum of the evaluation metrics except loss, epoch, times and memory; otherwise the loss."""
    values = [
        value for name, value in metrics.items() if name not in ("eval_loss", "epoch") and not is_measurement(name)
    ]
    # Callers reject None.
    return sum(values) if values else metrics.get("eval_loss")  # type: ignore[return-value]


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and batch size that an Optuna trial suggests."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_hp_space_wandb(trial: Any) -> dict[str, Any]:  # noqa: ARG001 - the server has not chosen values yet
    """The configuration of a random sweep over learning rate, epochs, seed and batch size."""
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
    """Ray Tune's distributions of learning rate, epochs, seed and batch size."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.uniform(1, 40),
        "per_device_train_batch_size": tune.choice([4, 8, 16, 32, 64]),
    }


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` (from `time.time()`), and samples, steps and tokens per second."""
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return result
    for name, amount in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
        if amount is not None:
            result[f"{split}_{name}_per_second"] = round(amount / runtime, 3)
    return result


def denumpify_detensorize(metrics: Any) -> Any:
    """Convert NumPy scalars and one-element tensors to Python numbers, for JSON."""
    return nested_apply(_as_number, metrics)


def _as_number(leaf: Any) -> Any:
    is_number = isinstance(leaf, np.generic) or (isinstance(leaf, torch.Tensor) and leaf.numel() == 1)
    return leaf.item() if is_number else leaf


def is_main_process(local_rank: int) -> bool:
    """Whether a local rank is that of a main process; -1 means a single process."""
    return local_rank in (-1, 0)
