"""Precisions, the gradient scaler and torch.compile give the numbers of transformers on the same device."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from tests.gpu import support
from tests.gpu.support import DEVICE, HERE, ON_GPU, assert_as_transformers, build, needs_gpu, set_float32, train

SAVING = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_bfloat16_matches_transformers(tmp_path, model, accumulation):
    settings = {**HERE, **SAVING, "gradient_accumulation_steps": accumulation}
    ours = assert_as_transformers(lambda library: train(library, model, tmp_path / library, bf16=True, **settings))
    assert ours.logs != train("hftrainer", model, tmp_path / "float32", **settings).logs


#: Optimizer, and the first scale of the loss. What is skipped by a fused optimizer, transformers does not notice: see
#: "fp16 with fused AdamW" in compatibility.toml.
FP16 = {"fits": ("adamw_torch", 1024.0), "overflows": ("adamw_torch", 2.0**24), "fused": ("adamw_torch_fused", 1024.0)}


@needs_gpu("there transformers trains in float32 without a word")
@pytest.mark.parametrize("case", FP16)
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_float16_scaler_matches_transformers(tmp_path, model, case):
    """A step whose scaled gradients overflow is skipped, halves the scale, and does not move the schedule on."""
    optim, first_scale = FP16[case]

    def run(library):
        settings, folder = {**HERE, **SAVING, "fp16": True, "optim": optim, "logging_steps": 1}, tmp_path / library
        trainer, recorder = build(library, model, folder, **settings)
        scaler = trainer.accelerator.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": first_scale})
        trainer.train()
        return support.record(trainer, recorder, folder, scaler=scaler.state_dict())

    ours = assert_as_transformers(run)
    assert (ours.extra["scaler"]["scale"] < first_scale) is (case == "overflows")
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    assert any(before == after for before, after in itertools.pairwise(rates)) is (case == "overflows")
    assert "scaler.pt" in ours.files["checkpoint-4"]


@pytest.mark.parametrize(("model", "bf16"), [("plain without dropout", False), ("llama without dropout", True)])
def test_torch_compile_matches_transformers(tmp_path, model, bf16):
    """By inductor on a GPU; on the CPU by a backend that needs no compiler, which has to give the same bits."""
    backend = "inductor" if ON_GPU else "aot_eager"
    settings = {**HERE, "torch_compile": True, "torch_compile_backend": backend, "bf16": bf16, "max_steps": 4}

    def run(library):
        torch._dynamo.reset()
        counters.clear()
        found = train(library, model, tmp_path / library, logging_steps=1, **settings)
        assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        return found

    def close(ours, theirs):
        # inductor times kernels and takes the fastest, so equal bits are not promised: ours and theirs may add up in
        # another order (float32, 24 bits), or round to bfloat16 (8 bits) elsewhere, which a few steps multiply.
        support.assert_close(ours.logs, theirs.logs, 2e-2 if bf16 else 1e-4)
        assert ours.events == theirs.events
        if not ON_GPU:
            support.assert_same(ours, theirs)

    assert_as_transformers(run, close)


@needs_gpu("there is no TF32")
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True}, {"tf32": True}, {"tf32": False}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_tf32_setting_matches_transformers(tmp_path, compiled, settings):
    """Products of float32 matrices, after a Trainer was made, have the bits of float32 or of TF32."""
    factor = torch.randn(512, 512, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))

    def product(library):
        set_float32(tf32=False)
        if library != "neither":
            build(library, "plain", tmp_path / library, torch_compile=compiled, **settings, **HERE)
        return factor @ factor

    exact, theirs, ours = product("neither"), product("transformers"), product("hftrainer")
    set_float32(tf32=True)
    assert not torch.equal(exact, factor @ factor)
    # What accelerate does about tf32=False and torch_compile is in compatibility.toml.
    assert torch.equal(ours, exact if settings == {"tf32": False} else theirs)
