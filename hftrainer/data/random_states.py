"""The random states of one process: Python, NumPy, torch and accelerators."""

from __future__ import annotations

import functools
import logging
import os
import random
from typing import Any

import numpy as np
import torch

from hftrainer.compat import peers
from hftrainer.compat.reading import fitting, read_torch
from hftrainer.parallel import tpu

logger = logging.getLogger(__name__)

#: Accelerators with a generator state; the first five have the names that `transformers.Trainer` uses.
_ACCELERATORS = ("cuda", "npu", "hpu", "mlu", "musa", "xpu", "mps")


@functools.lru_cache(1)
def _accelerators() -> dict[str, Any]:
    modules = {name: getattr(torch, name, None) for name in _ACCELERATORS}
    return {name: module for name, module in modules.items() if module is not None and module.is_available()}


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])


def rng_state() -> dict[str, Any]:
    """The random states of this process, in the form that `transformers.Trainer` reads."""
    states = {**random_states(), **{name: module.get_rng_state() for name, module in _accelerators().items()}}
    if (xla := peers.xla_in_use()) is not None:
        states["xla"] = xla.get_rng_state()
    if tpu.module.in_use():
        states["tpu"] = tpu.module.get_rng_state()
    return states


def save_rng_state(path: str) -> None:
    """Write the random states of this process to `path`."""
    torch.save(rng_state(), path)


def load_rng_state(path: str) -> None:
    """Restore the random states in `path`; if the file is missing, log that resuming is not exact."""
    if not os.path.isfile(path):
        logger.warning("%s not found: training resumes with other random numbers than an uninterrupted run.", path)
        return
    with torch.serialization.safe_globals(numpy_state_types()):
        states = read_torch(path)
    with fitting(path):
        restore_rng_state(states)


def restore_rng_state(states: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    restore_random_states(states)
    for name, module in _accelerators().items():
        if isinstance(states.get(name), list):  # one for each device, as saved by distributed runs of transformers
            module.set_rng_state_all(states[name])
        elif name in states:
            module.set_rng_state(states[name])
    if "xla" in states and (xla := peers.xla_in_use()) is not None:
        xla.set_rng_state(states["xla"])
    if "tpu" in states and tpu.module.in_use():
        tpu.module.set_rng_state(states["tpu"])


def numpy_state_types() -> list[Any]:
    """The only types that unpickling a NumPy random state needs."""
    core = np._core if hasattr(np, "_core") else np.core  # renamed in NumPy 2.0
    dtypes = [type(np.dtype(number)) for number in (np.uint32, np.uint64)]
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, *dtypes]
