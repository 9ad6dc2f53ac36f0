"""`fsdp`, `fsdp_config` and the variables of `accelerate launch --use_fsdp` are read into one form."""

import json

import pytest

from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidConfig
from hftrainer.parallel.fsdp_settings import FsdpPlugin, FsdpSettings, XlaSettings, read_fsdp
from tests.support.refusals import assert_refused, make

#: As `accelerate launch` sets them for the file with FSDP in the documentation.
LAUNCHED = """
    ACCELERATE_USE_FSDP=true FSDP_VERSION=1 FSDP_SHARDING_STRATEGY=1 FSDP_RESHARD_AFTER_FORWARD=true
    FSDP_OFFLOAD_PARAMS=false FSDP_MIN_NUM_PARAMS=100000000 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
    FSDP_TRANSFORMER_CLS_TO_WRAP=BertLayer FSDP_STATE_DICT_TYPE=FULL_STATE_DICT FSDP_FORWARD_PREFETCH=true
    FSDP_USE_ORIG_PARAMS=true FSDP_CPU_RAM_EFFICIENT_LOADING=true FSDP_SYNC_MODULE_STATES=true
    FSDP_ACTIVATION_CHECKPOINTING=false FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=false
"""
SHARD_GRAD_OP, HYBRID = {"strategy": "shard_grad_op"}, {"version": 1, "strategy": "hybrid_shard"}
#: Keys of FSDP1 that may be text, and what they mean.
OF_FSDP1 = {
    "given": {"forward_prefetch": "True", "use_orig_params": "false", "limit_all_gathers": False},
    "read": {"version": 1, "forward_prefetch": True, "use_orig_params": False, "limit_all_gathers": False},
}


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "expected"),
    [
        (True, None, {}),
        ("True", None, {}),
        ("full_shard auto_wrap", None, {}),
        ("full shard", None, {}),
        (["full_shard", "offload"], None, {"cpu_offload": True}),
        ("shard_grad_op", None, SHARD_GRAD_OP),
        ("no_shard", None, {"version": 1, "strategy": "no_shard"}),
        ("hybrid_shard auto_wrap", None, HYBRID),
        ("hybrid_shard_zero2", None, {"version": 1, "strategy": "hybrid_shard_zero2"}),
        ("shard_grad_op", {"version": 1}, {"version": 1, **SHARD_GRAD_OP}),
        (True, {"fsdp_version": "1", "fsdp_sharding_strategy": 4}, HYBRID),
        (True, {"reshard_after_forward": False}, SHARD_GRAD_OP),
        (True, {"reshard_after_forward": "true"}, {}),
        (
            "full shard offload",
            {"fsdp_backward_prefetch": "backward_pos", "fsdp_activation_checkpointing": True},
            {"version": 1, "cpu_offload": True, "backward_prefetch": "BACKWARD_POST", "activation_checkpointing": True},
        ),
        (True, {"cpu_offload": "true"}, {"cpu_offload": True}),
        (True, OF_FSDP1["given"], OF_FSDP1["read"]),
        (True, {"sync_module_states": "false"}, {"sync_module_states": False}),
        (True, {"cpu_ram_efficient_loading": True, "sync_module_states": False}, {"cpu_ram_efficient_loading": True}),
        (True, {"state_dict_type": "sharded_state_dict"}, {"state_dict_type": "SHARDED_STATE_DICT"}),
        (True, {"transformer_layer_cls_to_wrap": "A, B"}, {"wrap_classes": ("A", "B")}),
        (True, {"fsdp_transformer_layer_cls_to_wrap": ["A"]}, {"wrap_classes": ("A",)}),
        (True, {"min_num_params": 9}, {"min_num_params": 9, "auto_wrap_policy": "SIZE_BASED_WRAP"}),
        (True, {"auto_wrap_policy": "no_wrap"}, {"auto_wrap_policy": "NO_WRAP"}),
        (True, {"xla": False, "xla_fsdp_grad_ckpt": False, "xla_fsdp_settings": {}}, {}),
        (True, {"xla": "true", "xla_fsdp_settings": {"a": 1}}, {"xla": XlaSettings(settings=(("a", 1),))}),
        (
            True,
            {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True},
            {"xla": XlaSettings(spmd=True, grad_ckpt=True)},
        ),
    ],
)
def test_fsdp_arguments_are_read_into_settings(fsdp, fsdp_config, expected):
    assert read_fsdp(fsdp, fsdp_config, {}) == FsdpSettings(**expected)


@pytest.mark.parametrize("fsdp", [None, False, "", [], "no"])
def test_fsdp_that_is_off_gives_no_settings(fsdp):
    assert read_fsdp(fsdp, {"min_num_params": 4}, {}) is None


def test_launcher_variables_are_read_into_settings():
    launched = dict(word.split("=") for word in LAUNCHED.split())
    read = {"wrap_classes": ("BertLayer",), "min_num_params": 100000000, "cpu_ram_efficient_loading": True}
    assert read_fsdp(None, None, launched) == FsdpSettings(version=1, forward_prefetch=True, **read)
    second = {**launched, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    del second["FSDP_STATE_DICT_TYPE"], second["FSDP_AUTO_WRAP_POLICY"]
    settings = read_fsdp(None, None, second)
    assert (settings.version, settings.strategy) == (2, "shard_grad_op")
    assert (settings.state_dict_type, settings.auto_wrap_policy) == ("SHARDED_STATE_DICT", "NO_WRAP")
    assert read_fsdp("no_shard", None, launched).strategy == "no_shard"  # the argument wins
    assert read_fsdp(None, None, {**launched, "ACCELERATE_USE_FSDP": "false"}) is None


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "message"),
    [
        ("full_shrd", None, "'full_shrd' is unknown; did you mean 'full_shard'"),
        ("full_shard no_shard", None, "full_shard and no_shard are two strategies"),
        (True, {"min_num_param": 3}, "'min_num_param' is not a valid key; did you mean 'min_num_params'"),
        (True, {"version": 3}, "it must be 1 or 2"),
        ("no_shard", {"version": 2}, "only FSDP1 has 'no_shard'"),
        (True, {"version": 2, "forward_prefetch": True}, "only FSDP1 has forward_prefetch"),
        (True, {"reshard_after_forward": "sometimes"}, "'sometimes' is unknown"),
        (True, {"state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE_DICT or SHARDED_STATE_DICT"),
        (True, {"auto_wrap_policy": "by_hand"}, "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
        (True, {"backward_prefetch": "soon"}, "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"),
        (True, {"cpu_offload": "perhaps"}, "is not a boolean: use true or false"),
        ("shard_grad_op", {"reshard_after_forward": True}, "are two strategies"),
        (
            True,
            {"min_num_params": "many"},
            r"fsdp_config\['min_num_params'\]='many': it must be a non-negative integer",
        ),
        (True, {"activation_checkpointing_offload": True}, "needs 'activation_checkpointing'"),
        (True, {"xla_fsdp_v2": True}, r"fsdp_config\['xla_fsdp_v2'\] needs 'xla': True"),
        (True, {"xla": True, "xla_fsdp_settings": "a"}, "use a dict of keyword arguments"),
        (True, {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_settings": {"a": 1}}, "use one of them"),
        (True, "absent.json", "the file does not exist"),
    ],
)
def test_invalid_fsdp_settings_are_refused(fsdp, fsdp_config, message):
    with pytest.raises(InvalidConfig, match=message):
        read_fsdp(fsdp, fsdp_config, {})


def test_fsdp_config_is_read_from_a_file(tmp_path):
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_min_num_params": 2000, "fsdp_backward_prefetch": "backward_pre"}))
    settings = read_fsdp("full_shard", str(path), {})
    assert (settings.version, settings.min_num_params, settings.backward_prefetch) == (1, 2000, "BACKWARD_PRE")
    for text, message in (("{1", "is not valid JSON"), ("[1]", "is of type list")):
        path.write_text(text)
        with pytest.raises(InvalidConfig, match=message):
            read_fsdp(True, str(path), {})


@pytest.mark.parametrize("optim", ["adafactor", "sgd", "adamw_torch_8bit", "schedule_free_adamw", "adamw_torch"])
def test_optimizers_can_be_sharded_unless_passed_as_objects(optim):
    args = make(use_cpu=True, fsdp=True, lightning_config={"devices": 2}, optim=optim)
    assert not check_supported(ResolvedArguments(args))
    found = check_supported(ResolvedArguments(args), has_custom_optimizer=True)
    assert_refused(found, "optimizers holds the parameters of the unsharded model")


def test_state_dict_type_of_the_plugin_can_be_changed():
    plugin = FsdpPlugin(FsdpSettings(state_dict_type="SHARDED_STATE_DICT"))
    assert not plugin.has_full_states
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.has_full_states
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    assert (plugin.fsdp_version, plugin.cpu_offload, plugin.reshard_after_forward) == (2, False, True)
    with pytest.raises(InvalidConfig, match="FULL_STATE_DICT or SHARDED_STATE_DICT"):
        plugin.set_state_dict_type("LOCAL_STATE_DICT")
