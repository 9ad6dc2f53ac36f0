"""Running out of memory: recognizing it, and starting over with smaller batches (`auto_find_batch_size`)."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import numpy as np
import torch
from torch import nn

#: What errors say that are not `torch.OutOfMemoryError`.
_SIGNS = (
    " out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or this machine ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def empty_cache() -> None:
    """Give memory that torch keeps for later back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


class StartingPoint:
    """Where a run begins, kept on the CPU: weights, an optimizer and a scheduler of the user's, and random states.

    Args:
        model: the model.
        stateful: what else has a `state_dict`; None among it is passed over.
    """

    def __init__(self, model: nn.Module, *stateful: Any) -> None:
        self._model = model
        self._weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        self._others = [(thing, copy.deepcopy(thing.state_dict())) for thing in stateful if thing is not None]
        self._random = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Go back there."""
        self._model.load_state_dict(self._weights)
        self._model.zero_grad()
        for thing, state in self._others:
            thing.load_state_dict(copy.deepcopy(state))
        python, numpy, cpu = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
