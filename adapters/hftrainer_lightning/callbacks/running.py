"""Support for Lightning's callbacks beyond hooks: their weights and states in checkpoints, and schedules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from hftrainer.compat.reading import fitting
from hftrainer_lightning import private_api
from hftrainer_lightning.callbacks.pruning import keep_pruning, restore_pruning

if TYPE_CHECKING:
    from hftrainer.strategies.strategy import Strategy
    from hftrainer_lightning.hooks import RunHooks
    from hftrainer_lightning.module import TrainerModule

#: Lightning's own keys in a checkpoint; all others come from callbacks.
_KEPT_ELSEWHERE = ("state_dict", "epoch", "global_step")
#: Callbacks that search for a setting before training, and do not run during it.
FINDERS = (BatchSizeFinder, LearningRateFinder)
#: Callbacks that run during training only.
OF_TRAINING = (StochasticWeightAveraging, WeightAveraging)
#: Callbacks that change weights when an epoch ends: after the checkpoint of its last step.
_AT_EPOCH_END = (ModelPruning, WeightAveraging)
_HOOKS = [name for name in vars(Callback) if name.startswith("on_") and name != "on_fit_start"]
#: Prefix of the user's model in the generated module's state dict.
_PREFIX = "model."


def is_lightning_callback(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning callback, as an instance or as a class."""
    return issubclass(candidate, Callback) if isinstance(candidate, type) else isinstance(candidate, Callback)


def has_progress_bar(callbacks: Iterable[Callback]) -> bool:
    """Whether one of the callbacks shows a progress bar."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def check_callbacks(callbacks: Sequence[Callback], **run: Any) -> list[str]:
    """An error message for each callback that cannot work; keywords as in `_refusal`."""
    found = [reason for callback in callbacks if (reason := _refusal(callback, **run)) is not None]
    if first_of(callbacks, ModelPruning) and first_of(callbacks, WeightAveraging):
        found.append("ModelPruning changes the parameters that weight averaging averages: use only one of them.")
    return found


def _refusal(
    callback: Callback,
    *,
    accumulate_grad_batches: int,
    finds_batch_size: bool,
    evaluates: bool,
    automatic_optimization: bool,
    knows_epochs: bool,
    several: bool,
    strategy: Strategy,
) -> str | None:
    """Why a callback cannot work with the arguments of the run; None when it can.

    Args:
        callback: the callback.
        accumulate_grad_batches: micro-batches per optimizer step.
        finds_batch_size: whether the Trainer searches for the batch size itself.
        evaluates: whether the run evaluates.
        automatic_optimization: whether Lightning runs backward, rather than the user's `training_step`.
        knows_epochs: whether the training data has a length.
        several: whether the run has several processes.
        strategy: how the processes share the model.
    """
    name = type(callback).__name__
    if strategy.shards and isinstance(callback, (ModelPruning, *OF_TRAINING)):
        by = strategy.argument
        return f"{name} changes full weights, and {by} shards them: train without {by}, or without {name}."
    if strategy.fixes_accumulation and isinstance(callback, GradientAccumulationScheduler):
        return (
            f"{name} cannot tell {strategy.argument} how many micro-batches a step has: set "
            "gradient_accumulation_steps instead."
        )
    if isinstance(callback, ModelPruning) and private_api.leaves_masks(callback):
        return (
            f"{name}(make_pruning_permanent=False) would leave masks in the model and in its checkpoints, which "
            "from_pretrained cannot read: leave it at True."
        )
    if isinstance(callback, GradientAccumulationScheduler):
        if not automatic_optimization:
            return f"{name} cannot work with a training_step of your own: set gradient_accumulation_steps instead."
        if accumulate_grad_batches != 1:
            return (
                f"gradient_accumulation_steps={accumulate_grad_batches} and {name} both set the accumulation: leave "
                "the argument at 1."
            )
    share = isinstance(callback, StochasticWeightAveraging) and private_api.starts_at_fraction(callback)
    if share and not knows_epochs:
        return f"{name}(swa_epoch_start) is a fraction of the epochs, and the data has no length: use an integer."
    if isinstance(callback, EarlyStopping) and not (evaluates or private_api.checks_on_train_epoch_end(callback)):
        return f"{name}(monitor={callback.monitor!r}) reads evaluations, and the run has none: set eval_strategy."
    if isinstance(callback, ModelCheckpoint) and not evaluates and str(callback.monitor).startswith("eval_"):
        return f"{name}(monitor={callback.monitor!r}) waits for evaluations, and the run has none: set eval_strategy."
    if isinstance(callback, FINDERS):
        if several:
            return f"{name} is not supported yet in several processes: run it in one, and set its result."
        if isinstance(callback, BatchSizeFinder) and finds_batch_size:
            return f"auto_find_batch_size and {name} both search for the batch size: use only one of them."
        if own := [hook for hook in _HOOKS if _overrides(callback, hook, *FINDERS)]:
            return (
                f"{name}.{own[0]} would run trial steps during training, which would be counted and logged: "
                f"a {FINDERS[isinstance(callback, LearningRateFinder)].__name__} searches once, before training."
            )
    return None


def _overrides(callback: Callback, hook: str, *besides: type) -> bool:
    """Whether a callback overrides a hook of the base class and of the classes in `besides`."""
    own = getattr(getattr(callback, hook), "__func__", None)
    return all(own is not getattr(kind, hook) for kind in (Callback, *besides))


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def save(trainer: pl.Trainer, module: TrainerModule, callbacks: Sequence[Callback]) -> tuple[Any, dict[str, Any]]:
    """The callbacks' contribution to a checkpoint.

    Returns:
        The weights to save instead of the model's own, by the names of the model's state dict (None: the model's own);
        and the state to save besides: `{"callbacks": states by state_key, ...}`, empty when there is none.
    """
    states = {callback.state_key: state for callback in callbacks if (state := private_api.state_of(callback))}
    kept: dict[str, Any] = {"callbacks": states} if states else {}
    if first_of(callbacks, _AT_EPOCH_END) is not None and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        kept["epoch_ended"] = module.epoch_ended
    if (pruning := first_of(callbacks, ModelPruning)) is not None:
        kept["pruning"] = keep_pruning(pruning, module)
    if not any(_overrides(callback, "on_save_checkpoint") for callback in callbacks):
        return None, kept
    own = _weights_shown(trainer, module)
    checkpoint = {"state_dict": own, "epoch": trainer.current_epoch, "global_step": trainer.global_step, **kept}
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    kept = {name: value for name, value in checkpoint.items() if name not in _KEPT_ELSEWHERE}
    if (weights := checkpoint["state_dict"]) is own:
        return None, kept
    return {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}, kept


def _weights_shown(trainer: pl.Trainer, module: TrainerModule) -> dict[str, Any]:
    """The weights that callbacks see: none if they are sharded, since they would have to be gathered."""
    return {} if trainer.strategy.shards else module.state_dict()  # type: ignore[attr-defined]


def detached(kept: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state with its own tensors: the model's change while other weights are in it."""
    return copy.deepcopy(kept)


@contextlib.contextmanager
def in_place(
    model: torch.nn.Module, weights: dict[str, torch.Tensor] | None
) -> Iterator[dict[str, torch.Tensor] | None]:
    """Put the weights to save into the model, so that any code that saves it saves them; then restore its own.

    Yields:
        The weights, if their names differ from the model's, so that they must be saved separately.
    """
    if weights is None or weights.keys() != (own := model.state_dict()).keys():
        yield weights
        return
    _swap(own, weights)
    try:
        yield None
    finally:
        _swap(own, weights)


@torch.no_grad()
def _swap(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    swapped = set()
    for name, tensor in own.items():
        if tensor.data_ptr() not in swapped or not tensor.numel():  # swap tied tensors once
            swapped.add(tensor.data_ptr())
            kept = tensor.clone()
            tensor.copy_(other[name])
            other[name].copy_(kept)


def restore(trainer: pl.Trainer, module: TrainerModule, kept: Mapping[str, Any]) -> None:
    """Restore callbacks from what `save` returned, after `setup` and before `on_fit_start`, as Lightning does.

    The model must hold the checkpoint's weights already.
    """
    if (pruning := first_of(trainer.callbacks, ModelPruning)) is not None and "pruning" in kept:  # type: ignore[attr-defined]
        restore_pruning(pruning, module, kept["pruning"])
    checkpoint = {"state_dict": _weights_shown(trainer, module), "callbacks": {}, **copy.deepcopy(dict(kept))}
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    for callback in callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            if isinstance(callback, SpikeDetection):  # lightning 2.6 loads into a name that it does not have
                callback.running = callback.running_mean  # type: ignore[attr-defined]
            with fitting(f"the state of {type(callback).__name__} in lightning_callbacks.pt"):
                callback.load_state_dict(checkpoint["callbacks"][callback.state_key])


# ---- Schedules, and parameters that are frozen -----------------------------------------------------------------------


def first_of(callbacks: Iterable[Callback], kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """The first callback of a kind, or None."""
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def accumulation_at(callbacks: Iterable[Callback], epoch: int, default: int) -> int:
    """Micro-batches per optimizer step in an epoch."""
    scheduler = first_of(callbacks, GradientAccumulationScheduler)
    return default if scheduler is None else scheduler.get_accumulate_grad_batches(epoch)


def freeze_before_training(callbacks: Iterable[Callback], module: TrainerModule) -> bool:
    """Let callbacks that unfreeze gradually freeze their layers before the optimizer is made; whether any did."""
    freezing = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    for callback in freezing:
        callback.freeze_before_training(module)
    return bool(freezing)


def unfreeze_what_is_trained(callbacks: Iterable[Callback], optimizer: torch.optim.Optimizer) -> None:
    """Unfreeze the parameters in the optimizer: on resume Lightning freezes them and leaves them frozen."""
    if first_of(callbacks, BaseFinetuning) is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def begin_epoch_in_the_middle(trainer: pl.Trainer, module: TrainerModule) -> None:
    """Announce an epoch that is resumed in the middle to callbacks that prepare each epoch: Lightning does not."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
            callback.on_train_epoch_start(trainer, module)


def end_epoch_before(trainer: pl.Trainer, module: TrainerModule) -> None:
    """Run callbacks that change weights at an epoch's end, when resuming from a checkpoint of its last step."""
    with private_api.in_previous_epoch(trainer):
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AT_EPOCH_END):
                callback.on_train_epoch_end(trainer, module)


def update_batch_norm(trainer: pl.Trainer, module: TrainerModule, hooks: RunHooks) -> None:
    """Recompute batch normalization's running statistics for weights that `StochasticWeightAveraging` averaged.

    Lightning does it in an extra epoch, which would exceed the Trainer's number of steps.
    """
    averaging = first_of(trainer.callbacks, StochasticWeightAveraging)  # type: ignore[attr-defined]
    averaged = averaging is not None and averaging.n_averaged is not None
    if averaged and any(isinstance(part, _BatchNorm) for part in module.modules()):
        update_bn(hooks.batches(), _Forward(module.model, hooks))


class _Forward(torch.nn.Module):
    """A model whose forward takes a batch, as the Trainer's loss does."""

    def __init__(self, model: torch.nn.Module, hooks: RunHooks) -> None:
        super().__init__()
        self.model = model
        self._hooks = hooks

    def forward(self, batch: Any) -> None:
        """Run the model for its side effects."""
        self._hooks.evaluate_loss(self.model, batch)
