"""One device for the tests' own process, deterministic kernels, and the names of the devices in the header."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic kernels ask for
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs must not begin to use all of them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # checkpoints would have the random states of GPUs

import pytest
import torch

pytest.register_assert_rewrite("tests.support.parity", "tests.gpu.support")

from tests.gpu import ranks, support  # noqa: E402  after the asserts of these are to be rewritten


def pytest_configure(config):
    """Show one device to the Trainers in this process: with several, transformers would use nn.DataParallel."""
    if support.DEVICE not in ("cpu", "cuda"):
        raise pytest.UsageError(f"DEVICE={support.DEVICE}: it must be cpu or cuda.")
    if ranks.DEVICES == 0:
        raise pytest.UsageError(f"DEVICE=cuda, but torch {torch.__version__} finds no GPU.")
    if support.ON_GPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ranks.VISIBLE.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        torch.cuda.init()
        if torch.cuda.device_count() != 1:
            raise pytest.UsageError("CUDA was in use before it was limited: set CUDA_VISIBLE_DEVICES to one device.")


def pytest_report_header():
    names = f"{ranks.DEVICES} x {torch.cuda.get_device_name()}" if support.ON_GPU else "gloo in place of NCCL"
    return f"DEVICE={support.DEVICE}: {names}; torch {torch.__version__}"


@pytest.fixture(autouse=True)
def _deterministic():
    """Exact comparisons need kernels that add up in the same order each time, from factors that are not rounded."""
    threads = torch.get_num_threads()
    support.be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    support.set_float32(tf32=False)  # `torch_compile` allows it
