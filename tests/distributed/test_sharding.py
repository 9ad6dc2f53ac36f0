"""Sharded models train as replicas do, in one process or several, and their checkpoints fit all of them."""

import functools
import os

import numpy as np
import pytest
import torch

from tests.distributed import cases_sharding
from tests.distributed.cases_sharding import COMPARED, ODD_MODELS, READ_FROM, READERS, SAVED, WAYS, run_group
from tests.support.known_differences import MEASURED
from tests.support.parity import assert_same_weights

#: Processes add up the parts of a loss, a norm and a gradient in another order: float32 has 24 bits, and these runs
#: lose two of them at most.
TOLERANCE = 5e-7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def results(processes, folder):
    """A function of a group and the number of processes: what they find, by rank and run. Each group runs once."""

    @functools.cache
    def results(group, count=2):
        if (group, count) in READ_FROM:
            results(*READ_FROM[group, count])
        return processes.run_ranks(run_group, count, group, folder)

    return results


@pytest.fixture(scope="module")
def result(results):
    """A function of a group and the names of a run in it: what rank 0 finds."""
    return lambda group, *names, count=2: results(group, count)[0][names if len(names) > 1 else names[0]]


def losses(run, name="loss"):
    return [line[name] for line in run["logs"] if name in line]


def assert_close(ours, expected, atol=1e-6):
    """The same log lines and weights, but for the order of summation.

    Weights whose gradient is nothing but rounding (the keys' biases of ViT) are as far apart as AdamW makes them.
    """
    assert len(ours["logs"]) == len(expected["logs"])
    for line, other in zip(ours["logs"][:-1], expected["logs"][:-1], strict=True):  # the last has measured times
        line, other = ({k: v for k, v in each.items() if not k.endswith(MEASURED)} for each in (line, other))
        assert line == pytest.approx(other, rel=TOLERANCE)
    assert ours["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert torch.allclose(ours["weights"][name], value, rtol=0, atol=atol), name


RUNS = [("compare", names, names[0]) for names in COMPARED] + [("save", (n, "undisturbed"), "llama") for n in SAVED]


@pytest.mark.parametrize(("group", "names", "model"), RUNS)
def test_sharded_run_is_that_of_one_process(results, result, group, names, model):
    (ours, other), one = (of_rank[names] for of_rank in results(group)), result("compare", model, "ddp", count=1)
    assert ours["logs"][:-1] == other["logs"][:-1]  # in both; the last has measured times
    if "fsdp1 flat" in names:  # a flat parameter has one weight decay for all that is in it
        assert losses(ours)[:2] == pytest.approx(losses(one)[:2], rel=TOLERANCE)
    else:
        assert_close(ours, one)


@pytest.mark.parametrize("strategy", SAVED)
def test_resumed_run_ends_the_same(result, strategy):
    undisturbed, resumed = (result("save", strategy, which) for which in ("undisturbed", "resumed"))
    assert_same_weights(resumed["weights"], undisturbed["weights"])
    assert resumed["logs"][:-1] == undisturbed["logs"][:-1]


@pytest.mark.parametrize(
    ("count", "reader", "writer"),
    [(count, reader, writer) for count in READERS for reader in READERS[count] for writer in READERS[count][reader]],
)
def test_checkpoints_resume_with_other_strategies_and_process_counts(result, count, reader, writer):
    assert_close(result("exchange", writer, reader, count=count), result("save", "ddp", "undisturbed"))


@pytest.mark.parametrize("strategy", cases_sharding.LIGHTNING)
def test_checkpoints_of_lightning_hold_full_weights(result, folder, strategy):
    """Lightning's own callback writes full weights by the names of the model, and one process goes on from them."""
    expected = result("save_by_lightning", "ddp")["weights"]
    kept = torch.load(folder / "lightning" / strategy / "step=10.ckpt", weights_only=False)["state_dict"]
    assert len(os.listdir(folder / "lightning" / strategy / "best")) == 1
    assert {name.removeprefix("model.") for name in kept} == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(kept[f"model.{name}"], value, rtol=0, atol=1e-6)
        assert torch.allclose(result("change_sizes", strategy, count=1)["weights"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reader", READERS[4])
def test_run_continues_with_one_and_then_four_processes(result, reader):
    undisturbed, alone = result("save_by_lightning", "ddp"), result("change_sizes", "alone", count=1)
    ours = result("change_sizes", reader, count=4)
    assert losses(ours) == pytest.approx(losses(undisturbed), rel=TOLERANCE)
    for run in (ours, alone):
        for name, value in undisturbed["weights"].items():
            assert torch.allclose(run["weights"][name], value, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["fsdp1 full", "fsdp2 full"])
def test_full_states_are_written_to_these_files(results, folder, strategy):
    from transformers import LlamaForCausalLM

    results("save")
    checkpoint = folder / "saved" / strategy / "checkpoint-3"
    names = {"model.safetensors", "config.json", "pytorch_model_fsdp.bin", "optimizer.bin"}
    assert names <= set(os.listdir(checkpoint))
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    assert_same_weights(model.state_dict(), torch.load(checkpoint / "pytorch_model_fsdp.bin"))
    assert model.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("strategy", ["fsdp1 sharded", "fsdp2 sharded"])
def test_sharded_states_are_written_to_these_files(results, folder, strategy):
    results("save")
    checkpoint = folder / "saved" / strategy / "checkpoint-3"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert set(os.listdir(checkpoint / name)) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert not (checkpoint / "optimizer.pt").exists()


@pytest.mark.parametrize("strategy", cases_sharding.EVALUATED)
def test_sharded_evaluation_and_generation_are_those_of_replicas(result, folder, strategy):
    from transformers import LlamaForCausalLM

    ours, replicas = (result("evaluate", name) for name in (strategy, "ddp"))
    assert losses(ours, "eval_loss") == pytest.approx(losses(replicas, "eval_loss"), rel=TOLERANCE)
    assert ours["before"]["eval_loss"] == pytest.approx(replicas["before"]["eval_loss"], rel=TOLERANCE)
    assert np.allclose(ours["after"].predictions, replicas["after"].predictions, rtol=0, atol=1e-6)
    assert np.array_equal(ours["tokens"], replicas["tokens"])
    model = LlamaForCausalLM.from_pretrained(folder / "evaluated" / strategy / "final")
    assert_same_weights(model.state_dict(), ours["weights"])


@pytest.mark.parametrize("name", cases_sharding.HALF)
def test_half_precision_keeps_float32_weights_and_losses(result, name):
    """The optimizer steps in float32, and the losses are those of float32 to three digits."""
    ours, float32 = result("train_in_half_precision", name), result("save", "ddp", "undisturbed")
    assert losses(ours) == pytest.approx(losses(float32), rel=2e-3)
    assert {weight.dtype for weight in ours["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["fsdp1 full", "fsdp2 full", "fsdp2 sharded"])
def test_adapters_train_as_replicas_and_resume(result, strategy):
    ours, resumed = (result("train_adapters", strategy, which) for which in ("undisturbed", "resumed"))
    assert_close(ours, result("train_adapters", "ddp", "undisturbed"))
    assert_same_weights(resumed["weights"], ours["weights"])


@pytest.mark.parametrize("strategy", WAYS)
def test_infinite_gradients_skip_the_step(result, strategy):
    ours, replicas = (result("rerun_regressions", "overflow", name) for name in (strategy, "ddp"))
    assert losses(ours) == pytest.approx(losses(replicas), rel=3e-2)  # sharded weights are float16 in the forward pass
    assert losses(ours)[:5] == pytest.approx(losses(replicas)[:5], rel=1e-3)
    assert all(weight.isfinite().all() for weight in ours["weights"].values())


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("case", ["label smoothing", "own loader"])
def test_sharded_run_is_that_of_replicas(result, case, strategy):
    ours, replicas = (result("rerun_regressions", case, name) for name in (strategy, "ddp"))
    assert_close(ours, replicas)


@pytest.mark.parametrize(("model", "strategy"), [(kind, name) for kind in ODD_MODELS for name in ODD_MODELS[kind][1]])
def test_models_with_unusual_modules_resume(result, model, strategy):
    undisturbed, resumed = (result("odd_models", model, strategy, which) for which in ("undisturbed", "resumed"))
    assert_same_weights(resumed["weights"], undisturbed["weights"])


@pytest.mark.parametrize("strategy", ODD_MODELS["vit"][1][1:])
@pytest.mark.parametrize("which", ["undisturbed", "from ddp"])
def test_weights_saved_under_other_names_are_read(result, strategy, which):
    ours, replicas = result("odd_models", "vit", strategy, which), result("odd_models", "vit", "ddp", "undisturbed")
    assert_close(ours, replicas, atol=2e-5)


def test_process_groups_are_destroyed_with_their_trainer(results):
    """Each group has threads and sockets. Ranks may make new groups after `end_training`."""
    counts = list(results("count_groups")[0].values())
    of_one, of_both = counts[:2]
    assert of_one < of_both
    assert counts == [of_one, of_both, of_both, of_both, of_one, of_both]
