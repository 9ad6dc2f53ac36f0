from types import SimpleNamespace

import pytest
import torch

from hftrainer import TrainingArguments
from hftrainer.parallel import devices
from hftrainer_xla import devices as xla
from tests.support.refusals import SECOND


@pytest.fixture(autouse=True)
def _no_tpu(monkeypatch):
    """Hide TPUs, and the variables that tell of processes or TPUs."""
    of_processes = [word.partition("=")[0] for word in SECOND.split()]
    of_tpus = ["PJRT_DEVICE", "PJRT_LOCAL_PROCESS_COUNT", "USE_TORCH_XLA", devices.TPU_ADDRESSES]
    for name in (*of_processes, *of_tpus, *devices._TPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "count_tpu_chips", lambda: 0)


@pytest.fixture
def set_variables(monkeypatch):
    def set_variables(variables):
        for word in variables.split():
            monkeypatch.setenv(*word.split("=", 1))

    return set_variables


@pytest.fixture
def two_processes(set_variables):
    set_variables(SECOND)


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 0))


@pytest.fixture
def xpu(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)


@pytest.fixture
def on_xla(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(devices, "has_torch_xla", lambda: True)
    monkeypatch.setattr(xla, "device", lambda: torch.device("xla", 0))


@pytest.fixture
def on_torch_tpu(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "_setup_devices", SimpleNamespace(type="tpu", index=0))


@pytest.fixture
def every_backend(monkeypatch):
    for name in ("mpi", "nccl", "xccl"):
        monkeypatch.setattr(torch.distributed, f"is_{name}_available", lambda: True)


@pytest.fixture
def only_gloo(monkeypatch):
    for name in ("mpi", "nccl", "xccl"):
        monkeypatch.setattr(torch.distributed, f"is_{name}_available", lambda: False)


@pytest.fixture
def a_backend_called_smoke(monkeypatch):
    backend = torch.distributed.Backend
    monkeypatch.setattr(backend, "backend_list", [*backend.backend_list, "smoke"])
    monkeypatch.setitem(backend.backend_capability, "smoke", ["cpu"])
