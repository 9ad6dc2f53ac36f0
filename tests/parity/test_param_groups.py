"""`param_groups`: equal to groups that a script makes by hand, logged, and restored by name."""

import copy
import json

import pytest
import torch

from hftrainer import HfArgumentParser, TrainerCallback, TrainingArguments
from tests.support.parity import EVERY_STEP, assert_same_weights, build, train
from tests.support.small_models import MODELS, make_llama, make_plain

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


# ---- Resuming --------------------------------------------------------------------------------------------------------


def resume(folder, **settings):
    """State and settings of each parameter when the resumed run begins, by name, and the record of the run."""
    began = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if not began:
                names = {parameter: name for name, parameter in kwargs["model"].named_parameters()}
                for group in kwargs["optimizer"].param_groups:
                    for parameter in group["params"]:
                        held = copy.deepcopy(kwargs["optimizer"].state[parameter])
                        began[names[parameter]] = (held, group["lr"], group["weight_decay"])

    ended = train(
        *("hftrainer", "llama", folder, str(folder / "checkpoint-2")), **STEPS, **settings, callback=lambda _: Look()
    )
    return began, ended


def test_resume_with_the_same_groups_is_exact(tmp_path):
    undisturbed = train("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS, ATTENTION], **STEPS)
    _, ended = resume(tmp_path, param_groups=[EMBEDDINGS, ATTENTION])
    assert_same_weights(ended.weights, undisturbed.weights)
    assert ended.logs[:-1] == undisturbed.logs[:-1]


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
def test_resume_with_changed_groups_keeps_moments(tmp_path, schedule):
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 0, "eval_strategy": "epoch"}
    train("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS], **STEPS, **settings)
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    stored = {names[number]: held for number, held in state["state"].items()}
    entries = [{"pattern": "*.mlp.*", "lr": 3e-3, "weight_decay": 0.3}, {**EMBEDDINGS, "lr": 2e-3}]
    began, _ = resume(tmp_path, param_groups=entries, **settings)
    assert began.keys() == stored.keys()
    factor = 1.0 if schedule == "reduce_lr_on_plateau" else 4 / 6  # after 2 of 6 steps
    for name, (held, rate, decay) in began.items():
        assert all(torch.equal(value, stored[name][key]) for key, value in held.items())
        base = 3e-3 if ".mlp." in name else 2e-3 if ".embed" in name else 1e-2
        assert rate == base * factor
        assert decay == (0.3 if ".mlp." in name else 0.0 if ".embed" in name or "norm" in name else 0.1)


@pytest.mark.parametrize(("before", "now"), [(None, "*"), ("*", None), ("*.mlp.*", "*.q_proj.*")])
def test_resume_with_other_groups_of_the_same_settings_is_exact(tmp_path, before, now):
    undisturbed, ended = (
        [{"pattern": pattern, "lr_scale": 1.0}] if pattern is not None else None for pattern in (before, now)
    )
    undisturbed = train("hftrainer", "llama", tmp_path, param_groups=undisturbed, **STEPS)
    _, ended = resume(tmp_path, param_groups=ended)
    assert_same_weights(ended.weights, undisturbed.weights)
    assert [line.get("loss") for line in ended.logs[:-1]] == [line.get("loss") for line in undisturbed.logs[:-1]]


def test_optimizer_state_has_no_names_without_param_groups(tmp_path):
    train("hftrainer", (make_plain, MODELS["plain"][1]), tmp_path, **STEPS)
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all(not {"name", "param_names"} & group.keys() for group in state["param_groups"])
