"""`param_groups`: entries that do not fit are refused, and layer-wise decay counts the layers of each kind of model."""

import pytest
import torch
import transformers

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidArgument
from hftrainer.optimizers.param_groups import select_groups
from tests.support.parity import build
from tests.support.small_models import MODELS, make_bert, make_llama, make_peft

EMBEDDINGS = {"pattern": "*.embed*", "lr": 1e-3, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("entries", "messages"),
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
def test_malformed_entries_are_refused(tmp_path, entries, messages):
    with pytest.raises(InvalidArgument) as caught:
        build("hftrainer", "plain", tmp_path, param_groups=entries)
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


def test_deepspeed_is_refused(tmp_path):
    config = {"zero_optimization": {"stage": 0}}
    with pytest.raises(InvalidArgument, match="param_groups is not supported with deepspeed"):
        TrainingArguments(str(tmp_path), deepspeed=config, param_groups=[EMBEDDINGS])
