"""Checks on a run's first batch, before its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import InvalidSetup, UnsupportedArgument
from hftrainer.training.steps import loss_division

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


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
    args, counts_items = parts.trainer.args, parts.trainer.model_accepts_loss_kwargs and items is not None
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
    model, collator = libraries.unwrap_compiled(model), parts.loaders.flat_collator()
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
