"""The random states of one process: Python, NumPy, torch, and the accelerators."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from hftrainer.checkpointing.reading import read_torch

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """The random states of this process, in the form that `transformers.Trainer` reads."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def save_rng_state(path: str) -> None:
    """Write the random states of this process to `path`."""
    torch.save(rng_state(), path)


def load_rng_state(path: str) -> None:
    """Restore the random states in `path`; without the file, say that the run will not be reproduced exactly."""
    if not os.path.isfile(path):
        logger.warning("There is no %s: training resumes, but not with the random numbers of the first run.", path)
        return
    with torch.serialization.safe_globals(numpy_state_types()):
        states = read_torch(path)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.random.set_rng_state(states["cuda"])


def numpy_state_types() -> list[Any]:
    """What a pickled NumPy random state is made of, and nothing else."""
    core = np._core if hasattr(np, "_core") else np.core  # renamed in NumPy 2.0
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
