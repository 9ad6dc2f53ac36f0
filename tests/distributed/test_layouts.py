"""Processes laid out by `parallelism_config`, or by how the model was loaded, train and evaluate as one does."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import UnsupportedArgument, WrongConfig
from hftrainer.parallel.layout import Layout, check_model_layout, read_layout
from tests.distributed.layout_sets import EVALUATED, LAYOUTS
from tests.support.jobs import assert_same
from tests.support.launching import TORCHRUN, python
from tests.support.tiny import make_plain

#: Sums of float32 in another order, through six steps of AdamW at a rate of 1e-2.
TOLERANCE = {"rel": 1e-4, "abs": 2e-5}
SHARED = [(processes, name) for processes in (2, 4) for name in LAYOUTS[processes]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    script = [str(Path(__file__).with_name("layout_sets.py")), str(folder)]
    for launcher in ([], TORCHRUN, [*TORCHRUN[:-1], "4"]):
        run = python(*launcher, *script)
        assert run.returncode == 0, run.stderr[-3000:]
    return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")}


def numbers(run):
    """What the log lines say of training and of tokens."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen", "epoch")
    return [{name: line[name] for name in names if name in line} for line in run["logs"]]


def assert_same_lines(ours, expected):
    for line, other in zip(numbers(ours), numbers(expected), strict=True):
        assert line == pytest.approx(other, **TOLERANCE)


def assert_close(ours, expected):
    assert_same_lines(ours, expected)
    assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-3)
    for name, weight in expected["weights"].items():
        assert ours["weights"][name].numpy() == pytest.approx(weight.numpy(), abs=2e-4)


@pytest.mark.parametrize(("processes", "name"), SHARED)
def test_as_one_process(found, processes, name):
    alone = found["1-0"]["one"]
    assert_close(found[f"{processes}-0"][name], alone)
    for rank in range(processes):
        run = found[f"{processes}-{rank}"][name]
        assert_same_lines(run, alone)
        assert run["metrics"]["eval_rows"] == run["streamed"] == EVALUATED  # no row twice
        assert run["flos"] == alone["flos"]


@pytest.mark.parametrize(("processes", "name"), SHARED)
def test_resumed_run_ends_the_same(found, processes, name):
    whole, resumed = found[f"{processes}-0"][name], found[f"{processes}-0"][f"{name}, resumed"]
    assert numbers(resumed) == numbers(whole)
    assert_same(resumed["weights"], whole["weights"])


def test_goes_on_from_one_process(found):
    assert_close(found["2-0"]["tp, from one"], found["1-0"]["one"])


REFUSED = {
    "2x2 of 1": ({"dp_shard_size": 2, "dp_replicate_size": 2}, {}, "needs 4 processes, but there are 1"),
    "unknown": ({"tp_sizes": 2}, {}, "did you mean 'tp_size'?"),
    "no size": ({"dp_shard_size": 0}, {}, "parallelism_config['dp_shard_size']=0: it must be a number of processes"),
    "cp": ({"cp_size": 2}, {}, "parallelism_config['cp_size'] is not supported"),
    "sp": ({"sp_size": 2}, {}, "parallelism_config['sp_size'] is not supported"),
    "fsdp1": ({"dp_shard_size": 2}, {"fsdp": "no_shard"}, "parallelism_config needs FSDP2"),
    "fsdp without": ({"tp_size": 2}, {"fsdp": True}, "set dp_shard_size, or leave out fsdp"),
    "copies": ({"tp_size": 2, "dp_replicate_size": 2}, {}, "set dp_shard_size too"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    asked, settings, sentence = REFUSED[case]
    args = TrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=asked, **settings)
    with pytest.raises(UnsupportedArgument) as caught:
        Trainer(make_plain(), args)
    assert sentence in str(caught.value)


def loaded(**sizes):
    """Something that looks like a model which transformers has split."""
    sizes = {"tp_size": 1, "fsdp_size": 1, "dp_replicate_size": 1, **sizes}
    config = SimpleNamespace(distributed_config=SimpleNamespace(**sizes))
    return SimpleNamespace(config=config, _is_distributed_loading_by_transformers=True)


def test_models_that_do_not_fit():
    assert "Load it with from_pretrained(..., distributed_config=DistributedConfig(tp_size=2, fsdp_size=1))" in str(
        check_model_layout(Layout(tp_size=2), make_plain())
    )
    assert "set parallelism_config to the former" in str(check_model_layout(Layout(), loaded(tp_size=2)))
    assert check_model_layout(Layout(tp_size=2), loaded(tp_size=2)) is None
    with pytest.raises(WrongConfig, match="sets dp_shard_size=2, but the model was loaded with tp_size=2"):
        read_layout({"dp_shard_size": 2}, loaded(tp_size=2))
    with pytest.raises(WrongConfig, match="pipeline parallelism is not supported yet"):
        read_layout(None, loaded(pp_size=2))


def test_accelerates_own_config_and_the_launchers_environment():
    from accelerate import ParallelismConfig

    wanted = Layout(dp_replicate_size=2, dp_shard_size=3)
    assert read_layout(ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)) == wanted
    environment = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}
    assert read_layout(None, environment=environment) == Layout()
    assert read_layout(None, environment={**environment, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}) == wanted
    assert read_layout({}, environment=environment) == Layout()
    args = TrainingArguments("unused", parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert json.loads(args.to_json_string())["parallelism_config"]["dp_shard_size"] == 2
    with pytest.raises(WrongConfig, match="give a dict of sizes"):
        read_layout(3)
