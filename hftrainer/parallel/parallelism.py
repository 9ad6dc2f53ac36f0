"""How the processes of a run share one model; FSDP, DeepSpeed and XLA have subclasses in their folders."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hftrainer.parallel.plan import LightningPlan

#: Devices whose module in torch has a loss scaler of its own.
_WITH_SCALER = ("npu", "mlu", "musa")


class Parallelism:
    """The model on one device, or a replica of it in each process (DDP).

    `ModelStates` saves and loads what this object distributes, and `Preparation` decides in which order a run is
    prepared; `assembly/strategies.py` has the table of all three.

    Args:
        plan: the training arguments, translated for Lightning.

    Attributes:
        argument: the argument that asks for it, for messages.
        flags: attributes of the Trainer that are True: transformers' names for the strategy.
        lightning: the module in the adapter's `strategies` that builds Lightning's strategy.
        shards: whether each process has only a part of the model or of the optimizer's state.
        communicates_alone: whether a process group is needed even for one process.
        fixes_accumulation: whether the micro-batches of a step cannot change after the Trainer is made.
        autocasts_anywhere: whether the engine's autocast also works in a script's own loops.
    """

    argument = ""
    flags: tuple[str, ...] = ()
    lightning = "replicas"
    shards = False
    communicates_alone = False
    fixes_accumulation = False
    autocasts_anywhere = True

    def __init__(self, plan: LightningPlan) -> None:
        self.plan = plan

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.plan.device)

    @property
    def distributed_type(self) -> str:
        """Accelerate's name for it: 'NO', 'MULTI_GPU', 'FSDP', ..."""
        if not self.plan.processes.several:
            return "NO"
        kind = self.device.type
        return f"MULTI_{'GPU' if kind == 'cuda' else kind.upper()}"

    def plugins(self) -> dict[str, Any]:
        """Accelerate's plugins, by their names in `accelerator.state`."""
        return {}

    def start(self) -> None:
        """Get ready, once the processes are connected and before any tensor is on a device."""

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, which keeps float16 gradients from underflowing; None for other precisions."""
        if self.plan.precision != "16-mixed":
            return None
        kind = self.device.type
        own = getattr(torch.get_device_module(kind), "amp", None) if kind in _WITH_SCALER else None
        return own.GradScaler() if own is not None else torch.amp.GradScaler(kind)

    # ---- The model ---------------------------------------------------------------------------------------------

    def move(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to the device."""
        model.to(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the Trainer's model; unchanged here: Lightning's strategy makes the replicas."""
        return model

    def prepare_another(self, model: nn.Module) -> nn.Module:
        """Distribute a model besides the Trainer's, whose gradients are averaged over several processes."""
        return nn.parallel.DistributedDataParallel(model, **self.plan.ddp)

    def module_to_train(self, model: nn.Module) -> nn.Module:
        """The module whose forward pass is the training step's."""
        return model

    def is_wrapper(self, module: Any) -> bool:
        """Whether a module distributes the module in its attribute `module`."""
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return True
        # FSDP1's, and torch_xla's around each unit; a script may have made them.
        return hasattr(module, "_fsdp_wrapped_module") or "_fpw_module" in module._modules

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The full weights by name; where they are sharded, a collective call."""
        return model.state_dict()

    def whole_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Make the model's own methods, such as `generate`, callable in the block."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Release the prepared model."""

    # ---- Its steps ---------------------------------------------------------------------------------------------

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients over all processes; returns their norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def without_sync(self) -> contextlib.AbstractContextManager[None] | None:
        """A block whose backward passes leave gradients local; None: Lightning's strategy has one."""
        return None

    # ---- The device --------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed generators that torch's seeds do not reach."""

    def end_batch(self) -> None:
        """Run the recorded operations, on devices that record them first."""

    def to_cpu(self, state: Any) -> Any:
        """A state that any process can read from a file, whatever devices it has."""
        return state
