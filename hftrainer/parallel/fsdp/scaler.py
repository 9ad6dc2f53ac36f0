"""The loss scaler of FSDP1."""

from __future__ import annotations

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class ShardedScaler(ShardedGradScaler):
    """Skips a step on all ranks when the gradients of one are infinite.

    torch counts the ranks where they are, in a tensor of shape `(1,)`; its fused optimizers take 0 or 1 of shape `()`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and check whether they are finite on all ranks."""
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found.update({device: value.reshape(()).clamp(max=1) for device, value in found.items()})
