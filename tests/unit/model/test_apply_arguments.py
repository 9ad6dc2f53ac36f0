"""Arguments that change how a model computes: when TF32 is allowed, and where it is refused."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer.errors import InvalidArgument
from hftrainer.model.apply_arguments import set_tf32
from tests.support.parity import build

#: tf32, torch_compile, fp16 → whether TF32 is allowed afterwards.
TF32 = {(True, False, False): True, (False, False, False): False, (None, False, False): "as before"}
TF32 |= {(None, True, False): True, (None, True, True): "as before", (False, True, False): False}


@pytest.mark.parametrize("case", TF32, ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_tf32_argument_sets_the_flags_of_torch(monkeypatch, case, before):
    """As on a GPU that has it; tests/gpu compares with transformers on one."""
    tf32, compiled, fp16 = case
    args = SimpleNamespace(tf32=tf32, torch_compile=compiled, torch_compile_backend=None, fp16=fp16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    found = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
        set_tf32(args)
        expected = before if TF32[case] == "as before" else TF32[case]
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is expected
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = found, True


def test_tf32_without_a_gpu_is_refused(tmp_path):
    build("hftrainer", "plain", tmp_path, tf32=False)
    with pytest.raises(InvalidArgument, match="tf32=True needs an NVIDIA GPU"):
        build("hftrainer", "plain", tmp_path, tf32=True)
