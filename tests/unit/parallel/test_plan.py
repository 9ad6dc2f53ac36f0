"""The sizes of `parallelism_config` are read from several places, and must fit the loaded model."""

import json
from types import SimpleNamespace

import pytest

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidConfig
from hftrainer.parallel.plan import ParallelLayout, check_model_layout, read_layout
from tests.support.small_models import make_plain


def load(**sizes):
    sizes = {"tp_size": 1, "fsdp_size": 1, "dp_replicate_size": 1, **sizes}
    config = SimpleNamespace(distributed_config=SimpleNamespace(**sizes))
    return SimpleNamespace(config=config, _is_distributed_loading_by_transformers=True)


def test_layout_must_fit_the_loaded_model():
    assert "Load it with from_pretrained(..., distributed_config=DistributedConfig(tp_size=2, fsdp_size=1))" in str(
        check_model_layout(ParallelLayout(tp_size=2), make_plain())
    )
    assert "set parallelism_config to tp_size=2" in str(check_model_layout(ParallelLayout(), load(tp_size=2)))
    assert check_model_layout(ParallelLayout(tp_size=2), load(tp_size=2)) is None
    with pytest.raises(InvalidConfig, match="sets dp_shard_size=2, but the model was loaded with tp_size=2"):
        read_layout({"dp_shard_size": 2}, load(tp_size=2))
    with pytest.raises(InvalidConfig, match="pipeline parallelism is not supported yet"):
        read_layout(None, load(pp_size=2))


def test_layout_is_read_from_accelerates_config_and_launcher():
    from accelerate import ParallelismConfig

    wanted = ParallelLayout(dp_replicate_size=2, dp_shard_size=3)
    assert read_layout(ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)) == wanted
    environment = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}
    assert read_layout(None, environment=environment) == ParallelLayout()
    assert read_layout(None, environment={**environment, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}) == wanted
    assert read_layout({}, environment=environment) == ParallelLayout()
    args = TrainingArguments("unused", parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert json.loads(args.to_json_string())["parallelism_config"]["dp_shard_size"] == 2
    with pytest.raises(InvalidConfig, match="use a dict of sizes"):
        read_layout(3)
