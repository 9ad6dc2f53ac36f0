"""fp16, bf16 by the launcher, tf32."""

import itertools

import pytest
import torch

from hftrainer.errors import InvalidArgument
from tests.support.parity import assert_same, assert_same_weights, build, compare, record, train


def test_launcher_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ours = compare(tmp_path / "bf16", "bert")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    plain = train("hftrainer", "bert", tmp_path / "fp32")
    assert ours.logs != plain.logs


def train_in_fp16(name, model, folder, resume=None, first_scale=2.0**16, **settings):
    """transformers leaves fp16 out on a CPU; here it gets what it has on a GPU."""
    trainer, recorder = build(name, model, folder, fp16=True, logging_steps=1, **{"optim": "adamw_torch", **settings})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
    if name == "transformers":
        trainer.accelerator.native_amp = True
    else:
        trainer._hftrainer.engine.scaler = trainer.accelerator.scaler
    trainer.train(resume_from_checkpoint=resume)
    scale = trainer.accelerator.scaler.state_dict()
    return record(trainer, recorder, folder, scale=scale)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["llama", "plain"])
@pytest.mark.parametrize("first_scale", [2.0**16, 2.0**26], ids=["fits", "overflows"])
def test_fp16(tmp_path, model, first_scale, accumulation):
    """Losses, norms, rates and scales; a step that is skipped does not move the schedule on."""
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 12, "first_scale": first_scale}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    ours = train_in_fp16("hftrainer", model, tmp_path / "ours", **settings)
    assert_same(ours, train_in_fp16("transformers", model, tmp_path / "theirs", **settings))
    assert "scaler.pt" in ours.files["checkpoint-4"]
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    skipped = sum(before == after for before, after in itertools.pairwise(rates))
    assert (skipped > 1) is (first_scale > 2**16)
    for origin in ("ours", "theirs"):
        folder = str(tmp_path / origin / "checkpoint-4")
        resumed = train_in_fp16("hftrainer", model, tmp_path / "ours", folder, **settings)
        assert_same_weights(resumed.weights, ours.weights)
        assert resumed.extra == ours.extra


def test_fp16_with_fused_steps(tmp_path):
    """The fused optimizer leaves steps out by itself, which transformers does not see, and moves the rate on."""
    settings = {"max_steps": 12, "first_scale": 2.0**26}
    fused = train_in_fp16("hftrainer", "llama", tmp_path / "a", optim="adamw_torch_fused", **settings)
    plain = train_in_fp16("hftrainer", "llama", tmp_path / "b", **settings)
    assert fused.logs[:-1] == plain.logs[:-1]


def test_fp16_with_a_training_step_of_ones_own(tmp_path):
    def own(library):
        class Own(library.Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                return super().training_step(model, inputs, num_items_in_batch)

        return Own

    settings = {"max_steps": 12, "gradient_accumulation_steps": 2, "first_scale": 2.0**26}
    automatic = train_in_fp16("hftrainer", "plain", tmp_path / "a", **settings)
    manual = train_in_fp16("hftrainer", "plain", tmp_path / "b", trainer_class=own, **settings)
    assert_same_weights(manual.weights, automatic.weights)
    assert manual.logs[:-1] == automatic.logs[:-1]


def test_tf32(tmp_path, monkeypatch):
    make = lambda value: build("hftrainer", "plain", tmp_path, tf32=value)  # noqa: E731
    with pytest.raises(InvalidArgument, match="tf32=True needs an NVIDIA GPU"):
        make(True)
    make(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    from hftrainer.model.changes import set_tf32

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for value in (True, False):
            set_tf32(value)
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is value
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
