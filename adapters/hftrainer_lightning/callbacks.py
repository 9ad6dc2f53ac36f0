"""Support for Lightning's callbacks beyond hooks: their weights and states in checkpoints, and schedules."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
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
    OnExceptionCheckpoint,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn

from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.base.signatures import can_call
from hftrainer.base.tracebacks import add_note
from hftrainer.checkpointing.layout import MODEL_PREFIX
from hftrainer.compat.libraries import has_length
from hftrainer_lightning.private_api import callback_hooks
from hftrainer_lightning.private_api.epoch_loop import use_previous_epoch

if TYPE_CHECKING:
    from hftrainer.strategies.strategy import Strategy
    from hftrainer.trainer import Trainer
    from hftrainer.training.steps.loop import TrainingLoop
    from hftrainer_lightning.module import TrainerModule

logger = logging.getLogger(__name__)

#: Lightning's own keys in a checkpoint; all others come from callbacks.
_LIGHTNING_KEYS = ("state_dict", "epoch", "global_step")
#: Callbacks that search for a setting before training, and do not run during it.
FINDERS = (BatchSizeFinder, LearningRateFinder)
#: Callbacks that run during training only.
TRAINING_ONLY = (StochasticWeightAveraging, WeightAveraging)
#: Callbacks that change weights at the end of an epoch, after the checkpoint of its last step.
_EPOCH_END_CALLBACKS = (ModelPruning, WeightAveraging)
HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def is_lightning_callback(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning callback, as an instance or as a class."""
    return issubclass(candidate, Callback) if isinstance(candidate, type) else isinstance(candidate, Callback)


@contextlib.contextmanager
def note_wrong_signatures(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Add to a TypeError the parameters with which Lightning calls the hook that caused it."""
    try:
        yield
    except TypeError as error:
        for callback, hook in itertools.product(callbacks, HOOKS):
            parameters = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
            handler = getattr(callback, hook)
            if f"{hook}() " in str(error) and not can_call(handler, *parameters):
                name = f"{type(callback).__name__}.{hook}"
                call = ", ".join(parameters)
                add_note(error, f"{name} is called with ({call}), but takes {inspect.signature(handler)}.")
        raise


def has_progress_bar(callbacks: Iterable[Callback]) -> bool:
    """Whether one of the callbacks shows a progress bar."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def _evaluates(trainer: Trainer) -> bool:
    return trainer.args.eval_strategy != "no" or bool(trainer.args.eval_minutes)


def check_callbacks(callbacks: Sequence[Callback], strategy: Strategy, trainer: Trainer) -> list[str]:
    """An error message for each callback that cannot work in a run of `trainer`, our Trainer."""
    for callback in callbacks:
        if _evaluates(trainer) and (monitor := str(getattr(callback, "monitor", ""))).startswith("val_"):
            place = f"{type(callback).__name__}(monitor={monitor!r})"
            meant = f"e{monitor}"
            logger.warning("%s: the metrics of evaluations begin with 'eval_': did you mean %r?", place, meant)
    # Report only the first problem of each callback.
    all_problems = (_find_problems(callback, strategy, trainer) for callback in callbacks)
    problems = [message for found in all_problems for message in itertools.islice(found, 1)]
    if find_callback(callbacks, ModelPruning) and find_callback(callbacks, WeightAveraging):
        problems.append("ModelPruning changes the parameters that weight averaging averages: use only one of them.")
    return problems


def _find_problems(callback: Callback, parallel_strategy: Strategy, trainer: Trainer) -> Iterator[str]:
    name = type(callback).__name__
    strategy = parallel_strategy.argument
    args = trainer.args
    if isinstance(callback, (ModelPruning, *TRAINING_ONLY)) and parallel_strategy.shards_model:
        yield f"{name} changes full weights, but {strategy} shards them: train without {strategy}, or without {name}."
    if isinstance(callback, ModelPruning) and callback_hooks.leaves_masks(callback):
        yield (
            f"{name}(make_pruning_permanent=False) would leave masks in the model and in its checkpoints, which "
            "from_pretrained cannot read: leave it at True."
        )
    if isinstance(callback, GradientAccumulationScheduler):
        advice = "set gradient_accumulation_steps instead."
        if parallel_strategy.has_fixed_accumulation:
            yield f"{name} cannot tell {strategy} how many micro-batches a step has: {advice}"
        if args.elastic:
            yield f"{name} changes the samples of a step, which elastic=True keeps: use only one of them."
        if (steps := args.gradient_accumulation_steps) != 1:
            yield f"gradient_accumulation_steps={steps} and {name} both set accumulation steps: leave the former at 1."
    needs_epochs = isinstance(callback, StochasticWeightAveraging) and callback_hooks.starts_at_fraction(callback)
    if needs_epochs and not has_length(trainer.train_dataset):
        yield f"{name}: swa_epoch_start is a fraction of the epochs, but the data has no length. Use an integer."
    if not _evaluates(trainer):
        yield from _find_problems_without_evaluation(callback, name)
    if isinstance(callback, OnExceptionCheckpoint) and args.on_divergence == "rollback":
        yield f"{name} would save the state that on_divergence='rollback' discards: use only one of them."
    if isinstance(callback, FINDERS):
        yield from _find_finder_problems(callback, name, parallel_strategy, args)


def _find_problems_without_evaluation(callback: Callback, name: str) -> Iterator[str]:
    if isinstance(callback, EarlyStopping) and not callback_hooks.checks_on_train_epoch_end(callback):
        yield f"{name}(monitor={callback.monitor!r}): the run does not evaluate, so set eval_strategy."
    if isinstance(callback, ModelCheckpoint) and str(callback.monitor).startswith("eval_"):
        yield f"{name}(monitor={callback.monitor!r}): the run does not evaluate, so set eval_strategy."
    elif isinstance(callback, ModelCheckpoint) and callback_hooks.saves_after_evaluations_only(callback):
        logger.warning(
            "%s saves after evaluations, but the run has none: set eval_strategy, or its save_on_train_epoch_end.", name
        )


def _find_finder_problems(finder: Callback, name: str, strategy: Strategy, args: Any) -> Iterator[str]:
    if strategy.initial_plan.processes.is_distributed:
        yield f"{name} is not supported yet in several processes: run it in one, and set the argument to its result."
    if args.auto_find_batch_size and isinstance(finder, BatchSizeFinder):
        yield f"auto_find_batch_size and {name} both search for the batch size: use only one of them."
    for hook in [hook for hook in HOOKS if hook != "on_fit_start" and _overrides_hook(finder, hook, *FINDERS)]:
        finder_name = next(base.__name__ for base in FINDERS if isinstance(finder, base))
        yield (
            f"{name}.{hook} would run trial steps during training, which would be counted and logged: a {finder_name} "
            "searches once, before training."
        )


def _overrides_hook(callback: Callback, hook: str, *bases: type) -> bool:
    """Whether a callback overrides a hook of `Callback` and of the classes in `bases`."""
    function = getattr(getattr(callback, hook), "__func__", None)
    return all(function is not getattr(base, hook) for base in (Callback, *bases))


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def collect_state(
    pl_trainer: pl.Trainer, pl_module: TrainerModule, callbacks: Sequence[Callback]
) -> tuple[Any, dict[str, Any]]:
    """The callbacks' contribution to a checkpoint.

    Returns:
        The weights to save instead of the model's, by the keys of its state dict (None: save the model's weights), and
        the other state to save, `{"callbacks": states by state_key, ...}`, which may be empty.
    """
    states = {
        callback.state_key: state for callback in callbacks if (state := callback_hooks.checkpoint_state(callback))
    }
    other_state: dict[str, Any] = {"callbacks": states} if states else {}
    changes_weights = find_callback(callbacks, _EPOCH_END_CALLBACKS) is not None
    if changes_weights and pl_trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        other_state["epoch_ended"] = pl_module.callbacks_ended_epoch
    if (pruning := find_callback(callbacks, ModelPruning)) is not None:
        other_state["pruning"] = _pruning_state(pruning, pl_module)
    if not any(_overrides_hook(callback, "on_save_checkpoint") for callback in callbacks):
        return None, other_state
    model_weights = _weights_for_callbacks(pl_trainer, pl_module)
    checkpoint = {
        "state_dict": model_weights,
        "epoch": pl_trainer.current_epoch,
        "global_step": pl_trainer.global_step,
        **other_state,
    }
    for callback in callbacks:
        callback.on_save_checkpoint(pl_trainer, pl_module, checkpoint)
    other_state = {name: value for name, value in checkpoint.items() if name not in _LIGHTNING_KEYS}
    if (weights := checkpoint["state_dict"]) is model_weights:
        return None, other_state
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in weights.items()}, other_state


def _weights_for_callbacks(pl_trainer: pl.Trainer, pl_module: TrainerModule) -> dict[str, Any]:
    """The weights for callbacks; empty for a sharded model, since gathering them would be expensive."""
    return {} if pl_trainer.strategy.shards_model else pl_module.state_dict()  # type: ignore[attr-defined]


@contextlib.contextmanager
def put_weights_into_model(
    model: torch.nn.Module, weights: dict[str, torch.Tensor] | None
) -> Iterator[dict[str, torch.Tensor] | None]:
    """Put the weights to save into the model for the block, for any code that saves the model.

    Yields:
        None; or the weights, if they must be saved separately, since their names differ from the model's.
    """
    if weights is None or weights.keys() != (model_weights := model.state_dict()).keys():
        yield weights
        return
    _swap_weights(model_weights, weights)
    try:
        yield None
    finally:
        _swap_weights(model_weights, weights)


@torch.no_grad()
def _swap_weights(model_weights: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    pointers = set()
    for name, tensor in model_weights.items():
        # Swap tied tensors once.
        if tensor.data_ptr() not in pointers or not tensor.numel():
            pointers.add(tensor.data_ptr())
            previous = tensor.clone()
            tensor.copy_(weights[name])
            weights[name].copy_(previous)


def restore_state(pl_trainer: pl.Trainer, pl_module: TrainerModule, state: Mapping[str, Any]) -> None:
    """Restore the callbacks from the result of `collect_state`.

    Lightning does this after `setup` and before `on_fit_start`. The model must already hold the checkpoint's weights.
    """
    if (pruning := find_callback(pl_trainer.callbacks, ModelPruning)) is not None and "pruning" in state:  # type: ignore[attr-defined]
        _restore_pruning(pruning, pl_module, state["pruning"])
    weights = _weights_for_callbacks(pl_trainer, pl_module)
    checkpoint = {"state_dict": weights, "callbacks": {}, **copy.deepcopy(dict(state))}
    callbacks: list[Callback] = pl_trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        callback.on_load_checkpoint(pl_trainer, pl_module, checkpoint)
    for callback in callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            # lightning 2.6 restores into an attribute that does not exist.
            if isinstance(callback, SpikeDetection):
                callback.running = callback.running_mean  # type: ignore[attr-defined]
            with name_file_in_errors(f"the state of {type(callback).__name__} in lightning_callbacks.pt"):
                callback.load_state_dict(checkpoint["callbacks"][callback.state_key])


# ---- Schedules and frozen parameters ---------------------------------------------------------------------------------


def find_callback(callbacks: Iterable[Callback], callback_type: type[Any] | tuple[type[Any], ...]) -> Any:
    """The first callback of a kind, or None."""
    return next((callback for callback in callbacks if isinstance(callback, callback_type)), None)


def unfreeze_optimized_parameters(callbacks: Iterable[Callback], optimizer: torch.optim.Optimizer) -> None:
    """Unfreeze the parameters in the optimizer: on resume Lightning freezes them and leaves them frozen."""
    if find_callback(callbacks, BaseFinetuning) is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def run_missed_epoch_start(pl_trainer: pl.Trainer, pl_module: TrainerModule) -> None:
    """Call `on_train_epoch_start` for an epoch that resumes in the middle, since Lightning does not."""
    for callback in pl_trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
            callback.on_train_epoch_start(pl_trainer, pl_module)


def run_missed_epoch_end(pl_trainer: pl.Trainer, pl_module: TrainerModule) -> None:
    """Run callbacks that change weights at an epoch's end, after resuming from its last step."""
    with use_previous_epoch(pl_trainer):
        for callback in pl_trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _EPOCH_END_CALLBACKS):
                callback.on_train_epoch_end(pl_trainer, pl_module)


def update_batch_norm(pl_trainer: pl.Trainer, pl_module: TrainerModule, loop: TrainingLoop) -> None:
    """Recompute batch normalization's running statistics for weights that `StochasticWeightAveraging` averaged.

    Lightning computes them in an extra epoch, which would exceed the Trainer's number of steps.
    """
    averaging = find_callback(pl_trainer.callbacks, StochasticWeightAveraging)  # type: ignore[attr-defined]
    has_averaged = averaging is not None and averaging.n_averaged is not None
    if has_averaged and any(isinstance(part, _BatchNorm) for part in pl_module.modules()):
        update_bn(loop.trainer.get_train_dataloader(), _BatchForward(pl_module.model, loop.trainer))


class _BatchForward(torch.nn.Module):
    """A module whose forward computes the Trainer's loss of a batch."""

    def __init__(self, model: torch.nn.Module, trainer: Trainer) -> None:
        super().__init__()
        self.model = model
        self._trainer = trainer

    def forward(self, batch: Any) -> None:
        """Run the model for its side effects."""
        self._trainer.compute_loss(self.model, self._trainer._prepare_inputs(batch))


# ---- Pruning ---------------------------------------------------------------------------------------------------------


def _pruning_state(pruning: ModelPruning, module: torch.nn.Module) -> dict[str, Any]:
    """The masks, the unmasked values (training continues with these), and the values before training."""
    masks = {
        name: {"mask": mask, "original": module.get_parameter(f"{name}_orig").data}
        for buffer, mask in module.named_buffers()
        if (name := buffer.removesuffix("_mask")) != buffer and f"{name}_orig" in dict(module.named_parameters())
    }
    first_values = [layer["data"].state_dict() for layer in callback_hooks.original_layers(pruning)]
    return {"masks": masks, "first_values": first_values}


def _restore_pruning(pruning: ModelPruning, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `_pruning_state` returned, after the callback's `setup`."""
    for path, tensors in state["masks"].items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        prune.custom_from_mask(owner, name, tensors["mask"])
        getattr(owner, f"{name}_orig").data.copy_(tensors["original"])
    for layer, first_values in zip(callback_hooks.original_layers(pruning), state["first_values"], strict=True):
        layer["data"].load_state_dict(first_values)
        for index, name in layer["names"]:
            first_value = getattr(layer["data"], name)
            parameter = getattr(callback_hooks.pruned_module(pruning, index), f"{name}_orig", None)
            if parameter is not None and torch.equal(first_value, parameter):
                # After a reset to these values, copy and parameter share storage, so training changes the copy too.
                first_value.data = parameter.data
