"""Moves micro-batches to the device and computes their losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hftrainer.base.messages import log_once
from hftrainer.base.nested import rebuild_container
from hftrainer.base.part import Part
from hftrainer.base.signatures import accepted_args
from hftrainer.base.tracebacks import describe_type, note_batch
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.loaders import to_device
from hftrainer.errors import InvalidArgument
from hftrainer.model.inspection import LOSS_REMEDY, call_loss_func, extract_loss, is_training, smoothing_shifts_labels
from hftrainer.parallel import devices
from hftrainer.training.steps import loss_division
from hftrainer.training.steps.first_batch import check_first_batch

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
    raise InvalidArgument(f"The loss must be a tensor with one number, but is {description}: {advice}{remedy()}")


def split_losses(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split a dict of losses into the loss for backward ('loss', or the sum) and the other entries."""
    if not isinstance(loss, Mapping):
        return loss, {}
    other_losses = {name: value for name, value in loss.items() if name != "loss"}
    return loss["loss"] if "loss" in loss else sum(other_losses.values()), other_losses


class LossComputer(Part):
    """Prepares micro-batches and computes their losses."""

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
        """The data on the device. For a container, `Trainer._prepare_input` prepares each item."""
        if not isinstance(data, torch.Tensor) and isinstance(data, (dict, list, tuple, Mapping)):
            return rebuild_container(data, self.trainer._prepare_input)
        return self.parts.strategy.cast_batch(to_device(data, self.trainer.accelerator.device), self.trainer.model)

    # ---- The loss ----------------------------------------------------------------------------------------------

    def micro_batch_loss(self, model: nn.Module, inputs: Any, items: torch.Tensor | int | None) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation (`loss_division.py`)."""
        trainer = self.trainer
        _set_training_mode(model, trainer.optimizer)
        inputs = trainer._prepare_inputs(inputs)
        if not self.run.has_checked_model:
            check_first_batch(self.parts, model, inputs, items)
            # A batch without labels cannot show whether the model divides its loss.
            self.run.has_checked_model = items is not None or not trainer.args.elastic
        kwargs = accepted_args(trainer.compute_loss, {"num_items_in_batch": items})
        try:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, **kwargs)
        except Exception as error:
            step = trainer.state.global_step + 1
            note_batch(error, f"training step {step}", inputs, getattr(trainer.model, "config", None))
            raise
        # A rank that hangs in the forward pass is behind those that wait for it in backward.
        self.run.heartbeat.beat()
        interval = trainer.args.torch_empty_cache_steps
        if interval is not None and trainer.state.global_step % interval == 0:
            devices.empty_cache()
        loss, other_losses = split_losses(loss)
        loss = check_loss(loss, self._loss_remedy)
        loss, logged_losses = loss_division.divide_by_micro_batches(self.parts, loss, other_losses, items)
        for name, logged_loss in logged_losses.items():
            self.run.logged_metrics.add(name, logged_loss, count=0)
        return loss

    def _loss_remedy(self) -> str:
        if not is_overridden(self.trainer, "compute_loss"):
            return LOSS_REMEDY
        name = type(self.trainer).__name__
        return f"{name}.compute_loss must return the loss, or (loss, outputs) with return_outputs=True."

    def loss_and_outputs(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any]:
        """Implements `Trainer.compute_loss` with `compute_loss_func`, the label smoother, or the model itself."""
        trainer = self.trainer
        if not isinstance(inputs, Mapping):
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
