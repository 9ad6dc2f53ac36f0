"""What the tests of a device share: which device, models for it, and comparisons with transformers."""

import functools
import os

import pytest
import torch
from torch import nn
from transformers.utils import import_utils

from hftrainer import TrainerCallback
from tests.support.parity import assert_same, assert_same_weights, build, comparable, record, train
from tests.support.small_models import MODELS, language_data, make_llama, make_plain, plain_data, without_dropout

#: For the tests.
__all__ = ["assert_same", "assert_same_weights", "build", "comparable", "plain_data", "record", "train"]
DEVICE = os.environ.get("DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
#: Arguments of every run.
HERE = {"use_cpu": not ON_GPU}
#: Features of the wide model: on a GPU its weights take 33 MB, and the outputs of 64 samples 0.5 MB.
WIDTH = 2048 if ON_GPU else 64


class Wide(nn.Module):
    """Weights and outputs that are large beside all else that a run keeps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_wide():
    torch.manual_seed(1)
    return Wide()


#: Without dropout, since several processes draw other masks than one; 40 samples, since 8 divides them.
MODELS["llama without dropout"] = (without_dropout(make_llama), functools.partial(language_data, 40))
MODELS["plain without dropout"] = (without_dropout(make_plain), functools.partial(plain_data, 40))
MODELS["wide"] = (make_wide, plain_data)


class ForbidWaiting(TrainerCallback):
    """Makes waiting for the device an error in all steps from the fourth; counts the steps.

    Log lines may wait, and so may a model's forward: transformers' models read their attention mask.
    """

    def __init__(self):
        self.steps = []
        self._mode = 0

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.register_forward_pre_hook(self._allow)
        model.register_forward_hook(self._forbid_again)

    def _allow(self, *_):
        self._mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")

    def _forbid_again(self, *_):
        torch.cuda.set_sync_debug_mode(self._mode)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:  # the first steps allocate
            torch.cuda.set_sync_debug_mode("error")
            with pytest.raises(RuntimeError, match="synchroniz"):  # or the mode would show nothing
                torch.ones(1, device="cuda").item()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.get_sync_debug_mode():
            self.steps.append(state.global_step)
        if control.should_log:
            torch.cuda.set_sync_debug_mode("default")


def needs_gpu(reason):
    return pytest.mark.skipif(not ON_GPU, reason=f"DEVICE=cpu: {reason}")


def be_deterministic():
    """The settings of a process under which the same run gives the same bits."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling memory that NCCL's stream still uses made gradients NaN: https://github.com/pytorch/pytorch/issues/147810
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_float32(tf32):
    """Let matrix products round their factors to TF32, or do as in a fresh process."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "none"
    if enable_tf32 := getattr(import_utils, "enable_tf32", None):
        enable_tf32.cache_clear()  # or transformers would not set it a second time


def assert_as_transformers(run, same=assert_same):
    """Assert that `run(library)` gives the same record with both libraries; returns ours."""
    theirs, ours = run("transformers"), run("hftrainer")
    assert {tensor.device.type for tensor in ours.weights.values()} == {DEVICE}
    same(ours, theirs)
    return ours


def assert_close(logs, expected, relative):
    """The same log lines, but for rounding."""
    assert [list(line) for line in logs] == [list(line) for line in expected]
    for line, other in zip(logs, expected, strict=True):
        numbers = {name: value for name, value in other.items() if value != "measured"}
        assert {name: line[name] for name in numbers} == pytest.approx(numbers, rel=relative)
