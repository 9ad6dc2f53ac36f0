"""Lightning's callbacks and profilers: when their hooks are called, their private settings and state, and finders."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.seed import isolate_rng

from hftrainer_lightning.private_api.trainer import quiet_lightning

if TYPE_CHECKING:
    from hftrainer.training.planner import TrialSteps


# ---- Hooks ---------------------------------------------------------------------------------------------------------


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, at no cost. Lightning's class opens a generator around every hook."""

    def profile(self, action_name: str) -> Any:
        return _NULL_CONTEXT


_NULL_CONTEXT = contextlib.nullcontext()


def needs_lightning_hooks(trainer: pl.Trainer) -> bool:
    """Whether a callback or a profiler needs the hooks of Lightning's loops. Neither changes while a trainer runs."""
    return bool(trainer.callbacks) or not isinstance(trainer.profiler, NoProfiler)  # type: ignore[attr-defined]


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Call a hook of the callbacks, and the module's for a profiler."""
    if needs_lightning_hooks(trainer):
        call._call_callback_hooks(trainer, name, *args)
        call._call_lightning_module_hook(trainer, name, *args)


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


# ---- Finders: the names of what they change, and the flag that ends a search without training, are private ---------


class _FinderModule(pl.LightningModule):
    """The module for Lightning's finders, with the attributes that they change between trial steps."""

    def __init__(self, model: torch.nn.Module, trial_steps: TrialSteps, size_name: str, rate_name: str) -> None:
        super().__init__()
        self.model = model
        self._trial_steps = trial_steps
        self._size_name = size_name
        setattr(self, size_name, trial_steps.batch_size)
        setattr(self, rate_name, trial_steps.learning_rate)

    def train_dataloader(self) -> Any:
        """The Trainer's loader, with the batch size to try."""
        return self._trial_steps.make_loader(getattr(self, self._size_name))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer."""
        return self._trial_steps.optimizer()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The Trainer's loss."""
        return self._trial_steps.loss(self.model, batch)


_lightning_logger = logging.getLogger("lightning.pytorch")
#: Builds a `lightning.Trainer` from the plan; keyword arguments override the plan.
TrainerFactory = Callable[..., pl.Trainer]


def search_batch_size(
    make_trainer: TrainerFactory, finder: BatchSizeFinder, trial_steps: TrialSteps, model: torch.nn.Module
) -> int:
    """Size in samples of the largest batch that fits into memory, found by `finder`."""
    argument = finder._batch_arg_name
    finder_module = _FinderModule(model, trial_steps, argument, "learning_rate")
    _run_search(make_trainer, finder, trial_steps, finder_module)
    return int(getattr(finder_module, argument))


def search_learning_rate(
    make_trainer: TrainerFactory, finder: LearningRateFinder, trial_steps: TrialSteps, model: torch.nn.Module
) -> float | None:
    """The learning rate that `finder` suggests; None if it finds none, or with `update_attr=False`.

    The curve is in `finder.optimal_lr` afterwards.
    """
    # Without a name, the finder would choose one.
    _run_search(
        make_trainer,
        finder,
        trial_steps,
        _FinderModule(model, trial_steps, "batch_size", finder._attr_name or "learning_rate"),
    )
    optimal_lr = finder.optimal_lr
    return optimal_lr.suggestion() if optimal_lr is not None and finder._update_attr else None


def _run_search(
    make_trainer: TrainerFactory,
    finder: BatchSizeFinder | LearningRateFinder,
    trial_steps: TrialSteps,
    finder_module: pl.LightningModule,
) -> None:
    """Run `fit` until the finder is done, and restore the random states. Lightning restores model and optimizer."""
    # With this flag, Lightning's Tuner skips training after the search.
    finder._early_exit = True
    with isolate_rng(), quiet_lightning(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
        trainer = make_trainer(max_epochs=-1, callbacks=[finder], gradient_clip_val=trial_steps.max_grad_norm or None)
        level = _lightning_logger.level
        # The Trainer logs the result.
        _lightning_logger.setLevel(logging.WARNING)
        try:
            trainer.fit(finder_module)
        finally:
            _lightning_logger.setLevel(level)
