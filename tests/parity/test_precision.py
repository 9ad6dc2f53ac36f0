"""Precision beside transformers: fp16, bf16 set by the launcher, TF32, and the true precisions of Lightning."""

import itertools

import pytest
import torch

from hftrainer.errors import UnsupportedArgument
from tests.support.parity import assert_agree, assert_same_weights, build, compare, record, train, with_own_step
from tests.support.small_models import plain_data


def test_precision_variable_of_accelerate_sets_bf16(tmp_path, monkeypatch):
    plain = train("hftrainer", "bert", tmp_path / "fp32")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert compare(tmp_path, "bert").logs != plain.logs


#: A scale that overflows: the first steps are skipped.
HUGE = 2.0**26


def train_in_fp16(name, model, folder, resume=None, first_scale=HUGE, **settings):
    """transformers leaves fp16 out on a CPU; here it gets what it has on a GPU."""
    settings = {"optim": "adamw_torch", "fp16": True, "logging_steps": 1, "max_steps": 12, **settings}
    trainer, recorder = build(name, model, folder, **settings)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
    if name == "transformers":
        trainer.accelerator.native_amp = True
    else:
        trainer._hftrainer.engine.scaler = trainer.accelerator.scaler
    trainer.train(resume_from_checkpoint=resume)
    return record(trainer, recorder, folder, scale=trainer.accelerator.scaler.state_dict())


@pytest.mark.parametrize(
    ("model", "first_scale", "accumulation"),
    [("llama", 2.0**16, 3), ("llama", HUGE, 1), ("plain", 2.0**16, 1), ("plain", HUGE, 3)],
)
def test_fp16_scales_and_skips_alike_also_after_resuming(tmp_path, model, first_scale, accumulation):
    """A skipped step does not advance the schedule."""
    settings = {"gradient_accumulation_steps": accumulation, "first_scale": first_scale}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    ours = assert_agree(lambda name: train_in_fp16(name, model, tmp_path / name, **settings))
    assert "scaler.pt" in ours.files["checkpoint-4"]
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    skipped = sum(before == after for before, after in itertools.pairwise(rates))
    assert (skipped > 1) is (first_scale == HUGE)
    for origin in ("hftrainer", "transformers"):
        checkpoint = str(tmp_path / origin / "checkpoint-4")
        resumed = train_in_fp16("hftrainer", model, tmp_path / "hftrainer", checkpoint, **settings)
        assert_same_weights(resumed.weights, ours.weights)
        assert resumed.extra == ours.extra


OTHER_WAYS = {
    # the fused optimizer skips steps itself, unnoticed by transformers, whose schedule advances
    "fused steps": ("llama", 1, {"optim": "adamw_torch_fused"}),
    "a training step of one's own": ("plain", 2, {"trainer_class": with_own_step}),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_fp16_with_fused_steps_or_overridden_training_step(tmp_path, way):
    model, accumulation, changes = OTHER_WAYS[way]
    settings = {"gradient_accumulation_steps": accumulation}
    plain = train_in_fp16("hftrainer", model, tmp_path / "plain", **settings)
    other = train_in_fp16("hftrainer", model, tmp_path / "other", **settings, **changes)
    assert other.logs[:-1] == plain.logs[:-1]
    if "optim" not in changes:
        assert_same_weights(other.weights, plain.weights)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_true_precision_of_lightning_is_that_of_a_converted_model(tmp_path, precision, dtype):
    """transformers is given a model and data of that type."""
    data = [{**row, "x": row["x"].to(dtype)} for row in plain_data()]
    settings = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}

    def run(name):
        own = {"lightning_config": {"precision": precision}} if name == "hftrainer" else {}
        rows = plain_data() if own else data
        trainer_kwargs = {"train_dataset": rows, "eval_dataset": rows}
        trainer, recorder = build(name, "plain", tmp_path / name, trainer=trainer_kwargs, **settings, **own)
        if not own:
            trainer.model.to(dtype)
        trainer.train()
        assert torch.get_default_dtype() is torch.float32
        return record(trainer, recorder, tmp_path / name)

    ours = assert_agree(run)
    assert {weight.dtype for weight in ours.weights.values()} == {dtype}


def test_true_precision_of_lightning_is_refused_with_fsdp(tmp_path):
    settings = {"fsdp": "full_shard", "lightning_config": {"precision": "bf16-true"}}
    with pytest.raises(UnsupportedArgument, match=r"\['precision'\]='bf16-true' needs an unsharded model"):
        build("hftrainer", "plain", tmp_path, **settings)
