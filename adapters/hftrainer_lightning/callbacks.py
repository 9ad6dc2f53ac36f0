"""What Lightning's callbacks need beyond their hooks: weights and states in a checkpoint, and a say in the schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
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
    ModelPruning,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn

from hftrainer_lightning import seams

if TYPE_CHECKING:
    from hftrainer_lightning.events import TrainingHost
    from hftrainer_lightning.module import HostedModule

#: What a Lightning checkpoint holds in places of its own; all else in it comes from callbacks.
_KEPT_ELSEWHERE = ("state_dict", "epoch", "global_step")
#: Callbacks that look for a setting before training, and take no part in it.
FINDERS = (BatchSizeFinder, LearningRateFinder)
#: Callbacks that change weights when an epoch ends, which is after the checkpoint of its last step.
_AT_EPOCH_END = (ModelPruning, WeightAveraging)
_HOOKS = [name for name in vars(Callback) if name.startswith("on_") and name != "on_fit_start"]
#: The generated module's name for the user's model, in its state dict.
_PREFIX = "model."


def is_lightning_callback(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning callback, as an instance or as a class."""
    return issubclass(candidate, Callback) if isinstance(candidate, type) else isinstance(candidate, Callback)


def has_progress_bar(callbacks: Iterable[Callback]) -> bool:
    """Whether one of these shows a progress bar."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def refusal(
    callback: Callback, *, accumulate_grad_batches: int, finds_batch_size: bool, evaluates: bool, several: bool
) -> str | None:
    """Why a callback cannot work with the arguments of the run; None when it can.

    Args:
        callback: the callback.
        accumulate_grad_batches: micro-batches per optimizer step.
        finds_batch_size: whether the Trainer looks for the batch size itself.
        evaluates: whether the run evaluates.
        several: whether there are several processes.
    """
    name = type(callback).__name__
    if isinstance(callback, ModelPruning) and not callback._make_pruning_permanent:
        return (
            f"{name}(make_pruning_permanent=False) would leave masks in the model and in its checkpoints, which "
            "from_pretrained cannot read: leave it at True."
        )
    if isinstance(callback, GradientAccumulationScheduler) and accumulate_grad_batches != 1:
        return (
            f"gradient_accumulation_steps={accumulate_grad_batches} and {name} both set the accumulation: leave the "
            "argument at 1."
        )
    if isinstance(callback, EarlyStopping) and not (evaluates or callback._check_on_train_epoch_end):
        return f"{name}(monitor={callback.monitor!r}) looks at evaluations, and there are none: set eval_strategy."
    if isinstance(callback, FINDERS):
        if several:
            return f"{name} is not supported yet in several processes: let it look in one, and set what it finds."
        if isinstance(callback, BatchSizeFinder) and finds_batch_size:
            return f"auto_find_batch_size and {name} both look for the batch size: give one of them."
        if own := [hook for hook in _HOOKS if _overrides(callback, hook, *FINDERS)]:
            return (
                f"{name}.{own[0]} would try steps within a run, whose optimizer steps are counted and logged: "
                f"a {FINDERS[isinstance(callback, LearningRateFinder)].__name__} looks once, before training."
            )
    return None


def _overrides(callback: Callback, hook: str, *besides: type) -> bool:
    """Whether a callback has a hook of its own, not that of the base class or of one of the classes in `besides`."""
    own = getattr(getattr(callback, hook), "__func__", None)
    return all(own is not getattr(kind, hook) for kind in (Callback, *besides))


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def save(trainer: pl.Trainer, module: HostedModule, callbacks: Sequence[Callback]) -> tuple[Any, dict[str, Any]]:
    """What callbacks have to say to a checkpoint.

    Returns:
        The weights to save instead of the model's own (None when they are those), by the names of the model's state
        dict; and what else is to be kept: `{"callbacks": states by state_key, ...}`, empty when there is nothing.
    """
    states = {callback.state_key: state for callback in callbacks if (state := callback.state_dict())}
    kept: dict[str, Any] = {"callbacks": states} if states else {}
    if first_of(callbacks, _AT_EPOCH_END) is not None and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        kept["epoch_ended"] = module.epoch_ended
    if (pruning := first_of(callbacks, ModelPruning)) is not None:
        first_values = [layer["data"].state_dict() for layer in _first_layers(pruning)]
        kept["pruning"] = {"masks": _masks(module), "first_values": first_values}
    if not any(_overrides(callback, "on_save_checkpoint") for callback in callbacks):
        return None, kept
    own = module.state_dict()
    checkpoint = {"state_dict": own, "epoch": trainer.current_epoch, "global_step": trainer.global_step, **kept}
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    kept = {name: value for name, value in checkpoint.items() if name not in _KEPT_ELSEWHERE}
    if (weights := checkpoint["state_dict"]) is own:
        return None, kept
    return {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}, kept


def restore(trainer: pl.Trainer, module: HostedModule, kept: Mapping[str, Any]) -> None:
    """Give callbacks what `save` kept, after their `setup` and before `on_fit_start`, as when Lightning resumes.

    The model holds the checkpoint's weights by then.
    """
    if (pruning := first_of(trainer.callbacks, ModelPruning)) is not None and "pruning" in kept:  # type: ignore[attr-defined]
        _put_masks(module, kept["pruning"]["masks"])
        _restore_first_values(pruning, kept["pruning"]["first_values"])
    checkpoint = {"state_dict": module.state_dict(), "callbacks": {}, **copy.deepcopy(dict(kept))}
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    for callback in callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            if isinstance(callback, SpikeDetection):  # lightning 2.6 loads into a name that it does not have
                callback.running = callback.running_mean  # type: ignore[attr-defined]
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])


def _first_layers(pruning: ModelPruning) -> list[Any]:
    """The layers as they were when training began, to whose values the lottery ticket hypothesis returns."""
    return list((pruning._original_layers or {}).values())


def _restore_first_values(pruning: ModelPruning, first_values: Sequence[Any]) -> None:
    for layer, values in zip(_first_layers(pruning), first_values, strict=True):
        layer["data"].load_state_dict(values)
        for index, name in layer["names"]:
            first, live = (
                getattr(layer["data"], name),
                getattr(pruning._parameters_to_prune[index][0], f"{name}_orig", None),
            )
            if live is not None and torch.equal(first, live):
                # Once it has returned to them, Lightning trains on that very storage, so that they follow the training.
                first.data = live.data


def _masks(module: torch.nn.Module) -> dict[str, Any]:
    """The masks of pruned parameters, and the values below them that training goes on with."""
    return {
        name: {"mask": mask, "original": module.get_parameter(f"{name}_orig").data}
        for buffer, mask in module.named_buffers()
        if (name := buffer.removesuffix("_mask")) != buffer and f"{name}_orig" in dict(module.named_parameters())
    }


def _put_masks(module: torch.nn.Module, masks: Mapping[str, Any]) -> None:
    for path, saved in masks.items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        prune.custom_from_mask(owner, name, saved["mask"])
        getattr(owner, f"{name}_orig").data.copy_(saved["original"])


# ---- Schedules, and parameters that are frozen -----------------------------------------------------------------------


def first_of(callbacks: Iterable[Callback], kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """The first callback of a kind, or None."""
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def accumulation_at(callbacks: Iterable[Callback], epoch: int, default: int) -> int:
    """Micro-batches per optimizer step in an epoch."""
    scheduler = first_of(callbacks, GradientAccumulationScheduler)
    return default if scheduler is None else scheduler.get_accumulate_grad_batches(epoch)


def freeze_before_training(callbacks: Iterable[Callback], module: HostedModule) -> bool:
    """Let callbacks that unfreeze by and by freeze what they want, before there is an optimizer; whether any did."""
    freezing = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    for callback in freezing:
        callback.freeze_before_training(module)
    return bool(freezing)


def unfreeze_what_is_trained(callbacks: Iterable[Callback], optimizer: torch.optim.Optimizer) -> None:
    """Let parameters that the optimizer holds be trained: on resume Lightning freezes them and leaves them frozen."""
    if first_of(callbacks, BaseFinetuning) is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def begin_epoch_in_the_middle(trainer: pl.Trainer, module: HostedModule) -> None:
    """Tell callbacks that prepare each epoch about one that is resumed in the middle: Lightning does not."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
            callback.on_train_epoch_start(trainer, module)


def end_epoch_before(trainer: pl.Trainer, module: HostedModule) -> None:
    """Let callbacks that change the weights at an epoch's end do so, after a checkpoint of its last step."""
    with seams.in_previous_epoch(trainer):
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AT_EPOCH_END):
                callback.on_train_epoch_end(trainer, module)


def update_batch_norm(trainer: pl.Trainer, module: HostedModule, host: TrainingHost) -> None:
    """Compute the running statistics of batch normalization anew for weights that `StochasticWeightAveraging` averaged.

    Lightning does it in one more epoch, which the Trainer's number of steps leaves no room for.
    """
    averaging = first_of(trainer.callbacks, StochasticWeightAveraging)  # type: ignore[attr-defined]
    averaged = averaging is not None and averaging.n_averaged is not None
    if averaged and any(isinstance(part, _BatchNorm) for part in module.modules()):
        update_bn(host.batches(), _Forward(module.model, host))


class _Forward(torch.nn.Module):
    """A model that takes a batch as the Trainer does."""

    def __init__(self, model: torch.nn.Module, host: TrainingHost) -> None:
        super().__init__()
        self.model = model
        self._host = host

    def forward(self, batch: Any) -> None:
        """Run the model for its side effects."""
        self._host.evaluate_loss(self.model, batch)
