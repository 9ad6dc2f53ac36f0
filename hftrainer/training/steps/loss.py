"""Moves micro-batches to the device, checks the first one, and computes their losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.base.messages import log_once
from hftrainer.base.nested import rebuild_container
from hftrainer.base.part import Part
from hftrainer.base.signatures import accepted_args
from hftrainer.base.tracebacks import describe_type, note_batch
from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.loaders import to_device
from hftrainer.errors import InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.model.inspection import LOSS_REMEDY, call_loss_func, extract_loss, is_training, smoothing_shifts_labels
from hftrainer.parallel import devices
from hftrainer.training.steps import loss_division

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)


def check_loss(loss: Any, remedy: Callable[[], str]) -> torch.Tensor:
    """Return the loss if it is a tensor of shape `()`. `remedy` returns the end of the error message.

    Raises:
        InvalidArgument: if the loss is anything else.
    """
    if isinstance(loss, torch.Tensor) and loss.ndim == 0:
        return loss
    is_tensor = isinstance(loss, torch.Tensor)
    description = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else describe_type(loss)
    advice = "return loss.mean() if these are losses; otherwise, " if is_tensor else ""
    if isinstance(loss, (int, float)):
        advice = "return the tensor itself, not its .item(); "
    raise InvalidArgument(f"The loss must be a tensor with one number, but is {description}: {advice}{remedy()}")


def split_losses(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split a dict of losses into the loss for backward ('loss', or the sum) and the other entries."""
    if isinstance(loss, torch.Tensor) or not isinstance(loss, Mapping):
        return loss, {}
    other_losses = {name: value for name, value in loss.items() if name != "loss"}
    return loss["loss"] if "loss" in loss else sum(other_losses.values()), other_losses


class LossComputer(Part):
    """Computes the loss of a micro-batch: by the model, `compute_loss_func` or the label smoother, then divided.

    It also moves the batch to the device and checks the first one. By what a loss is divided is in `loss_division.py`.
    """

    def prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device; with `past_index` also the model's memory of earlier batches."""
        if inputs is None:
            raise InvalidArgument("data_collator returned None: it must return the batch, a dict of model inputs.")
        if len(inputs) == 0:
            raise InvalidArgument(
                "The batch is empty: none of the samples' keys is a parameter of the model's forward "
                f"({', '.join(self.trainer._signature_columns or [])})."
            )
        inputs = self.trainer._prepare_input(inputs)
        # Set with `past_index`. Evaluation loops of transformers v4 delete the attribute.
        if getattr(self.run, "mems", None) is not None:
            inputs["mems"] = self.run.mems
        return inputs

    def prepare_input(self, data: Any) -> Any:
        """The data on the device. An override of `Trainer._prepare_input` prepares each item of a container."""
        if is_overridden(self.trainer, "_prepare_input") and isinstance(data, (dict, list, tuple, Mapping)):
            return rebuild_container(data, self.trainer._prepare_input)
        return self.parts.strategy.cast_batch(to_device(data, self.trainer.accelerator.device), self.trainer.model)

    # ---- The loss ----------------------------------------------------------------------------------------------

    def micro_batch_loss(self, model: nn.Module, inputs: Any, items: torch.Tensor | int | None) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation (`loss_division.py`)."""
        trainer = self.trainer
        _set_training_mode(model, trainer.optimizer)
        inputs = trainer._prepare_inputs(inputs)
        if not self.run.attempt.has_checked_model:
            check_first_batch(self.parts, model, inputs, items)
            # A batch without labels cannot show whether the model divides its loss.
            self.run.attempt.has_checked_model = items is not None or not trainer.args.elastic
        try:
            with trainer.compute_loss_context_manager():
                accepted = accepted_args(trainer.compute_loss, {"num_items_in_batch": items})
                loss = trainer.compute_loss(model, inputs, **accepted)
        except Exception as error:
            note_batch(error, f"training step {trainer.state.global_step + 1}", inputs, trainer.model)
            raise
        self._end_forward()
        loss, other_losses = split_losses(loss)
        loss = check_loss(loss, self._loss_remedy)
        loss, logged_losses = loss_division.divide_by_micro_batches(self.parts, loss, other_losses, items)
        for name, logged_loss in logged_losses.items():
            self.run.attempt.logged_metrics.add(name, logged_loss, count=0)
        return loss

    def _end_forward(self) -> None:
        """Report the end of a forward pass, and empty the cache if it is due."""
        # A rank that hangs in the forward pass is behind those that wait for it in backward.
        self.run.heartbeat.beat()
        interval = self.trainer.args.torch_empty_cache_steps
        if interval is not None and self.trainer.state.global_step % interval == 0:
            devices.empty_cache()

    def _loss_remedy(self) -> str:
        if not is_overridden(self.trainer, "compute_loss"):
            return LOSS_REMEDY
        name = type(self.trainer).__name__
        return f"{name}.compute_loss must return the loss, or (loss, outputs) with return_outputs=True."

    def loss_and_outputs(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any]:
        """Implements `Trainer.compute_loss` with `compute_loss_func`, the label smoother, or the model itself."""
        trainer = self.trainer
        if not isinstance(inputs, (dict, Mapping)):
            raise InvalidArgument(
                f"The batch is {describe_type(inputs)}, but the model is called with keyword arguments: let "
                "data_collator return a dict of the model's inputs, or override compute_loss."
            )
        needs_labels = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        labels = inputs.pop("labels", None) if needs_labels else None
        if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.parts.past_index >= 0:
            self.run.mems = outputs[self.parts.past_index]
        if trainer.compute_loss_func is not None:
            loss = call_loss_func(trainer.compute_loss_func, outputs, labels, num_items_in_batch)
        elif trainer.label_smoother is not None and labels is not None:
            shift = smoothing_shifts_labels(trainer.accelerator.unwrap_model(model))
            items = num_items_in_batch if self.parts.policy.smooths_over_items else None
            loss = trainer.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=items)
        else:
            if trainer.label_smoother is not None:
                log_once(
                    logger,
                    f"label_smoothing_factor={trainer.args.label_smoothing_factor} has no effect: it needs 'labels', "
                    f"and the batch has only {', '.join(inputs)}; the model computes its own loss.",
                )
            loss = extract_loss(outputs, inputs)
        return loss_division.undo_mean_over_ranks(self.parts, loss, num_items_in_batch), outputs


def _set_training_mode(model: nn.Module, optimizer: Any) -> None:
    if not is_training(model):
        model.train()
    # Schedule-free optimizers have a training mode too.
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


# ---- The first batch -------------------------------------------------------------------------------------------------


def check_first_batch(parts: TrainerParts, model: nn.Module, inputs: Any, items: torch.Tensor | int | None) -> None:
    """Check on a run's first batch, in its precision, what the run requires of the model.

    With `elastic`, it also sets `model_accepts_loss_kwargs`.

    Raises:
        InvalidSetup: if all parameters are frozen.
        UnsupportedArgument: for `flatten_batches`, if the samples of a row attend to each other.
    """
    # By now, callbacks have unfrozen what the first step trains. A script's loss may have weights of its own.
    has_own_loss = parts.trainer.compute_loss_func is not None or is_overridden(parts.trainer, "compute_loss")
    # Most models end this at their first parameter. One without parameters is not frozen.
    requires_grad = (parameter.requires_grad for parameter in model.parameters())
    if not has_own_loss and not next(requires_grad, True) and not any(requires_grad):
        name = type(parts.unwrapped_model).__name__
        adapters = "load the adapters with is_trainable=True" if hasattr(model, "peft_config") else "add adapters"
        raise InvalidSetup(f"All parameters of {name} are frozen: call requires_grad_(True) on some, or {adapters}.")
    args = parts.trainer.args
    counts_items = parts.trainer.model_accepts_loss_kwargs and items is not None
    needs_division = args.elastic and counts_items and isinstance(inputs, Mapping)
    if not needs_division and not args.flatten_batches:
        return
    was_training = model.training
    # Dropout would draw random numbers.
    model.eval()
    try:
        with torch.no_grad():
            if needs_division:
                # Do not pass the number of items to a model that ignores it.
                parts.trainer.model_accepts_loss_kwargs = loss_division.divides_by_items(parts, model, inputs, items)
            if args.flatten_batches:
                _require_separate_samples(parts, model)
    finally:
        model.train(was_training)


def _require_separate_samples(parts: TrainerParts, model: nn.Module) -> None:
    """Raise UnsupportedArgument if a sample's logits depend on other samples in its row."""
    model = libraries.unwrap_compiled(model)
    collator = parts.loader_factory.make_flat_collator()
    name = type(parts.unwrapped_model).__name__
    vocabulary = len(parts.unwrapped_model.get_input_embeddings().weight)
    first, second, other = ([token % vocabulary for token in range(begin, begin + 4)] for begin in (1, 5, 9))
    rows = []
    for pair in ((first, second), (first, other), (other, second)):
        batch = collator([{"input_ids": ids} for ids in pair])
        del batch["labels"]
        rows.append(model(**parts.trainer._prepare_inputs(batch))["logits"][0])
    # Tokens, positions and shapes agree: the logits are equal to the bit, unless the model mixes samples.
    if not torch.equal(rows[0][:4], rows[1][:4]) or not torch.equal(rows[0][4:], rows[2][4:]):
        raise UnsupportedArgument(
            f"flatten_batches=True: in {name}, the samples of a row attend to each other: it does not build its "
            "mask from position_ids. Remove flatten_batches, or load the model with an attention implementation "
            "that does, such as attn_implementation='flash_attention_2'."
        )
