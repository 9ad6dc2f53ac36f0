"""`accelerator.state`: the processes of a run under the names of accelerate's `AcceleratorState` and `PartialState`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hftrainer.parallel.processes import Processes


@dataclass
class LoaderConfig:
    """`accelerator.dataloader_config`: changes take effect for loaders prepared afterwards.

    Attributes:
        split_batches, dispatch_batches, even_batches, use_seedable_sampler, non_blocking: as in `accelerator_config`.
        data_seed: seed of the order of samples; None uses torch's initial seed.
        use_stateful_dataloader: accelerate's own way to restore the position in the data; only False is supported.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


class DistributedType(str, Enum):
    """Accelerate's names for the kinds of processes; equal to its own members and to their values."""

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
    def of(cls, device: str, *, several: bool) -> DistributedType:
        """The type of replicas on a kind of device."""
        return cls(f"MULTI_{'GPU' if device == 'cuda' else device.upper()}") if several else cls.NO


class ProcessState:
    """The processes of a run, seen from this one.

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
        self.process_index, self.local_process_index = processes.rank, processes.local_rank
        self.is_main_process, self.is_local_main_process = processes.rank == 0, processes.local_rank == 0
        self.is_last_process = processes.rank == processes.world_size - 1
        self.use_distributed = processes.several
        connected = processes.several and torch.distributed.is_initialized()
        self.backend = torch.distributed.get_backend() if connected else None
        self.debug = False
        self.initialized = True
        vars(self).update(more)

    def __repr__(self) -> str:
        shown = ("distributed_type", "num_processes", "process_index", "local_process_index", "device")
        precision = ("mixed_precision",) if hasattr(self, "mixed_precision") else ()
        return "".join(f"{name}: {getattr(self, name)}\n" for name in (*shown, *precision))

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        self._processes.barrier()

    def main_process_first(self) -> Any:
        """Run the block in rank 0 first."""
        return self._processes.in_turn(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """Run the block in the main process of each node first."""
        return self._processes.in_turn(self.is_local_main_process)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """The part of this process of a sequence, tensor, or dict of them; the first ranks get one item more.

        Args:
            inputs: what to split; the values of a dict have the same length.
            apply_padding: repeat the last item, so that all parts have the same length.

        Raises:
            ValueError: for a dict of different lengths.
        """
        parts = inputs.values() if isinstance(inputs, dict) else [inputs]
        if len({len(part) for part in parts}) > 1:
            raise ValueError("split_between_processes: all values of the dict must have the same length.")
        if isinstance(inputs, dict):
            yield {name: self._processes.part_of(part, apply_padding) for name, part in inputs.items()}
        else:
            yield self._processes.part_of(inputs, apply_padding)
