"""The loss in a model's outputs, and the check that training can use it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.compat.messages import warn_once
from hftrainer.errors import InvalidArgument

logger = logging.getLogger(__name__)

REMEDY = "let the model return (loss, ...) or {'loss': loss, ...}, pass compute_loss_func, or override compute_loss."


def first_output(outputs: Any, inputs: Mapping[str, Any]) -> Any:
    """The loss: under 'loss' in a mapping, first in a tuple, and the first number of a tensor of shape `(n,)`.

    Such a tensor is rarely meant as a loss. `transformers` trains on it; so does this, with a warning.

    Raises:
        InvalidArgument: when there is none; the error names what the model returned.
    """
    if isinstance(outputs, Mapping):
        if "loss" in outputs:
            return outputs["loss"]
        returned = f"only {', '.join(map(str, outputs))}"
    elif isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    elif isinstance(outputs, torch.Tensor) and outputs.ndim == 1 and len(outputs):
        said = f"The model returned numbers without a loss; the first of them is the loss. If it is not: {REMEDY}"
        warn_once(logger, said)
        return outputs[0]
    else:
        returned = f"a {type(outputs).__name__}"
    raise InvalidArgument(
        f"The model returned no loss, {returned}, from the inputs {', '.join(map(str, inputs))}. Check that the labels "
        f"reach it; {REMEDY}"
    )


def check_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is a tensor of shape `()`.

    Raises:
        InvalidArgument: when it is anything else.
    """
    if isinstance(loss, torch.Tensor) and loss.ndim == 0:
        return loss
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise InvalidArgument(f"The loss must be a tensor with one number, and is {shown}: {REMEDY}")
