"""The processes of one run: the process group, and collective operations between them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hftrainer.base.nested import map_leaves
from hftrainer.parallel.devices import DEVICE_OF_BACKEND, device_module, visible_device_count
from hftrainer.parallel.environment import RankInfo
from hftrainer.parallel.process_group import (
    CollectiveCall,
    cpu_group,
    disconnect_at_exit,
    start_in_thread,
    wait_for_ranks,
)
from hftrainer.parallel.rank_errors import show_errors_once

T = TypeVar("T")
#: Seconds between two messages of a busy rank 0 to the other ranks.
_HEARTBEAT = 10.0
#: Numbers of the process groups that this process has joined.
_group_numbers = itertools.count()


@dataclass(frozen=True)
class Processes(RankInfo):
    """The processes of a run, from the view of one of them.

    Attributes:
        tp_size: number of consecutive ranks that split each layer's computation and get the same batches.
        timeout: timeout of the gloo group for CPU tensors, which exists if the default group has another backend.
    """

    tp_size: int = 1
    timeout: timedelta = timedelta(minutes=30)

    @classmethod
    def from_ranks(cls, rank_info: RankInfo, **fields: Any) -> Processes:
        """The processes of a run, from the ranks that a launcher has set."""
        return cls(**vars(rank_info), **fields)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def data_rank(self) -> int:
        """Rank of this process in the distribution of batches."""
        return self.rank // self.tp_size

    @property
    def data_world_size(self) -> int:
        """Number of parts into which the batches are split."""
        return self.world_size // self.tp_size

    def connect(
        self, device: torch.device, backend: str | None, timeout: timedelta, *, allow_single_process: bool = False
    ) -> None:
        """Join the process group, unless the script has joined it.

        Args:
            device: the device of this process.
            backend: 'gloo', 'nccl', ...; None uses the device's default.
            timeout: timeout of a collective operation.
            allow_single_process: also make a group for a single process, which sharding needs.
        """
        if not (self.is_distributed or allow_single_process) or distributed.is_initialized():
            return
        if visible_device_count(device) is not None:
            device_module(device.type).set_device(device)
        # If imported later, this module would hold a reference to the group, which could then not be destroyed.
        importlib.import_module("torch.distributed.nn.functional")
        # On XLA, only gradients are communicated on the device.
        backend_name = "gloo" if device.type == "xla" else backend or distributed.get_default_backend_for_device(device)
        message = (
            f"Rank {self.rank} could not connect to the other {self.world_size - 1} at {self.address}:{self.port} "
            f"within ddp_timeout={timeout.total_seconds():g} s: see their own messages, and check that each process "
            "was started and reaches that address."
        )

        def join() -> None:
            size = self.world_size
            store: Any = distributed.HashStore()  # type: ignore[attr-defined]
            # Without an address, this is the only process and has no launcher.
            if self.address is not None:
                store, _, _ = next(rendezvous(f"tcp://{self.address}:{self.port}", self.rank, size, timeout=timeout))
                store.set_timeout(timeout)
                # A new prefix hides the addresses that an earlier group left in the store.
                store = PrefixStore(f"meeting {next(_group_numbers)}", store)
            distributed.init_process_group(backend_name, store=store, rank=self.rank, world_size=size, timeout=timeout)

        show_errors_once()
        hook = sys.excepthook
        wait_for_ranks(join, timeout, message)
        # torch's hook adds the rank to each line, as ours does, and adds it again for each further group.
        sys.excepthook = hook
        disconnect_at_exit()

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.is_distributed:
            with CollectiveCall("a barrier"):
                distributed.barrier()

    def start_max_over_ranks(self, values: list[int]) -> Callable[[], list[int]]:
        """Start an element-wise all-reduce (maximum) in CPU memory, without waiting for the accelerator.

        Args:
            values: the numbers; the same count in every process.

        Returns:
            A function that waits for the other ranks and returns the maxima.
        """
        numbers = torch.tensor(values)
        group = cpu_group(self.timeout)
        work: Any = distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=group, async_op=True)

        def result() -> list[int]:
            with CollectiveCall("the maximum over all ranks"):
                work.wait()
            return numbers.tolist()

        return result

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank. Waits for the other ranks, but not for the accelerator."""
        return bool(self.start_max_over_ranks([int(value)])()[0]) if self.is_distributed else value

    def broadcast_from_main(self, decide: Callable[[], T]) -> T:
        """The result of `decide` on rank 0, broadcast to all ranks. If it raises, all ranks raise."""
        if not self.is_distributed:
            return decide()
        outcomes: Any = [_capture_outcome(decide) if self.rank == 0 else None]
        with CollectiveCall("a decision of rank 0"):
            distributed.broadcast_object_list(outcomes)
        return _unwrap_outcome(outcomes[0])

    def scatter(self, make_items: Callable[[], list[T]]) -> T:
        """Scatter items from rank 0 through CPU memory, and return this rank's item.

        Args:
            make_items: called on rank 0 only; returns one item per process. If it raises, all ranks raise.
        """
        items: list[Any] | None = None
        if self.rank == 0:
            new_items, error = _capture_outcome(make_items)
            items = [(None, error)] * self.world_size if new_items is None else [(item, None) for item in new_items]
        outcomes: Any = [None]
        with CollectiveCall("its item from rank 0"):
            distributed.scatter_object_list(outcomes, items, group=cpu_group(self.timeout))
        return _unwrap_outcome(outcomes[0])

    def gather(self, data: Any, pad_index: int = -100, *, objects: bool = False, one_per_tp_group: bool = False) -> Any:
        """Gather the rows of all processes, in the order of ranks.

        Args:
            data: tensors or arrays of shape `(rows, length, ...)` in nested containers; a number is one row.
                `rows` and `length` may differ between processes; `length` is padded on the right.
            pad_index: value with which shorter rows are padded.
            objects: treat each list as a sequence of samples of any type, and concatenate the lists.
            one_per_tp_group: use the rows of only one rank of each tensor-parallel group.

        Raises:
            TypeError: for values that are not tensors, unless they are in lists and `objects` is set.
        """
        if not self.is_distributed:
            return data

        def gather_leaf(leaf: Any) -> Any:
            if isinstance(leaf, list) and objects:
                return self.gather_objects(leaf, one_per_tp_group)
            if isinstance(leaf, list):
                return self._gather_list(leaf, pad_index, one_per_tp_group)
            return _gather_leaf(leaf, pad_index, self.tp_size if one_per_tp_group else 1)

        with CollectiveCall("the rows of all ranks"):
            return map_leaves(data, (list, *LEAVES), gather_leaf)

    def gather_numbers(self, number: torch.Tensor, *, one_per_tp_group: bool = False) -> torch.Tensor:
        """Gather one number from each process, shape `(processes,)`, without waiting for an accelerator.

        Unlike `gather`, it needs neither a barrier nor the shapes on the other ranks.

        Args:
            number: one element, of the same type in every process.
            one_per_tp_group: use the number of only one rank of each tensor-parallel group.
        """
        if not self.is_distributed:
            return number.reshape(1)
        local_number = _move_to_backend_device(number).reshape(1)
        parts = [torch.empty_like(local_number) for _ in range(self.world_size)]
        with CollectiveCall("the numbers of all ranks"):
            distributed.all_gather(parts, local_number)
        return torch.cat(parts[:: self.tp_size if one_per_tp_group else 1]).to(number.device)

    def gather_for_torchmetrics(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The tensors of all ranks, one for each tensor-parallel group. torchmetrics calls this."""
        from torchmetrics.utilities.distributed import gather_all_tensors

        with CollectiveCall("the metrics of all ranks"):
            parts = gather_all_tensors(_move_to_backend_device(tensor), group)
        return [part.to(tensor.device) for part in parts[:: self.tp_size]]

    def _gather_list(self, items: list[Any], pad_index: int, one_per_tp_group: bool) -> list[Any]:
        """Gather a list of outputs that has the same length on every rank. A list of samples raises TypeError."""
        lengths = set(self.gather_objects([len(items)]))
        if len(lengths) > 1 or any(isinstance(item, Mapping) for item in items):
            raise TypeError(
                "Lists with one item per sample cannot be gathered as tensors: set eval_use_gather_object=True, "
                "and eval_do_concat_batches=False to get a list of batches."
            )
        return [self.gather(item, pad_index, one_per_tp_group=one_per_tp_group) for item in items]

    @staticmethod
    def first_rows(data: Any, count: int, *, objects: bool = False) -> Any:
        """The first rows of tensors in nested containers, and with `objects` of lists. Scalars are unchanged."""
        if objects and not isinstance(data, torch.Tensor):
            return map_leaves(data, list, lambda items: items[:count])
        return map_leaves(data, (torch.Tensor, np.ndarray), lambda rows: rows[:count] if rows.ndim else rows)

    def gather_objects(self, items: Any, one_per_tp_group: bool = False) -> Any:
        """Gather sequences of picklable items from all processes into one list; `one_per_tp_group` as in `gather`."""
        if not self.is_distributed:
            return items
        parts: list[Any] = [None] * self.world_size
        with CollectiveCall("the objects of all ranks"):
            distributed.all_gather_object(parts, items)
        return [item for part in parts[:: self.tp_size if one_per_tp_group else 1] for item in part]

    def reduce(self, data: Any, reduction: str = "sum") -> Any:
        """All-reduce tensors in nested containers: 'sum', 'mean', 'max', or 'none' for no change.

        Raises:
            ValueError: for another reduction.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction={reduction!r}: it must be 'sum', 'mean', 'max' or 'none'.")
        if not self.is_distributed or reduction == "none":
            return data

        def reduce_tensor(tensor: torch.Tensor) -> torch.Tensor:
            result = _move_to_backend_device(tensor).clone()
            distributed.all_reduce(result, distributed.ReduceOp.MAX if reduction == "max" else distributed.ReduceOp.SUM)
            return (result / self.world_size if reduction == "mean" else result).to(tensor.device)

        with CollectiveCall("a reduction over all ranks"):
            return map_leaves(data, torch.Tensor, reduce_tensor)

    def pad(self, data: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Pad a dimension of tensors in nested containers to the longest of all processes."""
        if not self.is_distributed:
            return data

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            if not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            longest = _move_to_backend_device(torch.tensor(tensor.shape[dim], device=tensor.device))
            distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
            return _pad_tensor(tensor, dim % tensor.ndim, int(longest), pad_index, pad_first)

        with CollectiveCall("the sizes on all ranks"):
            return map_leaves(data, torch.Tensor, pad)

    def split_for_rank(self, items: Any, apply_padding: bool) -> Any:
        """The rank's part of a sequence or tensor. Without padding, the first ranks may get one more item."""
        min_size, remainder = divmod(len(items), self.world_size)
        start = self.rank * min_size + min(self.rank, remainder)
        part = items[start : start + min_size + (self.rank < remainder)]
        missing = min_size + (remainder > 0) - len(part) if apply_padding else 0
        if not missing:
            return part
        if isinstance(items, torch.Tensor):
            return torch.cat([part, items[-1:].expand(missing, *items.shape[1:])])
        return part + type(part)([items[-1]]) * missing

    def run_on_main(self, work: Callable[[], None]) -> None:
        """Call `work` on rank 0. Heartbeats keep the other ranks from timing out, however long it takes."""
        if not self.is_distributed:
            work()
            return
        job = start_in_thread(work) if self.rank == 0 else None
        while not self.broadcast_from_main(lambda: _wait_for_job(job)):
            pass

    @contextlib.contextmanager
    def run_in_order(self, first: bool) -> Iterator[None]:
        """Run a block on the processes with `first=True`, then on the others."""
        if not first:
            self.barrier()
        try:
            yield
        finally:
            if first:
                self.barrier()


def _capture_outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call `function`, and return its result or its error, to send either to other ranks."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _unwrap_outcome(outcome: tuple[T, Exception | None]) -> T:
    """The result of `_capture_outcome` on rank 0. Its error is raised on this rank too."""
    value, error = outcome
    if error is not None:
        raise error
    return value


def _wait_for_job(job: Future[None] | None) -> bool:
    """Wait up to `_HEARTBEAT` seconds for the job, and return whether it ended. Raises its error."""
    assert job is not None
    ended_jobs = futures.wait([job], _HEARTBEAT).done
    for ended_job in ended_jobs:
        ended_job.result()
    return bool(ended_jobs)


#: Leaves of nested data; only tensors and arrays can be gathered.
LEAVES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex)


def _gather_leaf(leaf: Any, pad_index: int, step: int) -> Any:
    # This import takes seconds.
    from torchmetrics.utilities.distributed import gather_all_tensors

    if isinstance(leaf, np.ndarray):
        return _gather_leaf(torch.from_numpy(leaf), pad_index, step).cpu().numpy()
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"Processes can only gather tensors, not {type(leaf).__name__}: return a list with one item per "
            "sample, and set eval_use_gather_object=True."
        )
    parts = gather_all_tensors(_move_to_backend_device(leaf).reshape(leaf.shape or (1,)))[::step]
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        # Ignore empty parts.
        longest = max((part.shape[1] for part in parts if part.shape[0]), default=0)
        parts = [_pad_tensor(part[:, :longest], 1, longest, pad_index, False) for part in parts]
    return torch.cat(parts).to(leaf.device)


def _move_to_backend_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on a device that the backend supports.

    Most backends accept only tensors on their accelerator, and gloo does not accept XLA tensors.
    """
    backend = distributed.get_backend()
    device_type = next((device for name, device in DEVICE_OF_BACKEND.items() if name in backend), None)
    if device_type is not None:
        return tensor.to(torch.device(device_type, device_module(device_type).current_device()))
    return tensor.cpu() if tensor.device.type == "xla" else tensor


def _pad_tensor(tensor: torch.Tensor, dim: int, length: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    padding = length - tensor.shape[dim]
    if not padding:
        return tensor
    widths = [0, 0] * (tensor.ndim - 1 - dim) + ([padding, 0] if pad_first else [0, padding])
    return torch.nn.functional.pad(tensor, widths, value=pad_index)
