"""Lightning's callbacks and profilers: when their hooks are called, and their private settings and state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer import call

# ---- Hooks ---------------------------------------------------------------------------------------------------------


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, at no cost. Lightning's class opens a generator around every hook."""

    def profile(self, action_name: str) -> Any:
        return NULL_CONTEXT


#: A context that does nothing, made once: a step enters several.
NULL_CONTEXT = contextlib.nullcontext()


def needs_lightning_hooks(pl_trainer: pl.Trainer) -> bool:
    """Whether a callback or a profiler needs the hooks of Lightning's loops. Neither changes while a trainer runs."""
    return bool(pl_trainer.callbacks) or not isinstance(pl_trainer.profiler, NoProfiler)  # type: ignore[attr-defined]


def call_hooks(pl_trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Call a hook of the callbacks, and the module's for a profiler."""
    if needs_lightning_hooks(pl_trainer):
        call._call_callback_hooks(pl_trainer, name, *args)
        call._call_lightning_module_hook(pl_trainer, name, *args)


def copy_profiler(profiler: Any) -> Any:
    """A copy of `profiler` with the same records, for Lightning to attach to a module. A name stays unchanged.

    The user's profiler belongs to the training arguments, which each checkpoint holds and which must not hold a module.
    """
    if not isinstance(profiler, Profiler):
        return profiler
    # copy.copy would drop settings of AdvancedProfiler.
    copy = object.__new__(type(profiler))
    vars(copy).update(vars(profiler))
    return copy


# ---- Settings and state --------------------------------------------------------------------------------------------


def reset_averages(callbacks: Iterable[pl.Callback]) -> None:
    """Reset callbacks that average weights. Lightning would continue an earlier run's count."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            callback._latest_update_step, callback._latest_update_epoch = 0, -1
        elif isinstance(callback, StochasticWeightAveraging):
            callback._initialized, callback._latest_update_epoch, callback._init_n_averaged = False, -1, 0
            callback.n_averaged = callback._swa_scheduler = callback._scheduler_state = None


def release_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Free the averages of a run that has ended: the model holds them, and evaluations use the model."""
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            callback._average_model = None


def checkpoint_state(callback: pl.Callback) -> dict[str, Any]:
    """A callback's state for a checkpoint, without the function of an averaging scheduler.

    The scheduler recreates that function. torch 2.6 keeps it in the scheduler's state, where only unsafe unpickling
    could read it.
    """
    state = callback.state_dict()
    schedule = state.get("scheduler_state") if isinstance(callback, StochasticWeightAveraging) else None
    if schedule is None:
        return state
    return {**state, "scheduler_state": {name: value for name, value in schedule.items() if not callable(value)}}


def starts_at_fraction(swa_callback: StochasticWeightAveraging) -> bool:
    """Whether `swa_epoch_start` is a fraction of the number of epochs, which must then be known."""
    return isinstance(swa_callback._swa_epoch_start, float)


def checks_on_train_epoch_end(early_stopping: EarlyStopping) -> bool:
    """Whether the callback checks its metric at the end of a training epoch, without evaluations."""
    return bool(early_stopping._check_on_train_epoch_end)


def saves_after_evaluations_only(callback: ModelCheckpoint) -> bool:
    """Whether the callback saves neither at the end of a training epoch nor at intervals of steps or time."""
    return not (callback._save_on_train_epoch_end or callback._every_n_train_steps or callback._train_time_interval)


# ---- Pruning -------------------------------------------------------------------------------------------------------


def leaves_masks(pruning: ModelPruning) -> bool:
    """Whether the masks stay in the model, besides the weights, when training ends."""
    return not pruning._make_pruning_permanent


def original_layers(pruning: ModelPruning) -> list[Any]:
    """Copies of the layers before training, to which lottery-ticket pruning resets the weights."""
    return list((pruning._original_layers or {}).values())


def pruned_module(pruning: ModelPruning, index: int) -> torch.nn.Module:
    """The module of the pruned parameter at this index; `original_layers` stores only indices."""
    return pruning._parameters_to_prune[index][0]
