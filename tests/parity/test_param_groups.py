"""`param_groups`: equal to groups that a script makes by hand, refused with a reason, and restored by name."""

import copy
import json

import pytest
import torch
import transformers

from hftrainer import HfArgumentParser, TrainerCallback, TrainingArguments
from hftrainer.errors import InvalidArgument
from hftrainer.optimizers.param_groups import select_groups
from tests.support.parity import EVERY_STEP, assert_same_weights, build, train
from tests.support.tiny import MODELS, make_bert, make_llama, make_peft, make_plain

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


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (5, ["param_groups=5: use a list of dicts"]),
        ("absent.json", ["cannot be read (", "path of a JSON file"]),
        (["*"], ["param_groups[0] is '*'"]),
        ([{"lr": -1.0}], ["param_groups[0] has no pattern:", "param_groups[0]: lr=-1.0 is not a number of at least 0"]),
        ([{"patern": "*"}], ["param_groups[0] has no pattern, but 'patern':"]),
        ([{"pattern": "*", "lr": 1.0, "lr_scale": 2.0}], ["lr and lr_scale"]),
        ([{"pattern": "*", "frozen": True}], ["requires_grad_(False)"]),
        ([{"pattern": "*", "weight_decay": "0.1"}], ["weight_decay='0.1' is not a number"]),
    ],
)
def test_malformed_entries_are_refused(tmp_path, given, messages):
    with pytest.raises(InvalidArgument) as caught:
        build("hftrainer", "plain", tmp_path, param_groups=given)
    assert all(message in str(caught.value) for message in messages)


@pytest.mark.parametrize(
    ("model", "entries", "messages"),
    [
        (
            "llama",
            [{"pattern": "*.embed_token.*"}, {"pattern": "*norm*", "beta": 1}, {"pattern": "*.norm.*"}],
            [
                "param_groups[0]: '*.embed_token.*' matches no parameter of the model; did you mean 'embed_tokens'?",
                "param_groups[1]: AdamW does not accept 'beta' for a parameter group; did you mean 'betas'?",
                "param_groups[2]: '*.norm.*' matches only parameters that earlier entries select",
            ],
        ),
        ("plain", [{"pattern": "*", "layer_decay": 0.9}], ["layer_decay finds no layers: Plain"]),
        ("peft", [{"pattern": "*.embed*"}], ["matches only frozen parameters"]),
    ],
)
def test_entries_that_do_not_fit_the_model_are_refused(tmp_path, model, entries, messages):
    trainer, _ = build("hftrainer", (make_peft, MODELS["llama"][1]) if model == "peft" else model, tmp_path)
    trainer.args.param_groups = entries
    with pytest.raises(InvalidArgument) as caught:
        trainer.train()
    assert all(message in str(caught.value) for message in messages)


def relative_adafactor():
    from transformers import Adafactor

    return {"optimizer_cls_and_kwargs": (Adafactor, {"lr": None, "relative_step": True})}


def given_optimizer():
    model = make_llama()
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": given_optimizer}, "param_groups is for the optimizer that the Trainer creates"),
        ({"trainer": relative_adafactor}, "relative_step=True computes the learning rates"),
        (
            {"optim": "galore_adamw", "optim_target_modules": ["q_proj"], "optim_args": "rank=4"},
            "optim='galore_adamw' creates its own parameter groups",
        ),
        ({"optim": "lomo"}, "optim='lomo' creates its own parameter groups"),
    ],
)
def test_optimizers_that_take_no_groups_are_refused(tmp_path, settings, message):
    trainer, _ = build("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS], **settings)
    with pytest.raises(InvalidArgument, match=message):
        trainer.train()


def scales_of(model, pattern="*"):
    """Parameter → the factor of its learning rate, with a decay of 0.5."""
    groups, errors = select_groups(model, [], [{"pattern": pattern, "layer_decay": 0.5}], 1.0, 0.0)
    assert errors == []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(each)]: group["lr"] for group in groups for each in group["params"]}


@pytest.mark.parametrize("make_model", [make_llama, make_bert])
def test_layer_decay_scales_rates_by_depth(make_model):
    scales = scales_of(make_model())
    of_layer, before, after = (
        ("model.layers.{}.mlp.up_proj.weight", "model.embed_tokens.weight", ["model.norm.weight", "lm_head.weight"])
        if make_model is make_llama
        else (
            "bert.encoder.layer.{}.output.dense.weight",
            "bert.embeddings.word_embeddings.weight",
            ["bert.pooler.dense.weight", "classifier.weight"],
        )
    )
    assert [scales[of_layer.format(layer)] for layer in range(2)] == [0.25, 0.5]
    assert scales[before] == 0.125
    assert [scales[name] for name in after] == [1.0, 1.0]


def make_clip(text=2, vision=2):
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    texts = {**sizes, "vocab_size": 20, "num_hidden_layers": text, "bos_token_id": 1, "eos_token_id": 2}
    images = {**sizes, "image_size": 8, "patch_size": 4, "num_hidden_layers": vision}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=4))


def make_t5():
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def make_bart(decoder=2):
    sizes = {f"{each}_{name}": 2 for each in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    config = transformers.BartConfig(vocab_size=20, d_model=8, encoder_layers=2, decoder_layers=decoder, **sizes)
    return transformers.BartForConditionalGeneration(config)


#: Model → names of its layers, and parameters with the lowest and the whole rate.
TOWERS = {
    make_clip: (
        ["text_model.encoder.layers.{}.mlp.fc1.weight", "vision_model.encoder.layers.{}.mlp.fc1.weight"],
        [
            *("text_model.embeddings.token_embedding.weight", "vision_model.embeddings.class_embedding"),
            "vision_model.pre_layrnorm.weight",
        ],
        [
            *("vision_model.post_layernorm.weight", "text_model.final_layer_norm.bias"),
            *("text_projection.weight", "visual_projection.weight", "logit_scale"),
        ],
    ),
    make_t5: (
        ["encoder.block.{}.layer.0.SelfAttention.q.weight", "decoder.block.{}.layer.1.EncDecAttention.q.weight"],
        ["shared.weight"],
        ["encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"],
    ),
    make_bart: (
        ["model.encoder.layers.{}.fc1.weight", "model.decoder.layers.{}.encoder_attn.q_proj.weight"],
        [
            *("model.shared.weight", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
            *("model.encoder.layernorm_embedding.weight", "model.decoder.layernorm_embedding.bias"),
        ],
        [],
    ),
}


@pytest.mark.parametrize("make_model", TOWERS)
def test_layer_decay_counts_the_layers_of_each_tower(make_model):
    """Parameters outside the towers have the whole rate, except embeddings."""
    layers, before, after = TOWERS[make_model]
    scales = scales_of(make_model())
    for name in layers:
        assert [scales[name.format(layer)] for layer in range(2)] == [0.25, 0.5]
    assert [scales[name] for name in before] == [0.125] * len(before)
    assert [scales[name] for name in after] == [1.0] * len(after)


def test_towers_of_different_lengths_need_an_entry_each():
    model = make_clip(vision=3)
    _, (problem,) = select_groups(model, [], [{"pattern": "*", "layer_decay": 0.5}], 1.0, 0.0)
    assert "2 in text_model.encoder.layers, 3 in vision_model.encoder.layers" in problem
    assert "'text_model.*' and 'vision_model.*' as patterns" in problem
    assert scales_of(model, "text_model.*") == {
        name: scale for name, scale in scales_of(make_clip()).items() if name.startswith("text_model.")
    }
    of_vision = scales_of(model, "vision_model.*")
    assert of_vision["vision_model.pre_layrnorm.bias"] == 0.0625
    assert of_vision["vision_model.encoder.layers.0.mlp.fc1.weight"] == 0.125
    assert of_vision["vision_model.post_layernorm.bias"] == 1.0
    of_decoder = scales_of(make_bart(decoder=3), ["model.decoder.*"])
    assert of_decoder["model.decoder.layers.2.fc1.weight"] == 0.5
    model.text_model.requires_grad_(False)
    assert scales_of(model)["vision_model.pre_layrnorm.bias"] == 0.0625


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


def states_of(folder):
    state = torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {names[number]: held for number, held in state["state"].items()}


def test_resume_with_the_same_groups_is_exact(tmp_path):
    undisturbed = train("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS, ATTENTION], **STEPS)
    _, ended = resume(tmp_path, param_groups=[EMBEDDINGS, ATTENTION])
    assert_same_weights(ended.weights, undisturbed.weights)
    assert ended.logs[:-1] == undisturbed.logs[:-1]


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
def test_resume_with_changed_groups_keeps_moments(tmp_path, schedule):
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 0, "eval_strategy": "epoch"}
    train("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS], **STEPS, **settings)
    stored = states_of(tmp_path)
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


def test_deepspeed_is_refused(tmp_path):
    config = {"zero_optimization": {"stage": 0}}
    with pytest.raises(InvalidArgument, match="param_groups is not supported with deepspeed"):
        TrainingArguments(str(tmp_path), deepspeed=config, param_groups=[EMBEDDINGS])
