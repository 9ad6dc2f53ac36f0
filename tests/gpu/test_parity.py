"""The same numbers as transformers on the same device: precisions, the gradient scaler, torch.compile."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from tests.gpu.support import (
    HERE,
    ON_GPU,
    assert_as_transformers,
    assert_close,
    assert_same,
    build,
    needs_gpu,
    record,
    train,
)

SAVING = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_bfloat16(tmp_path, model, accumulation):
    settings = {**HERE, **SAVING, "gradient_accumulation_steps": accumulation}
    ours = assert_as_transformers(lambda library: train(library, model, tmp_path / library, bf16=True, **settings))
    assert ours.logs != train("hftrainer", model, tmp_path / "float32", **settings).logs


def train_in_float16(library, model, folder, first_scale, **settings):
    trainer, recorder = build(library, model, folder, fp16=True, logging_steps=1, **HERE, **SAVING, **settings)
    scaler = trainer.accelerator.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": first_scale})
    trainer.train()
    return record(trainer, recorder, folder, scaler=scaler.state_dict())


@needs_gpu("transformers has no gradient scaler there; tests/parity/test_precision.py gives it one")
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("model", ["bert", "llama"])
@pytest.mark.parametrize("first_scale", [2.0**16, 2.0**24], ids=["fits", "overflows"])
def test_float16(tmp_path, model, optim, first_scale):
    """Also where the scaled gradients overflow: such a step changes no weight, and the scale is halved."""

    def run(library):
        return train_in_float16(library, model, tmp_path / library, first_scale, optim=optim)

    ours = assert_as_transformers(run)
    if first_scale > 2**16:
        assert ours.extra["scaler"]["scale"] < first_scale
        rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
        # Only the optimizer that is not fused tells of the steps that it skips; then the schedule stays too.
        assert any(before == after for before, after in itertools.pairwise(rates)) is (optim == "adamw_torch")
    assert "scaler.pt" in ours.files["checkpoint-4"]


@pytest.mark.parametrize("model, bf16", [("plain without dropout", False), ("llama without dropout", True)])
def test_compiled(tmp_path, model, bf16):
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
        assert_close(ours.logs, theirs.logs, 2e-2 if bf16 else 1e-4)
        assert ours.events == theirs.events
        if not ON_GPU:
            assert_same(ours, theirs)

    assert_as_transformers(run, close)
