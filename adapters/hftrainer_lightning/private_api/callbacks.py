"""Lightning's callbacks: what they were given and what they have gathered, which they keep to themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)


def begin_anew(callbacks: Iterable[Callback]) -> None:
    """Let callbacks that average weights begin with the run; Lightning has them go on from an earlier one's count."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            callback._latest_update_step, callback._latest_update_epoch = 0, -1
        elif isinstance(callback, StochasticWeightAveraging):
            callback._initialized, callback._latest_update_epoch, callback._init_n_averaged = False, -1, 0
            callback.n_averaged = callback._swa_scheduler = callback._scheduler_state = None


def release_callbacks(callbacks: Iterable[Callback]) -> None:
    """Free the averages of a run that is over: the model has them, and evaluations are of the model."""
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            callback._average_model = None


def state_of(callback: Callback) -> dict[str, Any]:
    """What it says to a checkpoint; of the schedule of averaged weights without its function.

    The schedule makes that function anew. torch 2.6 keeps it in the schedule's state, and only unpickling that can run
    any code reads it back.
    """
    state = callback.state_dict()
    schedule = state.get("scheduler_state") if isinstance(callback, StochasticWeightAveraging) else None
    if schedule is None:
        return state
    return {**state, "scheduler_state": {name: value for name, value in schedule.items() if not callable(value)}}


def begins_at_a_share(averaging: StochasticWeightAveraging) -> bool:
    """Whether `swa_epoch_start` is a share of the epochs, and no epoch: only then must their number be known."""
    return isinstance(averaging._swa_epoch_start, float)


def looks_when_training_ends(stopping: EarlyStopping) -> bool:
    """Whether it looks at the end of a training epoch, and so needs no evaluation."""
    return bool(stopping._check_on_train_epoch_end)


# ---- Pruning -------------------------------------------------------------------------------------------------------


def leaves_masks(pruning: ModelPruning) -> bool:
    """Whether the masks stay in the model, beside the weights, when training ends."""
    return not pruning._make_pruning_permanent


def first_layers(pruning: ModelPruning) -> list[Any]:
    """The layers as they were when training began, to whose values the lottery ticket hypothesis returns."""
    return list((pruning._original_layers or {}).values())


def pruned_module(pruning: ModelPruning, index: int) -> torch.nn.Module:
    """The module of the parameter that Lightning counts as `index`; the layers as they were have only the number."""
    return pruning._parameters_to_prune[index][0]


# ---- Finders -------------------------------------------------------------------------------------------------------


def name_of_batch_size(finder: BatchSizeFinder) -> str:
    """The attribute that it changes from trial to trial."""
    return finder._batch_arg_name


def name_of_learning_rate(finder: LearningRateFinder) -> str:
    """The attribute that it sets; without a name it would look for one of its own choice."""
    return finder._attr_name or "learning_rate"


def is_to_set_the_rate(finder: LearningRateFinder) -> bool:
    """Whether the rate that it finds is to be trained with, rather than suggested."""
    return finder._update_attr


def end_when_found(finder: BatchSizeFinder | LearningRateFinder) -> None:
    """Say that no training is to follow, as Lightning's own Tuner does; there is no other way to say it."""
    finder._early_exit = True
