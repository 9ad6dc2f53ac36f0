"""`Strategy`: how the processes of a run share one model, its optimizer and its checkpoints."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hftrainer.base.nested import nested_apply
from hftrainer.errors import InvalidArgument, InvalidSetup
from hftrainer.optimizers.optimizer_setup import call_create_scheduler
from hftrainer.parallel.plan import TRUE_TYPES, LightningPlan
from hftrainer.parallel.process_state import DistributedType

#: Returns the optimizer. The first call makes it, since some strategies never need it.
MakeOptimizer = Callable[[], torch.optim.Optimizer]
#: Calls a write function, the first argument, with the values to write, the second argument.
CallWrite = Callable[[Callable[[Any], None], Any], None]
#: Attributes that name the strategy in transformers' Trainer, for scripts. Only those of the active strategy are True.
TRAINER_FLAGS = (
    *("is_deepspeed_enabled", "is_fsdp_enabled"),
    *("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"),
)
#: Devices whose torch module has its own loss scaler.
_WITH_SCALER = ("npu", "mlu", "musa")


def is_deepspeed_engine(model: Any) -> bool:
    """Whether a model is wrapped in DeepSpeed's engine."""
    library = sys.modules.get("deepspeed")
    return library is not None and isinstance(model, library.DeepSpeedEngine)


class Strategy(ABC):
    """How processes share one model. All processes must call communicating methods at the same point.

    Args:
        plan: the training arguments, translated for Lightning.

    Attributes:
        initial_plan: this plan, from the Trainer's creation; `engine.plan` includes later changes.
        argument: the argument that selects the strategy, for error messages.
        flags: the Trainer attributes that are True with this strategy, as in transformers.
        card_name: name of the strategy on a model card; empty for no entry.
        shards_model: whether each process has only a part of the model or of the optimizer's state.
        writes_shards: whether each process writes its own shard of a checkpoint.
        saves_only_shards: whether checkpoints hold the model only in these shards, so that no other weights are saved.
        owns_scheduler: whether the schedule's state is saved and loaded with the optimizer's.
        needs_single_process_group: whether a process group is needed even for one process.
        has_fixed_accumulation: whether the number of micro-batches per step cannot change after the Trainer is made.
        autocasts_own_loops: whether the engine's autocast also works in loops that a script writes.
        needs_all_ranks_in_forward: whether all processes must run a forward pass together, since each has a part of the
            parameters.
    """

    argument = ""
    flags: tuple[str, ...] = ()
    card_name = ""
    shards_model = False
    writes_shards = False
    saves_only_shards = False
    owns_scheduler = False
    needs_single_process_group = False
    has_fixed_accumulation = False
    autocasts_own_loops = True
    needs_all_ranks_in_forward = False

    def __init__(self, plan: LightningPlan) -> None:
        self.initial_plan = plan
        self._gathered_states: dict[str, Any] = {}
        self._has_waited = False

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.initial_plan.device)

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name for this strategy."""
        return DistributedType.from_device(self.device.type, is_distributed=self.initial_plan.processes.is_distributed)

    def plugins(self) -> dict[str, Any]:
        """Accelerate's plugins, by their names in `accelerator.state`."""
        return {}

    @abstractmethod
    def make_lightning_strategy(self, settings: Any) -> Any:
        """Lightning's strategy for a run. `settings` are the `StrategySettings` of the adapter."""

    def check_optimizers(self, optimizer: Any, scheduler: Any) -> None:
        """Reject the script's optimizer or scheduler if the strategy creates its own."""

    def check_saving(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Reject an optimizer whose state the checkpoint format cannot store.

        Raises:
            InvalidArgument: if the optimizer has a state or parameter that is not the model's.
        """
        if self.initial_plan.saves_dcp:
            model_ids = {id(parameter) for parameter in model.parameters()}
            optimizer_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not optimizer_ids <= model_ids or optimizer.state_dict().keys() - {"state", "param_groups"}:
                raise InvalidArgument(
                    "checkpoint_format='dcp' stores the optimizer's state by the names of the model's parameters, but "
                    f"{type(optimizer).__name__} has a state or a parameter that is not the model's: remove "
                    "checkpoint_format."
                )

    def start(self) -> None:
        """Initialize the strategy. Called after the processes are connected, before any tensor is on a device."""

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, which keeps float16 gradients from underflowing; None for other precisions."""
        if self.initial_plan.precision != "16-mixed":
            return None
        kind = self.device.type
        amp_module = getattr(torch.get_device_module(kind), "amp", None) if kind in _WITH_SCALER else None
        return amp_module.GradScaler() if amp_module is not None else torch.amp.GradScaler(kind)

    # ---- The model ---------------------------------------------------------------------------------------------

    def move_model(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to the device.

        Raises:
            InvalidSetup: for a model whose weights were not loaded.
        """
        if empty := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
            raise InvalidSetup(
                f"{empty} is on the meta device, without values: load the weights before making a Trainer."
            )
        model.to(device)

    def prepare_model(self, trainer: Any, load_checkpoint: Callable[[], None]) -> None:
        """Shard the Trainer's model and load a checkpoint, in the order that the strategy needs.

        Args:
            trainer: the Trainer, whose model is replaced by the sharded one.
            load_checkpoint: loads the weights of the checkpoint that the run resumes from, if any. Only strategies that
                shard call it: for the others, the model already has these weights.
        """

    def prepare_evaluation(self, trainer: Any) -> None:
        """Prepare the Trainer's model for an evaluation."""
        self.prepare_model(trainer, load_checkpoint=lambda: None)

    def prepare_optimizer(self, trainer: Any, max_steps: int, folder: str | None, *, makes_both: bool) -> None:
        """Make the optimizer, let the accelerator prepare it with the model, then make the schedule.

        Args:
            trainer: the Trainer, which gets the optimizer and the schedule.
            max_steps: optimizer steps of the run.
            folder: the checkpoint that the run resumes from, if any.
            makes_both: whether `create_optimizer_and_scheduler` makes both.
        """
        if makes_both:
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        else:
            trainer.create_optimizer()
        model = trainer._wrap_model(trainer.model_wrapped)
        if model is trainer.model:
            model, trainer.optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
        else:
            # An override of _wrap_model has wrapped the model.
            trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        trainer.model_wrapped = model
        if trainer.lr_scheduler is None or not makes_both:
            call_create_scheduler(trainer, max_steps)
        if folder is not None:
            trainer._load_scaler(folder)

    def prepare_extra_model(self, model: nn.Module) -> nn.Module:
        """Distribute an additional model that a script trains in several processes."""
        return nn.parallel.DistributedDataParallel(model, **self.initial_plan.ddp)

    def is_wrapper(self, module: Any) -> bool:
        """Whether a module is a wrapper that distributes the model in its attribute `module`."""
        # With any strategy, a script may use the wrapper of DDP, DeepSpeed, FSDP1 or torch_xla.
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_deepspeed_engine(module):
            return True
        return hasattr(module, "_fsdp_wrapped_module") or "_fpw_module" in module._modules

    def gather_full_weights(self, model: nn.Module) -> dict[str, Any]:
        """The full weights by name. If they are sharded, all processes must call this method."""
        return model.state_dict()

    def summon_full_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Make the model's own methods, such as `generate`, callable in the block."""
        return contextlib.nullcontext()

    def cast_batch(self, batch: Any, model: nn.Module) -> Any:
        """The batch in the floating-point type that the model needs."""
        dtype = TRUE_TYPES.get(self.initial_plan.precision)
        return batch if dtype is None else cast_floating(batch, dtype)

    def decay_parameter_names(self, model: nn.Module) -> list[str] | None:
        """The names of the parameters with weight decay. None if they can be found in the sharded model."""
        return None

    def release_model(self) -> None:
        """Release the prepared model."""

    # ---- Optimizer steps ---------------------------------------------------------------------------------------

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients over all processes, and return their norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def no_sync(self, lightning_strategy: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes do not reduce gradients.

        Args:
            lightning_strategy: Lightning's strategy that trains; None outside of a run.
        """
        return contextlib.nullcontext()

    # ---- The device --------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed generators that `torch.manual_seed` does not seed."""

    def run_recorded_xla_operations(self) -> None:
        """Run the operations that the device has recorded. Only XLA records operations."""

    def to_cpu(self, state: Any) -> Any:
        """The state; on XLA a CPU copy, so that any process can load it."""
        return state

    # ---- Saving ------------------------------------------------------------------------------------------------

    def gather_states(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather the weights for the next checkpoint and, unless `optimizer` is None, the optimizer's state."""

    def checkpoint_weights(self, model: nn.Module) -> dict[str, Any] | None:
        """The full weights to write. An empty dict if only shards are saved, None for the model's state dict."""
        return None

    def state_files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """Yields name and contents of each file from one process, except the weights of `save_model()`.

        Args:
            optimizer: makes the optimizer whose state is saved; None for a checkpoint of only the model.
        """
        return iter(())

    def write_shards(self, folder: str, write: CallWrite) -> None:
        """Write this process's shard of a checkpoint once rank 0 has created the folder.

        Do nothing if only rank 0 writes.

        Args:
            folder: the folder.
            write: calls a function with the states that it writes, perhaps in the background.
        """
        if self.writes_shards:
            self._has_waited = True
            if self.initial_plan.processes.broadcast_from_main(lambda: True):
                self._write_shards(folder, write)

    def _write_shards(self, folder: str, write: CallWrite) -> None:
        """Write this process's shard into the existing folder."""

    def write_full_states(self, folder: str, write: CallWrite) -> None:
        """Write the states that a single process writes in DCP format; see `write_shards`."""

    def save_remaining_shards(self, folder: str) -> None:
        """Write the shards that `save_model()` has not written."""

    def end_checkpoint(self) -> None:
        """Release the gathered states. If the folder could not be created, notify the ranks that wait for it."""
        if self.writes_shards and not self._has_waited:
            self.initial_plan.processes.broadcast_from_main(lambda: False)
        self._has_waited = False
        self._gathered_states = {}

    # ---- Loading -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load a checkpoint's weights in place, and return missing and unexpected keys, or None.

        Args:
            model: the model that is trained.
            folder: the checkpoint.
            only_trainable: do not load frozen weights, as with adapters.
        """

    def load_best_model(self, model: nn.Module, folder: str, *, only_trainable: bool) -> Any:
        """Load the best checkpoint of a run at its end, as `load_weights` does."""
        return self.load_weights(model, folder, only_trainable=only_trainable)

    @abstractmethod
    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the states of optimizer and scheduler in place. Log a warning if the checkpoint has none."""


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors converted to one type."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return nested_apply(convert, batch)
