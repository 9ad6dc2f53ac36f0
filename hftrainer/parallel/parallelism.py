"""How the processes of a run share one model; FSDP, DeepSpeed and XLA have subclasses in their folders."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hftrainer.parallel.deepspeed.run import is_engine
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.process_state import DistributedType

#: Devices whose module in torch has a loss scaler of its own.
_WITH_SCALER = ("npu", "mlu", "musa")


class Parallelism:
    """The model on one device, or a replica of it in each process (DDP).

    `ModelStates` saves and loads what this object distributes, and `Preparation` decides in which order a run is
    prepared; `assembly/strategies.py` has a row for each strategy, with all three.

    Args:
        plan: the training arguments, translated for Lightning. They are those with which the Trainer was made;
            `engine.plan` has the values that have changed since.

    Attributes:
        argument: what asks for the strategy, for messages.
        flags: attributes of the Trainer that are True: transformers' names for the strategy.
        card: its name on a model card; empty for none.
        builder: the module in the adapter's `strategies` that builds Lightning's strategy.
        shards: whether each process has only a part of the model or of the optimizer's state.
        needs_group_alone: whether a process group is needed even for one process.
        fixes_accumulation: whether the micro-batches of a step cannot change after the Trainer is made.
        autocasts_own_loops: whether the engine's autocast also works in a script's own loops.
    """

    argument = ""
    flags: tuple[str, ...] = ()
    card = ""
    builder = "replicas"
    shards = False
    needs_group_alone = False
    fixes_accumulation = False
    autocasts_own_loops = True

    def __init__(self, plan: LightningPlan) -> None:
        self.plan = plan

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.plan.device)

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for it."""
        return DistributedType.of(self.device.type, several=self.plan.processes.several)

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
        """Shard the Trainer's model, where the strategy shards; Lightning's strategy makes replicas."""
        return model

    def prepare_another(self, model: nn.Module) -> nn.Module:
        """Distribute a model besides the Trainer's that a script trains in several processes."""
        return nn.parallel.DistributedDataParallel(model, **self.plan.ddp)

    def module_to_train(self, model: nn.Module) -> nn.Module:
        """The module that the training step calls."""
        return model

    def is_wrapper(self, module: Any) -> bool:
        """Whether a module distributes the module in its attribute `module`."""
        # A script may have made any of these, whatever the strategy is: DDP's, DeepSpeed's, FSDP1's, torch_xla's.
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_engine(module):
            return True
        return hasattr(module, "_fsdp_wrapped_module") or "_fpw_module" in module._modules

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The full weights by name; all processes must call it where they are sharded."""
        return model.state_dict()

    def whole_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Make the model's own methods, such as `generate`, callable in the block."""
        return contextlib.nullcontext()

    @property
    def gathers_in_forward(self) -> bool:
        """Whether all processes must run a forward pass together, since each has a part of the parameters."""
        return False

    def release(self) -> None:
        """Release the prepared model."""

    # ---- Its steps ---------------------------------------------------------------------------------------------

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients over all processes; returns their norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def without_sync(self) -> contextlib.AbstractContextManager[None] | None:
        """A block whose backward passes leave gradients local; None leaves it to Lightning's strategy."""
        return None

    # ---- The device --------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed generators that torch's seeds do not reach."""

    def end_batch(self) -> None:
        """Run the recorded operations, on devices that record them first."""

    def to_cpu(self, state: Any) -> Any:
        """A state that any process can load from a file; on the CPU, if it must be there for that."""
        return state
