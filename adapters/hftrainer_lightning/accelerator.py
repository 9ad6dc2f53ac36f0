"""`trainer.accelerator`: the names of accelerate's `Accelerator` that scripts and libraries use, over the engine."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hftrainer_lightning.fsdp_settings import FsdpPlugin
from hftrainer_lightning.plan import LightningPlan
from hftrainer_lightning.processes import Processes

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine


class EngineAccelerator:
    """The processes of a run, each on one device, with accelerate's vocabulary.

    Args:
        engine: what runs backward.
        device: the device that training runs on.
        plan: what the arguments mean to Lightning.
        prepare_loader: prepares a `DataLoader` as the Trainer's own loaders are.

    Attributes:
        sync_gradients: whether the micro-batch in hand ends an optimizer step.
    """

    def __init__(
        self,
        engine: LightningEngine,
        device: torch.device,
        plan: LightningPlan,
        prepare_loader: Callable[[torch.utils.data.DataLoader], Any],
    ) -> None:
        processes = plan.processes
        self._engine = engine
        self._prepare_loader = prepare_loader
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.device = device
        self.mixed_precision = plan.mixed_precision
        self.sync_gradients = True
        self.processes: Processes = processes
        self.num_processes = processes.world_size
        self.process_index, self.local_process_index = processes.rank, processes.local_rank
        self.is_main_process, self.is_local_main_process = processes.rank == 0, processes.local_rank == 0
        self.is_last_process = processes.rank == processes.world_size - 1
        kind = "CPU" if device.type == "cpu" else "GPU"
        self.distributed_type = f"MULTI_{kind}" if processes.several else "NO"
        if plan.sharding is not None:
            self.distributed_type = "FSDP"
        self.scaler = engine.scaler
        self.optimizer_step_was_skipped = False
        self.parallelism_config = None
        self.state = SimpleNamespace(
            deepspeed_plugin=None,
            fsdp_plugin=None if plan.sharding is None else FsdpPlugin(plan.sharding),
            device=device,
            num_processes=processes.world_size,
            process_index=processes.rank,
            local_process_index=processes.local_rank,
            is_main_process=self.is_main_process,
            mixed_precision=plan.mixed_precision,
            distributed_type=self.distributed_type,
        )

    @property
    def gradient_state(self) -> SimpleNamespace:
        """`sync_gradients`, where accelerate also keeps it."""
        return SimpleNamespace(sync_gradients=self.sync_gradients)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward, as the precision and strategy need it."""
        self._engine.backward(loss, **kwargs)

    def prepare(self, *objects: Any) -> Any:
        """Prepare loaders and move models; optimizers and schedulers need nothing."""
        prepared = tuple(self._prepare(item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, item: Any) -> Any:
        if isinstance(item, torch.utils.data.DataLoader):
            return self.prepare_data_loader(item)
        if isinstance(item, torch.nn.Module):
            return self.prepare_model(item)
        return item

    def prepare_data_loader(self, loader: torch.utils.data.DataLoader) -> Any:
        """A loader in the Trainer's order, on its device."""
        prepared = self._prepare_loader(loader)
        self._loaders.add(prepared)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on the device, unless `device_placement` is False."""
        return model if device_placement is False else model.to(self.device)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's model; of a compiled one, the original unless `keep_torch_compile`."""
        model = getattr(model, "_fsdp_wrapped_module", model)
        original = getattr(model, "_orig_mod", None)
        return original if original is not None and not keep_torch_compile else model

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, concatenated in the first dimension."""
        return self.processes.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, but for the rows of a batch that only keeps step with the other processes.

        Args:
            input_data: tensors in nested containers, or with `use_gather_object` a sequence of anything.
            use_gather_object: pickle the data instead.
        """
        if any(loader.filler for loader in self._loaders):
            input_data = [] if use_gather_object else self.processes.without_rows(input_data)
        gather = self.processes.gather_objects if use_gather_object else self.processes.gather
        return gather(input_data, distinct=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes, summed or averaged."""
        return self.processes.reduce(tensor, reduction)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded to the longest of all processes in one dimension."""
        return self.processes.pad(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        self.processes.barrier()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients; returns their norm before."""
        return self._engine.clip_grad_norm(parameters, max_norm, norm_type)

    def autocast(self) -> Any:
        """Autocast as the training arguments ask for, for computations outside the model."""
        if self.mixed_precision == "no":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.mixed_precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def no_sync(self, model: Any = None) -> Any:
        """Keep gradients of backward passes in the block to this process."""
        return self._engine.no_sync(model)

    def main_process_first(self) -> Any:
        """Let the main process of all go first."""
        return self.processes.in_turn(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Let the main process of each node go first."""
        return self.processes.in_turn(self.is_local_main_process)

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Nothing: the Trainer accumulates by windows of micro-batches."""
        yield

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function to run on the main process only; the others get None."""
        return function if self.is_main_process else _nothing

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function to run on each node's main process only; the others get None."""
        return function if self.is_local_main_process else _nothing

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's weights; of a sharded model gathered, which all processes must ask for."""
        if not self._engine.shards:
            return model.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        offload = self.device.type != "cpu"
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Write to the trackers: there are none, `Trainer.log` keeps the history."""

    def free_memory(self, *objects: Any) -> Any:
        """Let go of objects, and of cached device memory; returns a None for each."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None for _ in objects]

    def end_training(self) -> None:
        """Close trackers and processes: there are none."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
