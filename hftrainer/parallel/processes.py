"""The processes of one run: where this one stands among them, and what they tell each other."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import distributed

from hftrainer.parallel.devices import ON_DEVICE, count_of
from hftrainer.parallel.environment import RankInfo

T = TypeVar("T")
#: Seconds after which a main process at work is heard from.
_HEARTBEAT = 10.0


@dataclass(frozen=True)
class Processes(RankInfo):
    """The processes of a run, seen from one of them.

    Attributes:
        tp_size: neighbouring processes that get the same batches, since they share each layer's computation.
    """

    tp_size: int = 1

    @classmethod
    def at(cls, rank_info: RankInfo, tp_size: int = 1) -> Processes:
        """The processes seen from a place, in groups of `tp_size`."""
        return cls(**vars(rank_info), tp_size=tp_size)

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def data_rank(self) -> int:
        """Number of this process's batches among those of all."""
        return self.rank // self.tp_size

    @property
    def data_processes(self) -> int:
        """In how many parts the batches are shared out."""
        return self.world_size // self.tp_size

    def connect(
        self, device: torch.device, backend: str | None, timeout: timedelta, *, even_alone: bool = False
    ) -> None:
        """Join the process group, unless the script already has.

        Args:
            device: what this process computes on.
            backend: 'gloo', 'nccl', ...; None takes the device's own.
            timeout: how long a collective operation may take.
            even_alone: make a group of one process too, as sharding needs it.
        """
        if not (self.several or even_alone) or distributed.is_initialized():
            return
        if count_of(device) is not None:
            torch.get_device_module(device).set_device(device)
        if device.type == "xla":  # gradients aside, processes talk through the host's memory
            backend = "gloo"
        chosen = backend or distributed.get_default_backend_for_device(device)
        meeting: dict[str, Any] = {"init_method": f"tcp://{self.address}:{self.port}"}
        if self.address is None:  # alone, without a launcher
            meeting = {"store": distributed.HashStore()}  # type: ignore[attr-defined]
        distributed.init_process_group(chosen, **meeting, rank=self.rank, world_size=self.world_size, timeout=timeout)
        atexit.register(_disconnect)

    @staticmethod
    def disconnect() -> None:
        """Leave the process group, if there is one."""
        _disconnect()

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.several:
            distributed.barrier()

    def highest(self, values: list[int], timeout: timedelta) -> list[int]:
        """The highest of all processes for each of a few numbers, without waiting for an accelerator.

        Args:
            values: as many in every process.
            timeout: how long it may take, where the accelerators have a backend of their own.
        """
        numbers = torch.tensor(values)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=_group_on_host(timeout))
        return numbers.tolist()

    def from_main(self, decide: Callable[[], T]) -> T:
        """What the main process finds by calling `decide`; the others wait for it, and raise what it raises."""
        if not self.several:
            return decide()
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = decide()
            except Exception as error:
                found[1] = error
        distributed.broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def scatter(self, make: Callable[[], list[T]], timeout: timedelta) -> T:
        """One item for this process of those that the main process makes, through the host's memory.

        Args:
            make: called by the main process alone; an item for each process. What it raises, all raise.
            timeout: how long it may take, where the accelerators have a backend of their own.
        """
        items: list[Any] | None = None
        if self.rank == 0:
            try:
                items = [(item, None) for item in make()]
            except Exception as error:
                items = [(None, error)] * self.world_size
        received: list[Any] = [None]
        distributed.scatter_object_list(received, items, group=_group_on_host(timeout))
        item, raised = received[0]
        if raised is not None:
            raise raised
        return item

    def gather(self, data: Any, pad_index: int = -100, *, objects: bool = False, distinct: bool = False) -> Any:
        """The rows of all processes for those of this one, in the order of the ranks.

        Args:
            data: tensors or arrays of shape `(rows, length, ...)` in nested containers; numbers count as one row. The
                processes may differ in `rows`, and in `length`, which is padded on the right.
            pad_index: what shorter rows are padded with.
            objects: take each list as a sequence of samples, which may be anything, and join the lists.
            distinct: take one of those processes that have the same batches.

        Raises:
            TypeError: for other things than tensors, unless they are in lists and `objects` is set.
        """
        if not self.several:
            return data

        def gathered(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return self.gather_objects(leaf, distinct) if objects else self._gather_list(leaf, pad_index, distinct)
            return _gathered(leaf, pad_index, self.tp_size if distinct else 1)

        return apply_to_collection(data, (list, *_LEAVES), gathered)

    def distinct_parts(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The tensors of all processes, of one of those that have the same batches; for torchmetrics."""
        from torchmetrics.utilities.distributed import gather_all_tensors

        return [part.to(tensor.device) for part in gather_all_tensors(_reachable(tensor), group)[:: self.tp_size]]

    def _gather_list(self, items: list[Any], pad_index: int, distinct: bool) -> list[Any]:
        """A list of outputs, of the same length in every process; a list of samples would be mixed up."""
        lengths = set(self.gather_objects([len(items)]))
        if len(lengths) > 1 or any(isinstance(item, Mapping) for item in items):
            raise TypeError(
                "Processes cannot gather a list with one item a sample as tensors: set eval_use_gather_object=True, "
                "and eval_do_concat_batches=False to get a list of batches."
            )
        return [self.gather(item, pad_index, distinct=distinct) for item in items]

    @staticmethod
    def first_rows(data: Any, count: int, *, objects: bool = False) -> Any:
        """The first rows of tensors in nested containers, or with `objects` of lists; what has no rows stays."""
        if objects and not isinstance(data, torch.Tensor):
            return apply_to_collection(data, list, lambda items: items[:count])
        return apply_to_collection(data, (torch.Tensor, np.ndarray), lambda rows: rows[:count] if rows.ndim else rows)

    def gather_objects(self, items: Any, distinct: bool = False) -> Any:
        """The items of all processes' sequences in one list, whatever can be pickled; `distinct` as in `gather`."""
        if not self.several:
            return items
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, items)
        return [item for part in gathered[:: self.tp_size if distinct else 1] for item in part]

    def reduce(self, data: Any, reduction: str = "sum") -> Any:
        """Tensors in nested containers, reduced over all processes: 'sum', 'mean', 'max', or 'none' for as they are.

        Raises:
            ValueError: for another reduction.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction={reduction!r}: it must be 'sum', 'mean', 'max' or 'none'.")
        if not self.several or reduction == "none":
            return data

        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            result = _reachable(tensor).clone()
            distributed.all_reduce(result, distributed.ReduceOp.MAX if reduction == "max" else distributed.ReduceOp.SUM)
            return (result / self.world_size if reduction == "mean" else result).to(tensor.device)

        return apply_to_collection(data, torch.Tensor, reduced)

    def pad(self, data: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Tensors in nested containers, padded in one dimension to the longest of all processes."""

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            if not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            longest = _reachable(torch.tensor(tensor.shape[dim], device=tensor.device))
            distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
            return _padded(tensor, dim % tensor.ndim, int(longest), pad_index, pad_first)

        return apply_to_collection(data, torch.Tensor, pad) if self.several else data

    def part_of(self, items: Any, padded: bool) -> Any:
        """The part of this process in a sequence or tensor; the first get one more, unless all are padded."""
        least, extra = divmod(len(items), self.world_size)
        start = self.rank * least + min(self.rank, extra)
        part = items[start : start + least + (self.rank < extra)]
        missing = least + (extra > 0) - len(part) if padded else 0
        if not missing:
            return part
        if isinstance(items, torch.Tensor):
            return torch.cat([part, items[-1:].expand(missing, *items.shape[1:])])
        return part + type(part)([items[-1]]) * missing

    def while_main_works(self, work: Callable[[], None]) -> None:
        """Call `work` in the main process, however long it takes; the others hear from it meanwhile."""
        if not self.several:
            work()
            return
        job = _begun(work) if self.rank == 0 else None
        while not self.from_main(lambda: _has_ended(job)):
            pass

    @contextlib.contextmanager
    def in_turn(self, first: bool) -> Iterator[None]:
        """Run a block in the processes that go first, then in the others."""
        if not first:
            self.barrier()
        try:
            yield
        finally:
            if first:
                self.barrier()


def _begun(work: Callable[[], None]) -> Future[None]:
    """Call `work` in a thread that Python does not wait for when it is interrupted."""
    job: Future[None] = Future()

    def run() -> None:
        try:
            work()
            job.set_result(None)
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, name="main-works", daemon=True).start()
    return job


def _has_ended(job: Future[None] | None) -> bool:
    """Whether the main process is done, asked for some seconds; what went wrong there is raised."""
    assert job is not None
    ended = futures.wait([job], _HEARTBEAT).done
    for each in ended:
        each.result()
    return bool(ended)


@functools.cache
def _group_on_host(timeout: timedelta) -> Any:
    """A group of all processes for tensors in the host's memory; None is the default one."""
    backends = distributed.get_backend()
    return None if "gloo" in backends else distributed.new_group(backend="gloo", timeout=timeout)


def _disconnect() -> None:
    """Leave the group while Python still runs.

    Gloo's threads let go of tensors late, which takes Python's lock; a process that ends meanwhile is aborted. They are
    waited for when the group is destroyed, which needs that nothing holds it any more.
    """
    if distributed.is_initialized():
        _group_on_host.cache_clear()  # another Trainer may join one anew
        gc.collect()
        distributed.destroy_process_group()


#: What ends a nested structure; of these only tensors and arrays can be gathered.
_LEAVES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bool, int, float, complex)


def _gathered(leaf: Any, pad_index: int, every: int) -> Any:
    from torchmetrics.utilities.distributed import gather_all_tensors  # seconds of imports, for several processes only

    if isinstance(leaf, np.ndarray):
        return _gathered(torch.from_numpy(leaf), pad_index, every).cpu().numpy()
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"Processes can only gather tensors, got a {type(leaf).__name__}: put it into a list with one item a "
            "sample, and set eval_use_gather_object=True."
        )
    return _joined(gather_all_tensors(torch.atleast_1d(_reachable(leaf)))[::every], pad_index).to(leaf.device)


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the other processes can have it.

    Most backends take what is on their accelerator only, and gloo takes nothing of XLA's.
    """
    kind = next((device for name, device in ON_DEVICE.items() if name in distributed.get_backend()), None)
    if kind is not None:
        return tensor.to(torch.device(kind, torch.get_device_module(kind).current_device()))
    return tensor.cpu() if tensor.device.type == "xla" else tensor


def _joined(parts: list[torch.Tensor], pad_index: int) -> torch.Tensor:
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        longest = max((part.shape[1] for part in parts if part.shape[0]), default=0)  # fillers do not count
        parts = [_padded(part[:, :longest], 1, longest, pad_index, False) for part in parts]
    return torch.cat(parts)


def _padded(tensor: torch.Tensor, dim: int, length: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    widths = [0, 0] * (tensor.ndim - 1 - dim) + ([missing, 0] if pad_first else [0, missing])
    return torch.nn.functional.pad(tensor, widths, value=pad_index)
