"""Seeds, and random states of a process, its workers, and the generators of its data."""

from __future__ import annotations

import functools
import glob
import logging
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.base.messages import log_once
from hftrainer.base.safe_loading import load_torch_file
from hftrainer.compat import libraries
from hftrainer.data.samplers import innermost
from hftrainer.parallel import devices

logger = logging.getLogger(__name__)

#: NumPy's bit generators, by class name.
_BITS = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: The name of the data's states in error messages.
DATA_STATE = "the state of the data in progress.pt"
#: Attributes of loaders, samplers, datasets and collators in which to search for generators.
_PARTS = ("batch_sampler", "sampler", "dataset", "collate_fn", "data_collator", "transform")


class RandomGenerators:
    """The generators that the data may draw from.

    Args:
        parts: name → loader, dataset or collator to search for generators.
    """

    def __init__(self, **parts: Any) -> None:
        self._parts = parts
        self._generators: list[tuple[str, Any]] = []
        self.find_generators()

    def find_generators(self) -> None:
        """Search again: some samplers make their generator at first use."""
        self._generators = [
            (f"{path}.{name}", value)
            for path, owner in self._owners_by_path().items()
            for name, value in vars(owner).items()
            if isinstance(value, _KINDS)
        ]

    def capture(self) -> dict[str, Any]:
        """The states of the global generators and of those found in the parts."""
        return {**cpu_rng_state(), "held": self.generator_states()}

    def generator_states(self) -> dict[str, Any]:
        """The states of the generators found in the parts, by path."""
        return {path: _get_state(generator) for path, generator in self._generators}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `capture` returned.

        Raises:
            DamagedCheckpoint: if the states have another form.
        """
        with name_file_in_errors(DATA_STATE):
            set_cpu_rng_state(dict(states))
            self.restore_generators(states["held"])

    def restore_generators(self, held: Mapping[str, Any]) -> None:
        """Restore the states of `generator_states`, and make generators that are made at first use.

        Call this method within `name_file_in_errors`.
        """
        owners = self._owners_by_path()
        for path, state in held.items():
            owner, _, name = path.rpartition(".")
            if owner not in owners:
                logger.warning("The checkpoint has a random state for %s, which does not exist in this run.", path)
                continue
            generator = getattr(owners[owner], name, None)
            if generator is None:
                generator = _make_generator(state)
                setattr(owners[owner], name, generator)
            _set_state(generator, state)
            # Collators discard a generator of another process (v5.24).
            if hasattr(owners[owner], f"_{name}_pid"):
                setattr(owners[owner], f"_{name}_pid", os.getpid())
        self.find_generators()

    def _owners_by_path(self) -> dict[str, Any]:
        return {path: owner for name, part in self._parts.items() for path, owner in _parts_of(part, name)}


def _parts_of(owner: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Leave out our wrappers, whose number depends on the number of processes.
    owner = innermost(owner)
    attributes = getattr(owner, "__dict__", None)
    if attributes is None or getattr(owner, "seeds_itself", False):
        return
    yield path, owner
    for name in _PARTS:
        yield from _parts_of(attributes.get(name), f"{path}.{name}")


def _get_state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "device": str(generator.device), "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": generator.bit_generator.state}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy legacy", "state": generator.get_state()}
    return {"kind": "python", "state": generator.getstate()}


def _make_generator(state: dict[str, Any]) -> Any:
    if state["kind"] == "torch":
        return torch.Generator(state["device"])
    if state["kind"] == "numpy":
        return np.random.Generator(_BITS[state["state"]["bit_generator"]]())
    return np.random.RandomState() if state["kind"] == "numpy legacy" else random.Random()


def _set_state(generator: Any, state: dict[str, Any]) -> None:
    if state["kind"] == "numpy":
        generator.bit_generator.state = state["state"]
    elif state["kind"] == "python":
        generator.setstate(state["state"])
    else:
        generator.set_state(state["state"])


#: Accelerators with a generator state; the first five have the names that `transformers.Trainer` uses.
_ACCELERATORS = ("cuda", "npu", "hpu", "mlu", "musa", "xpu", "mps")


@functools.lru_cache(1)
def _accelerators() -> dict[str, Any]:
    modules = {name: getattr(torch, name, None) for name in _ACCELERATORS}
    return {name: module for name, module in modules.items() if module is not None and module.is_available()}


def cpu_rng_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def set_cpu_rng_state(states: dict[str, Any]) -> None:
    """Restore the states that `cpu_rng_state` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])


def rng_state() -> dict[str, Any]:
    """The random states of this process, in the form that `transformers.Trainer` reads."""
    states = {**cpu_rng_state(), **{name: module.get_rng_state() for name, module in _accelerators().items()}}
    if (xla := libraries.initialized_xla_model()) is not None:
        states["xla"] = xla.get_rng_state()
    if devices.torch_tpu.is_initialized():
        states["tpu"] = devices.torch_tpu.get_rng_state()
    return states


def load_rng_file(path: str) -> None:
    """Restore the random states in `path`. If the file is missing, log that resuming is not exact."""
    if not os.path.isfile(path):
        files = glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "rng_state*.pth"))
        reason = "The number of processes has changed, and each has random states" if files else f"{path} not found"
        log_once(logger, f"{reason}: training resumes with other random numbers than an uninterrupted run.")
        return
    states = load_torch_file(path, allowed=numpy_state_types())
    with name_file_in_errors(path):
        set_rng_state(states)


def set_rng_state(states: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned."""
    set_cpu_rng_state(states)
    for name, module in _accelerators().items():
        # Distributed runs of transformers save a list with one state per device.
        if isinstance(states.get(name), list):
            module.set_rng_state_all(states[name])
        elif name in states:
            module.set_rng_state(states[name])
    if "xla" in states and (xla := libraries.initialized_xla_model()) is not None:
        xla.set_rng_state(states["xla"])
    if "tpu" in states and devices.torch_tpu.is_initialized():
        devices.torch_tpu.set_rng_state(states["tpu"])


def numpy_state_types() -> list[Any]:
    """The only types that unpickling a NumPy random state needs."""
    # NumPy 2.0 renamed this module.
    core = np._core if hasattr(np, "_core") else np.core
    dtypes = [type(np.dtype(number)) for number in (np.uint32, np.uint64)]
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, *dtypes]


# ---- Workers, which send their random states to the main process with each batch -------------------------------------


class WorkerBatch(NamedTuple):
    """A batch with its worker's random states. A named tuple, so that `pin_memory` reaches the batch.

    Attributes:
        batch: the batch.
        worker: index of the worker.
        states: the worker's random states after the batch, pickled.
    """

    batch: Any
    worker: int
    states: bytes


class StateSendingCollator:
    """A collator for workers that sends the worker's random states with each batch.

    Args:
        collate_fn: makes the batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    @functools.cached_property
    def generators(self) -> RandomGenerators:
        """The generators of this worker. Used only after the worker has its dataset."""
        info: Any = get_worker_info()
        return RandomGenerators(dataset=info.dataset, collate_fn=self.collate_fn)

    def __call__(self, samples: Any) -> WorkerBatch:
        """Collate the samples, and add the resulting random states."""
        batch, info = self.collate_fn(samples), get_worker_info()
        assert info is not None
        self.generators.find_generators()
        return WorkerBatch(batch, info.id, pickle.dumps(self.generators.capture()))


def init_worker(
    init_fn: Callable[[int], None] | None, collator: StateSendingCollator, states: Mapping[int, bytes], worker: int
) -> None:
    """Call the script's `init_fn`, then restore the worker's random states."""
    if init_fn is not None:
        init_fn(worker)
    if worker in states:
        collator.generators.restore(pickle.loads(states[worker]))


def seed_cpu(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices). `deterministic` allows only deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and allow deterministic kernels only.

    Sets the environment variables that CUDA and flash attention read.

    Args:
        seed: seed of all generators.
        warn_only: warn about an operation without a deterministic kernel instead of raising.
    """
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:  # noqa: ARG001 - torch passes the id
    """Seed a loader worker, as `worker_init_fn` of the training loader."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
