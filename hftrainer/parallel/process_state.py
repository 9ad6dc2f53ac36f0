"""`accelerator.state` and `accelerator.gradient_state`, with the attributes of accelerate's classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from hftrainer.base.part import temporary_attributes
from hftrainer.parallel.processes import Processes


class DistributedType(str, Enum):
    """Accelerate's names for the kinds of processes. Members equal accelerate's members and their values."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"

    @classmethod
    def from_device(cls, device_type: str, *, is_distributed: bool) -> DistributedType:
        """The type of replicas on devices of this type."""
        return cls(f"MULTI_{'GPU' if device_type == 'cuda' else device_type.upper()}") if is_distributed else cls.NO


class ProcessState:
    """The processes of a run, from the view of this process.

    Args:
        processes: rank and world size of this process.
        device: the device of this process.
        distributed_type: accelerate's name for the kind of processes: 'NO', 'MULTI_GPU', 'FSDP', ...
        more: further attributes, such as plugins.
    """

    deepspeed_plugin: Any
    fsdp_plugin: Any
    mixed_precision: str

    def __init__(
        self, processes: Processes, device: torch.device, distributed_type: DistributedType, **more: Any
    ) -> None:
        self._processes = processes
        self.device = device
        self.distributed_type = distributed_type
        self.num_processes = processes.world_size
        self.process_index = processes.rank
        self.local_process_index = processes.local_rank
        self.is_main_process = processes.rank == 0
        self.is_local_main_process = processes.local_rank == 0
        self.is_last_process = processes.rank == processes.world_size - 1
        self.use_distributed = processes.is_distributed
        is_connected = processes.is_distributed and torch.distributed.is_initialized()
        self.backend = torch.distributed.get_backend() if is_connected else None
        self.debug = False
        self.initialized = True
        vars(self).update(more)

    def __repr__(self) -> str:
        names = ("distributed_type", "num_processes", "process_index", "local_process_index", "device")
        precision = ("mixed_precision",) if hasattr(self, "mixed_precision") else ()
        return "".join(f"{name}: {getattr(self, name)}\n" for name in (*names, *precision))

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        self._processes.barrier()

    def main_process_first(self) -> Any:
        """Run the block on rank 0 first, then on the other ranks."""
        return self._processes.run_in_order(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Run the block in the main process of each node first."""
        return self._processes.run_in_order(self.is_local_main_process)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's part of a sequence, tensor or dict. The first ranks may get one more item.

        Args:
            inputs: the data to split; the values of a dict have the same length.
            apply_padding: repeat the last item, so that all parts have the same length.

        Raises:
            ValueError: for a dict of different lengths.
        """
        parts = inputs.values() if isinstance(inputs, dict) else [inputs]
        if len({len(part) for part in parts}) > 1:
            raise ValueError("split_between_processes: all values of the dict must have the same length.")
        if isinstance(inputs, dict):
            yield {name: self._processes.split_for_rank(part, apply_padding) for name, part in inputs.items()}
        else:
            yield self._processes.split_for_rank(inputs, apply_padding)


#: The defaults of accelerate's plugin for accumulation.
_ACCUMULATION_DEFAULTS = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}


class GradientState:
    """Provides the attributes of accelerate's `GradientState`, for the prepared loaders.

    Args:
        loaders: the prepared loaders that still exist.
        processes: number of processes with their own batches.
        accumulation: the values of accelerate's accumulation plugin.

    Attributes:
        plugin_kwargs: values that differ from accelerate's. Scripts may change `num_steps`, which divides gradients.
        sync_gradients: whether this micro-batch ends an optimizer step.
    """

    def __init__(self, loaders: Iterable[Any], processes: int, accumulation: Mapping[str, Any]) -> None:
        self._loaders = loaders
        self._visible_loaders = loaders
        self._processes = processes
        self.sync_gradients = True
        self.plugin_kwargs: dict[str, Any] = {
            name: value for name, value in accumulation.items() if value != _ACCUMULATION_DEFAULTS.get(name)
        }
        # As in accelerate, both are read from `plugin_kwargs`, which lacks values that are defaults.
        self.adjust_scheduler = bool(self.plugin_kwargs.get("adjust_scheduler", False))
        self.sync_with_dataloader = bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this micro-batch ends an optimizer step. Scripts' copies of transformers' loop call this."""
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Divisor of the gradients, in addition to that of the loss: 1, except in v5.2 to v5.5."""
        return int(self.plugin_kwargs.get("num_steps", 1))

    @property
    def active_dataloader(self) -> Any:
        """The loader whose iteration started last; None outside of iterations."""
        active = (loader for loader in self._visible_loaders if loader.position.iteration)
        return max(active, key=lambda loader: loader.position.iteration, default=None)

    def limit_to_loader(self, loader: Any) -> contextlib.AbstractContextManager[None]:
        """Ignore all loaders but one in the block: the training loader stays open in evaluations."""
        visible_loaders = [candidate for candidate in self._loaders if candidate is loader]
        return temporary_attributes(self, _visible_loaders=visible_loaders)

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has yielded its last batch."""
        loader = self.active_dataloader
        return loader is not None and loader.position.is_last

    @property
    def remainder(self) -> int:
        """Samples in the last batches of all processes, 0 when they are full; -1 when unknown."""
        loader = self.active_dataloader
        size = None if loader is None else loader.samples_per_batch
        try:
            return -1 if size is None else len(loader.dataset) % (size * self._processes)
        except TypeError:
            # The dataset has no length.
            return -1
