"""`param_groups`: equal to groups that a script makes by hand, and logged."""

import json

import torch

from hftrainer import HfArgumentParser, TrainingArguments
from tests.support.parity import EVERY_STEP, assert_same_weights, build, train
from tests.support.small_models import make_llama

STEPS = {"max_steps": 6, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
EMBEDDINGS = {"pattern": "*.embed*", "lr": 1e-3, "weight_decay": 0.0}
ATTENTION = {"pattern": ["*.q_proj.*", "*.k_proj.*"], "lr_scale": 0.5, "betas": [0.8, 0.9]}


def groups_by_hand():
    """AdamW's groups as a script makes them, for `EMBEDDINGS` and `ATTENTION`."""
    model = make_llama()
    named = dict(model.named_parameters())
    embeddings = [name for name in named if ".embed" in name]
    attention = [name for name in named if ".q_proj." in name or ".k_proj." in name]
    rest = [name for name in named if name not in {*embeddings, *attention}]
    groups = [
        ([name for name in rest if "norm" not in name], {"weight_decay": 0.1}),
        ([name for name in rest if "norm" in name], {"weight_decay": 0.0}),
        (embeddings, {"lr": 1e-3, "weight_decay": 0.0}),
        (attention, {"lr": 0.5e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ]
    made = [{"params": [named[name] for name in names], **settings} for names, settings in groups]
    return {"model": model, "optimizers": (torch.optim.AdamW(made, lr=1e-2, fused=True), None)}


def test_groups_equal_those_made_by_hand(tmp_path):
    settings = {"optim": "adamw_torch_fused", **STEPS, **EVERY_STEP}
    theirs = train("transformers", "llama", tmp_path / "theirs", trainer=groups_by_hand, **settings)
    ours = train("hftrainer", "llama", tmp_path / "ours", param_groups=[EMBEDDINGS, ATTENTION], **settings)
    assert_same_weights(ours.weights, theirs.weights)
    assert ours.logs == theirs.logs


def test_groups_on_the_command_line(tmp_path):
    entries = [EMBEDDINGS, {"pattern": "*", "layer_decay": 0.9}]
    (tmp_path / "groups.json").write_text(json.dumps(entries))
    for text in (json.dumps(entries), str(tmp_path / "groups.json")):
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--param_groups", text]
        )
        assert args.param_groups == entries


def test_each_group_is_logged_and_named(tmp_path, caplog):
    caplog.set_level("INFO", logger="hftrainer.run")
    entries = [{"pattern": "*.weight", "layer_decay": 0.5}]
    trainer, _ = build("hftrainer", "llama", tmp_path, param_groups=entries, optim="sgd", learning_rate=1.0)
    groups = trainer.create_optimizer().param_groups
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates["model.layers.0.mlp.up_proj.weight"] == 0.25
    assert rates["lm_head.weight"] == 1.0
    assert [group["lr"] for group in groups] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    lines = [message for message in caplog.messages if message.startswith("Parameter group")]
    assert len(lines) == len(groups)
    count = trainer.model.model.embed_tokens.weight.numel()
    assert (
        f"Parameter group {len(groups) - 1}, *.weight (before the layers): 1 tensor, {count:,} parameters, lr=0.125, "
        "weight_decay=0.1: model.embed_tokens.weight"
    ) in lines
