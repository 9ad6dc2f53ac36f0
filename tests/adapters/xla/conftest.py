"""Collects nothing without torch_xla, which `make test-adapters ADAPTERS=xla` installs in an environment of its own."""

import importlib.util
import os

INSTALLED = importlib.util.find_spec("torch_xla") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if INSTALLED:
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    torch_xla.device()  # before any backward pass on the CPU: torch's engine counts the devices once
