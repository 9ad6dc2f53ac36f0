"""The `deepspeed` configuration is read, filled in from the arguments and checked against them, without DeepSpeed."""

import base64
import copy
import importlib.util
import json
import re

import pytest
import torch
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

from hftrainer import HfArgumentParser, TrainingArguments
from hftrainer.errors import InvalidArgument, InvalidConfig
from hftrainer.parallel.fsdp_settings import read_fsdp
from hftrainer_deepspeed.settings import DeepSpeedConfig, make_config, read_deepspeed

ZERO = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True}
ZERO |= {"reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True, "cpu_offload": True}
#: The two configurations of the documentation of v4.1, which mean the same.
LONG = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": ZERO,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "zero_allow_untested_optimizer": True,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
}
ZERO_2 = {"zero_optimization": {"stage": 2}}
SHORT_WORDS = (
    "--learning_rate 3e-5 --warmup_steps 500 --adam_beta1 0.8 --adam_beta2 0.999 --adam_epsilon 1e-8 "
    "--weight_decay 3e-7 --lr_scheduler_type constant_with_warmup --fp16 --fp16_backend amp"
)
pytestmark = pytest.mark.usefixtures("deepspeed_installed")


def make_args(config, **settings):
    return TrainingArguments("unused", deepspeed=config, use_cpu=True, **settings)


def filled_config(config, **settings):
    return make_args(config, **settings).hf_deepspeed_config.config


def test_auto_values_are_filled_from_the_arguments():
    expected = {
        **{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4},
        **{"gradient_clipping": 0.5, "bf16": {"enabled": True}, "fp16": {"enabled": False}, **ZERO_2},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.7, 0.999], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-3}},
    }

    def auto(values):
        kept = ("type", "stage")
        return {
            key: auto(value) if isinstance(value, dict) else value if key in kept else "auto"
            for key, value in values.items()
        }

    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "bf16": True}
    settings |= {"learning_rate": 2e-3, "adam_beta1": 0.7, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    filled = filled_config(auto(expected), **settings, save_on_each_node=True)
    own = {"checkpoint": {"use_node_local_storage": True}, "steps_per_print": float("inf")}
    assert filled == {**expected, **own}


def test_missing_keys_are_filled_from_the_arguments():
    config = {"zero_optimization": dict(ZERO)}
    before = copy.deepcopy(config)
    filled = filled_config(config, per_device_train_batch_size=2, fp16=True)
    assert config == before
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (2, 2)
    assert filled["gradient_clipping"] == 1.0  # transformers 4.15 and later would not clip
    assert filled["fp16"] == {"enabled": True, "auto_cast": True}
    assert "optimizer" not in filled
    assert "scheduler" not in filled


def test_both_configurations_of_v4_1_mean_the_same(tmp_path):
    """The file with everything, and the file with ZeRO's settings alone and a command line."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": ZERO}))
    words = ["--output_dir", "unused", "--use_cpu", "True", "--deepspeed", str(path), *SHORT_WORDS.split()]
    (short,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    long = make_args(LONG)
    one, other = long.hf_deepspeed_config, short.hf_deepspeed_config
    shared = ("zero_optimization", "gradient_clipping", "train_batch_size", "gradient_accumulation_steps")
    assert {key: one.config[key] for key in shared} == {key: other.config[key] for key in shared}
    assert one.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "cpu_offload" not in one.config["zero_optimization"]
    assert one.dtype() == other.dtype() == torch.float16
    assert one.precision == other.precision == "16-mixed"
    params, schedule = one.config["optimizer"]["params"], one.config["scheduler"]["params"]
    assert params["lr"] == schedule["warmup_max_lr"] == short.learning_rate
    assert params["betas"] == [short.adam_beta1, short.adam_beta2]
    assert (params["eps"], params["weight_decay"]) == (short.adam_epsilon, short.weight_decay)
    assert schedule["warmup_num_steps"] == short.get_warmup_steps(10_000)
    assert (short.optim.value.split("_")[0], short.lr_scheduler_type.value) == ("adamw", "constant_with_warmup")
    model = torch.nn.Linear(1, 1)
    assert one.complete_with_run_values(long, model, 10_000).config == one.config
    assert other.complete_with_run_values(short, model, 10_000).config == other.config
    assert any("optimizer.params.lr=3e-05 is used" in note for note in one.notes)
    assert not other.notes


ADAM, WARMUP = {"type": "Adam"}, {"type": "WarmupLR"}
ONLY_MODEL = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        (
            {"train_batch_size": 3, "gradient_clipping": 0.1},  # both are named
            {"max_grad_norm": 2.0},
            ("train_batch_size=3", "per_device_train_batch_size", "gradient_clipping=0.1", "max_grad_norm=2.0"),
        ),
        ({"gradient_accumulation_steps": 5}, {}, ("gradient_accumulation_steps=5", "gradient_accumulation_steps=1")),
        ({"bf16": {"enabled": False}}, {"bf16": True}, ("bf16.enabled=False", "bf16=True")),
        ({"fp16": {"enabled": True}}, {"bf16": True}, ("fp16", "bf16=True")),
        (
            {"optimizer": {**ADAM, "params": {"lr": 1e-3, "betas": [0.1, 0.2]}}},
            {"learning_rate": 1e-4, "adam_beta2": 0.5},
            ("params.lr=0.001", "learning_rate=0.0001", "betas=[0.1, 0.2]", "adam_beta1 and adam_beta2=[0.9, 0.5]"),
        ),
        ({"zero_optimization": {"sub_group_size": "auto"}}, {}, ("zero_optimization.sub_group_size='auto'",)),
        ({"zero_optimization": {"stage": "two"}}, {}, ("stage='two'", "0, 1, 2 or 3")),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": ["cpu"]}}},
            {},
            ("device=['cpu']", "'nvme'"),
        ),
        ({"zero_optimization": True}, {}, ("zero_optimization=True", "keys and values")),
        ({"optimizer": {"params": {}}}, {}, ("optimizer has no 'type'",)),
        ({"gradient_clipping": "0.1"}, {}, ("gradient_clipping='0.1'", "is text: write the number")),
        (
            {"optimizer": {**ADAM, "params": {"lr": 0.1}}, "scheduler": {**WARMUP, "params": {"warmup_max_lr": 0.2}}},
            {},
            ("warmup_max_lr=0.2", "optimizer.params.lr=0.1"),
        ),
        ({}, {"lightning_config": {"precision": "bf16-mixed"}}, ("precision", "set bf16 or fp16")),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, ("tensor_parallel", "not supported yet")),
        ({}, {"optim": "galore_adamw", "optim_target_modules": ["a"]}, ("optim='galore_adamw'", "flat shards")),
        ({}, {"auto_find_batch_size": True}, ("auto_find_batch_size=True",)),
        ({}, {"lightning_config": {"async_checkpoint": True}}, ("async_checkpoint",)),
        ({}, {"checkpoint_format": "dcp"}, ("checkpoint_format='dcp'", "deepspeed")),
        ({}, ONLY_MODEL, ("save_only_model=True", "load_best_model_at_end")),
    ],
)
def test_contradiction_names_key_and_argument(config, settings, named):
    with pytest.raises(InvalidArgument) as raised:
        make_args({**ZERO_2, **config}, **settings)
    assert all(words in str(raised.value) for words in named)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"bf16": {}}', "zero_optimization is missing"),
        ({"zero_optimisation": {"stage": 3}}, "'zero_optimisation' is misspelled"),
        ([1], r"deepspeed=\[1\]: use a dict"),
    ],
)
def test_misspelled_configuration_is_refused(config, words):
    with pytest.raises(InvalidArgument, match=words):
        make_args(config)


def test_old_key_names_are_translated():
    """A key once said fp16 for 16bit, and DeepSpeed accepts 'bfloat16' for 'bf16'."""
    gathers = "stage3_gather_16bit_weights_on_model_save"
    old = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    config = configure_only({"zero_optimization": old, "bfloat16": {"enabled": True}})
    assert config["zero_optimization"] == {"stage": 3, gathers: True}
    assert config["bf16"] == {"enabled": True}
    config = configure_only({"zero_optimization": {"stage": 3, gathers: "auto"}})
    assert config["zero_optimization"] == {"stage": 3, gathers: False}


def configure_only(config):
    """Read a configuration alone: arguments with ZeRO-3 would connect processes, which needs DeepSpeed."""
    args = make_args(ZERO_2)
    args.deepspeed = config
    return make_config(args).config


def test_auto_warmup_rises_to_the_optimizers_rate():
    optimizer, scheduler = {**ADAM, "params": {"lr": 0.02}}, {**WARMUP, "params": {"warmup_max_lr": "auto"}}
    config = filled_config({**ZERO_2, "optimizer": optimizer, "scheduler": scheduler})
    assert config["scheduler"]["params"]["warmup_max_lr"] == 0.02


def test_configuration_overrides_default_arguments_with_a_note():
    config = make_args({**ZERO_2, "gradient_clipping": 0.1}).hf_deepspeed_config
    assert config.config["gradient_clipping"] == 0.1
    assert config.notes == ["deepspeed: gradient_clipping=0.1 is used instead of the default max_grad_norm=1.0."]


def test_configuration_is_read_from_dict_file_text_or_base64(tmp_path):
    config = {"zero_optimization": {"stage": 1}}
    (tmp_path / "a.json").write_text(json.dumps(config))
    (tmp_path / "a.yaml").write_text("zero_optimization:\n  stage: 1\n")
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for source in (config, str(tmp_path / "a.json"), str(tmp_path / "a.yaml"), json.dumps(config), encoded):
        assert read_deepspeed(source, {}) == config, source
    assert read_deepspeed(True, {}) == read_deepspeed("true", {}) == {"zero_optimization": {"stage": 2}}
    assert read_deepspeed(None, {}) is None


@pytest.mark.parametrize(
    ("text", "words"), [(None, "neither an existing file nor"), ("{", "not valid JSON"), ("[]", "must hold keys")]
)
def test_unreadable_files_are_named(tmp_path, text, words):
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text)
    for source in (str(path), path):
        with pytest.raises(InvalidArgument, match=re.escape(str(path)) + ".*" + words):
            make_args(source)


def test_config_file_of_accelerate_is_refused(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: {}\n")
    with pytest.raises(InvalidArgument, match=f"deepspeed: {path} is a file of accelerate's.*accelerate launch"):
        make_args(str(path))
    with pytest.raises(InvalidConfig, match=f"fsdp_config: {path} is a file of accelerate's"):
        read_fsdp("full_shard", str(path))


@pytest.mark.parametrize(
    ("text", "words"), [("1e-8", "eps='1e-8' is text: write the number"), ("no", "eps='no' must be a number")]
)
def test_numbers_given_as_text_are_named(tmp_path, text, words):
    path = tmp_path / "ds_config.yaml"
    path.write_text(f"zero_optimization: {{stage: 2}}\noptimizer: {{type: AdamW, params: {{eps: '{text}'}}}}\n")
    with pytest.raises(InvalidArgument, match=words):
        make_args(str(path))


def test_launcher_variables_become_a_configuration():
    words = """
        USE_DEEPSPEED=true DEEPSPEED_ZERO_STAGE=3 DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu GRADIENT_CLIPPING=0.5
        DEEPSPEED_OFFLOAD_PARAM_DEVICE=nvme DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=/fast
        DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=true GRADIENT_ACCUMULATION_STEPS=4
    """
    assert read_deepspeed(None, dict(f"ACCELERATE_{word}".split("=") for word in words.split())) == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/fast"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,  # the argument must say the same
    }
    alone = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    assert read_deepspeed(None, alone) == {"zero_optimization": {"stage": 2}}
    assert read_deepspeed(None, {"ACCELERATE_USE_DEEPSPEED": "false"}) is None


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize("name", ["GRADIENT_CLIPPING", "DEEPSPEED_ZERO_STAGE"])
def test_launcher_variables_must_be_numbers_or_auto(name):
    for text in ("auto", "None"):
        assert read_deepspeed(None, {**LAUNCHED, f"ACCELERATE_{name}": text}) == ZERO_2
    with pytest.raises(InvalidConfig, match=f"ACCELERATE_{name}='two': it must be a number, or 'auto'"):
        read_deepspeed(None, {**LAUNCHED, f"ACCELERATE_{name}": "two"})


def test_launcher_settings_beside_a_file_are_refused(tmp_path):
    """accelerate refuses them too: the file would win silently."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO_2))
    launched = {**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    fields = "deepspeed_config_file,zero3_init_flag"
    assert read_deepspeed(None, {**launched, "ACCELERATE_CONFIG_DS_FIELDS": fields}) == ZERO_2
    fields += ",mixed_precision,gradient_clipping"
    with pytest.raises(InvalidConfig, match="accelerate's file sets gradient_clipping and mixed_precision beside"):
        read_deepspeed(None, {**launched, "ACCELERATE_CONFIG_DS_FIELDS": fields})


def test_missing_deepspeed_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "deepspeed" else find(name, *of))
    words = (
        r"needs DeepSpeed, which is not installed.*hftrainer\[deepspeed\]'.\ndeepspeed: zero_optimization is missing"
    )
    with pytest.raises(InvalidArgument, match=words):
        make_args({"bf16": {}})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InvalidArgument, match="ACCELERATE_USE_DEEPSPEED=true needs DeepSpeed"):
        make_args(None)


def test_auto_bucket_sizes_follow_the_model():
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = DeepSpeedConfig({"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}})
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidConfig, match=r"hidden_size.*reduce_bucket_size|no attribute 'config'"):
        config.complete_with_run_values(TrainingArguments(), model, 10)
    model.config = type("Config", (), {"hidden_sizes": [8, 10]})()
    completed = config.complete_with_run_values(TrainingArguments(), model, 10)
    assert config.is_auto("zero_optimization.reduce_bucket_size")  # the next run may have another model
    assert [completed.get_value(f"zero_optimization.{key}") for key in keys] == [100, 90, 100]


def test_auto_schedule_steps_follow_the_run():
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    config, model = DeepSpeedConfig({"scheduler": {"type": "WarmupDecayLR", "params": params}}), torch.nn.Linear(1, 1)
    for steps in (10, 20):  # runs of one Trainer
        completed = config.complete_with_run_values(TrainingArguments(), model, steps).config["scheduler"]["params"]
        assert completed == {"warmup_num_steps": 1, "total_num_steps": steps}  # DeepSpeed takes no warm-up of 0 steps
    config.config["scheduler"]["params"]["total_num_steps"] = 10
    with pytest.raises(InvalidConfig, match="total_num_steps=10 contradicts num_training_steps"):
        config.complete_with_run_values(TrainingArguments(), model, 20)


def test_transformers_knows_the_configuration_while_the_arguments_live():
    args = make_args({"zero_optimization": {"stage": 2}})
    assert deepspeed_config() is args.hf_deepspeed_config.config
    assert not is_deepspeed_zero3_enabled()
    del args
    assert deepspeed_config() is None


def test_configuration_answers_stage_offload_and_dtype():
    config = make_config(make_args({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}))
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, True)
    assert config.is_false("bf16.enabled") is False  # not there
    assert config.get_value("a.b", 3) == 3
    assert config.dtype() == torch.float32
