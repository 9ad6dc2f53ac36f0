"""A copy of the state in which a run begins, for an attempt that begins again."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.choices import as_text
from hftrainer.callbacks.state import export_states
from hftrainer.data.randomness import restore_rng_state, rng_state
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.trainer_pt_utils import nested_apply

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer


class InitialStateSnapshot:
    """A CPU copy of a run's initial state: trained weights, buffers, random states, and `stateful`.

    Frozen weights are not copied; with adapters, these are most of the model.

    Args:
        trainer: the Trainer, before the first attempt. The state includes its loss scaler, if it has one, and the
            script's optimizer and scheduler, if it passed them. LOMO is refused, since its hooks cannot be
            removed from the model for a restart.
    """

    def __init__(self, trainer: Trainer) -> None:
        if (optim := as_text(trainer.args.optim)) in ("lomo", "adalomo"):
            raise InvalidArgument(
                f"optim={optim!r} leaves hooks in the model that cannot be removed for a restart: "
                "set per_device_train_batch_size yourself rather than auto_find_batch_size, and no on_divergence."
            )
        self._model = trainer.model
        self._tensors = {name: _to_cpu(tensor) for name, tensor in self._tensors_to_restore().items()}
        self._scaler = trainer.accelerator.scaler
        self._scale = None if self._scaler is None else self._scaler.state_dict()
        self.stateful = trainer.optimizer, trainer.lr_scheduler
        self._others = [(each, nested_apply(_to_cpu, each.state_dict())) for each in self.stateful if each is not None]
        self.callback_states = copy.deepcopy(export_states(trainer._hftrainer.stateful_callbacks()))
        self._random = rng_state()
        if torch.cuda.is_available():  # the model may be on several devices
            self._random["cuda"] = torch.cuda.get_rng_state_all()

    def _tensors_to_restore(self) -> dict[str, torch.Tensor]:
        trained = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        return {**trained, **dict(self._model.named_buffers())}

    def restore(self) -> None:
        """Restore the state.

        Raises:
            UnsupportedArgument: if weights have been unfrozen since.
        """
        if unknown := self._tensors_to_restore().keys() - self._tensors.keys():
            raise UnsupportedArgument(
                f"The run cannot return to its start, since {min(unknown)!r} has been unfrozen or added since: save a "
                "checkpoint earlier, or leave out auto_find_batch_size."
            )
        with torch.no_grad():
            for name, tensor in self._tensors_to_restore().items():
                tensor.copy_(self._tensors[name])
        self._model.zero_grad()
        for thing, state in self._others:
            thing.load_state_dict(nested_apply(_to_cpu, state))
        if self._scaler is not None and self._scale is not None:
            # Initialize the scaler, if that has not been done yet, and discard the state of the failed step.
            self._scaler.scale(next(self._model.parameters()).new_zeros(()))
            self._scaler.update(self._scale["scale"])
            self._scaler.load_state_dict(self._scale)
        restore_rng_state(self._random)


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
