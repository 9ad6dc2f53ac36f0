"""Seeds of a process and of its data workers."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices); `deterministic` also restricts torch to deterministic kernels."""
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
    """Seed a loading process; the `worker_init_fn` of the training loader."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
