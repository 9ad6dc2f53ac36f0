"""Out-of-memory errors: recognizing them, and restarting with smaller batches (`auto_find_batch_size`)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hftrainer.data.random_states import restore_rng_state, rng_state
from hftrainer.trainer_pt_utils import nested_apply

#: Words in out-of-memory errors that are not `torch.OutOfMemoryError`.
_SIGNS = (
    " out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a device or this machine ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class StartingPoint:
    """The state in which a run begins, kept on the CPU: trained weights, buffers, random states, and `stateful`.

    Frozen weights, most of a model with adapters, are not copied.

    Args:
        model: the model.
        scaler: the loss scaler, or None.
        stateful: the user's optimizer and scheduler; None is ignored.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None, *stateful: Any) -> None:
        self._model = model
        self._tensors = {name: _copied(tensor) for name, tensor in self._changing().items()}
        self._scaler = scaler
        self._scale = None if scaler is None else scaler.state_dict()
        self.stateful = stateful
        self._others = [(thing, nested_apply(_copied, thing.state_dict())) for thing in stateful if thing is not None]
        self._random = rng_state()
        if torch.cuda.is_available():  # the model may be on several devices
            self._random["cuda"] = torch.cuda.get_rng_state_all()

    def _changing(self) -> dict[str, torch.Tensor]:
        trained = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        return {**trained, **dict(self._model.named_buffers())}

    def restore(self) -> None:
        """Restore the state."""
        with torch.no_grad():
            for name, tensor in self._changing().items():
                tensor.copy_(self._tensors[name])
        self._model.zero_grad()
        for thing, state in self._others:
            thing.load_state_dict(nested_apply(_copied, state))
        if self._scaler is not None and self._scale is not None:
            self._scaler.scale(
                next(self._model.parameters()).new_zeros(())
            )  # initializes the scaler, if that has not been done yet
            self._scaler.update(self._scale["scale"])  # discards the state of the failed step
            self._scaler.load_state_dict(self._scale)
        restore_rng_state(self._random)


def _copied(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
