"""Sharded models train as whole ones do, in one process or several, and their checkpoints fit all of them."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.shard_sets import (
    COMPARED,
    EVALUATED,
    EXCHANGED,
    HALF,
    LIGHTNING,
    READERS,
    REVIEWED,
    SAVED,
    STRATEGIES,
)
from tests.support.differences import MEASURED
from tests.support.jobs import assert_same
from tests.support.launching import python, torchrun

#: Processes add up the parts of a loss, a norm and a gradient in another order: float32 has 24 bits, and these runs
#: lose two of them at most.
TOLERANCE = 5e-7
SCRIPT = str(Path(__file__).with_name("shard_sets.py"))
MODELS_SAVED = ("plain", "llama")


def run(folder, processes, *groups):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    done = python(*launcher, SCRIPT, str(folder), *groups)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `shard_sets.py` wrote: by group, processes and rank."""
    folder = tmp_path_factory.mktemp("shards")
    run(folder, 2, "compared", "saved", "exchanged", "evaluated", "others", "reviewed")
    run(folder, 0, "compared", "exchanged", "chained")
    run(folder, 4, "exchanged", "chained")
    return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")} | {"folder": folder}


def close(ours, expected, atol=1e-6):
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", COMPARED)
def test_same_as_one_process(found, model, strategy):
    ours, one = found["compared-2-0"][f"{model} {strategy}"], found["compared-1-0"][f"{model} ddp"]
    if strategy == "fsdp1 flat":  # a flat parameter has one weight decay for all that is in it
        assert [line.get("loss") for line in ours["logs"][:2]] == pytest.approx(
            [line.get("loss") for line in one["logs"][:2]], rel=TOLERANCE
        )
        return
    close(ours, one)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", COMPARED)
def test_same_in_both_processes(found, model, strategy):
    first, second = (found[f"compared-2-{rank}"][f"{model} {strategy}"] for rank in (0, 1))
    assert first["logs"][:-1] == second["logs"][:-1]  # the last has measured times


@pytest.mark.parametrize("strategy", SAVED)
@pytest.mark.parametrize("model", MODELS_SAVED)
def test_resumed_run_ends_the_same(found, model, strategy):
    """To the last bit."""
    undisturbed, resumed = (found["saved-2-0"][f"{model} {strategy}{which}"] for which in ("", ", resumed"))
    assert_same(resumed["weights"], undisturbed["weights"])
    assert resumed["logs"][:-1] == undisturbed["logs"][:-1]


@pytest.mark.parametrize("processes", READERS)
@pytest.mark.parametrize("writer", EXCHANGED)
@pytest.mark.parametrize("model", MODELS_SAVED)
def test_any_reads_what_any_has_written(found, model, writer, processes):
    for reader in READERS[processes]:
        if processes == 2 and reader == writer:
            ours = found["saved-2-0"][f"{model} {writer}, resumed"]
        else:
            ours = found[f"exchanged-{processes}-0"][f"{model} {writer} {reader}"]
        close(ours, found["saved-2-0"][f"{model} ddp"])


@pytest.mark.parametrize("reader", READERS[4])
def test_two_then_one_then_four(found, reader):
    """A run of two processes goes on in one, and that in four."""
    close(found["chained-4-0"][reader], found["saved-2-0"]["plain ddp"])


@pytest.mark.parametrize("strategy", ["fsdp1 whole", "fsdp2 whole"])
def test_files_of_whole_states(found, strategy):
    folder = found["folder"] / "saved" / f"llama {strategy}" / "checkpoint-3"
    assert {"model.safetensors", "config.json", "pytorch_model_fsdp.bin", "optimizer.bin"} <= set(os.listdir(folder))
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    written = torch.load(folder / "pytorch_model_fsdp.bin")
    assert_same(model.state_dict(), written)
    assert model.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("strategy", ["fsdp1 parts", "fsdp2 parts"])
def test_files_of_parts(found, strategy):
    folder = found["folder"] / "saved" / f"llama {strategy}" / "checkpoint-3"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert set(os.listdir(folder / name)) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert not (folder / "optimizer.pt").exists()


@pytest.mark.parametrize("strategy", [name for name in EVALUATED if name != "ddp"])
def test_evaluations(found, strategy):
    ours, replicas = found["evaluated-2-0"][strategy], found["evaluated-2-0"]["ddp"]
    losses = [[line["eval_loss"] for line in each["logs"] if "eval_loss" in line] for each in (ours, replicas)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
    assert ours["before"]["eval_loss"] == pytest.approx(replicas["before"]["eval_loss"], rel=TOLERANCE)
    assert np.allclose(ours["after"].predictions, replicas["after"].predictions, rtol=0, atol=1e-6)
    tokens = found["evaluated-2-0"]
    assert np.array_equal(tokens[f"{strategy} tokens"], tokens["ddp tokens"])


@pytest.mark.parametrize("strategy", EVALUATED)
def test_save_model_gathers(found, strategy):
    from transformers import LlamaForCausalLM

    folder = found["folder"] / "evaluated" / strategy
    model = LlamaForCausalLM.from_pretrained(folder / "final")
    assert_same(model.state_dict(), found["evaluated-2-0"][strategy]["weights"])


@pytest.mark.parametrize("name", HALF)
def test_half_precision(found, name):
    """The optimizer steps in float32, and the losses are those of float32 to three digits."""
    ours, whole = found["others-2-0"][name], found["saved-2-0"]["llama ddp"]
    losses = [[line["loss"] for line in each["logs"] if "loss" in line] for each in (ours, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert {weight.dtype for weight in ours["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["fsdp1 whole", "fsdp2 whole", "fsdp2 parts"])
def test_adapters(found, strategy):
    ours, resumed = (found["others-2-0"][f"peft {strategy}{which}"] for which in ("", ", resumed"))
    close(ours, found["others-2-0"]["peft ddp"])
    assert_same(resumed["weights"], ours["weights"])


@pytest.mark.parametrize("strategy", LIGHTNING)
def test_lightning_checkpoints(found, strategy):
    """Lightning's own callback writes whole weights by the names of the model, and one process goes on from them."""
    kept = torch.load(found["folder"] / "lightning" / strategy / "step=10.ckpt", weights_only=False)
    assert len(os.listdir(found["folder"] / "lightning" / strategy / "best")) == 1
    expected = found["saved-2-0"]["plain ddp"]["weights"]
    assert {name.removeprefix("model.") for name in kept["state_dict"]} == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(kept["state_dict"][f"model.{name}"], value, rtol=0, atol=1e-6)
        assert torch.allclose(found["chained-1-0"][strategy]["weights"][name], value, rtol=0, atol=1e-6)


# ---- What went wrong once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", REVIEWED)
def test_infinite_gradients_skip_the_step(found, strategy):
    ours, replicas = (found["reviewed-2-0"][f"overflow {name}"] for name in (strategy, "ddp"))
    losses = [[line["loss"] for line in each["logs"] if "loss" in line] for each in (ours, replicas)]
    assert losses[0] == pytest.approx(losses[1], rel=3e-2)  # sharded weights are float16 in the forward pass
    assert losses[0][:5] == pytest.approx(losses[1][:5], rel=1e-3)
    assert all(weight.isfinite().all() for weight in ours["weights"].values())


@pytest.mark.parametrize("strategy", REVIEWED)
@pytest.mark.parametrize("case", ["label smoothing", "own loader", "vit"])
def test_same_as_replicas(found, case, strategy):
    ours, replicas = (found["reviewed-2-0"][f"{case} {name}"] for name in (strategy, "ddp"))
    close(ours, replicas, atol=2e-5 if case == "vit" else 1e-6)


@pytest.mark.parametrize("strategy", REVIEWED)
@pytest.mark.parametrize("model", ["odd", "vit", "plain"])
def test_odd_models_resume(found, model, strategy):
    """Unused, tied and buffered parts; weights that transformers renames; an optimizer with modes."""
    undisturbed, resumed = (found["reviewed-2-0"][f"{model} {strategy}{which}"] for which in ("", ", resumed"))
    assert_same(resumed["weights"], undisturbed["weights"])


@pytest.mark.parametrize("strategy", REVIEWED)
def test_weights_under_other_names_are_loaded(found, strategy):
    close(found["reviewed-2-0"][f"vit {strategy}, from ddp"], found["reviewed-2-0"]["vit ddp"], atol=2e-5)


AGAIN = """
import sys
from torch.distributed import distributed_c10d
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import make_plain, plain_data

for ends in (False, True, True):
    for kind in ("full_shard", "hybrid_shard"):
        args = TrainingArguments("out", max_steps=1, fsdp=kind, use_cpu=True, disable_tqdm=True, save_strategy="no")
        trainer = Trainer(make_plain(), args, train_dataset=plain_data())
        trainer.train()
        if args.process_index == 0:
            sys.stdout.write(f"groups: {len(distributed_c10d._world.pg_map)}\\n")
    if ends:
        trainer.accelerator.end_training()
"""


def test_groups_do_not_add_up(tmp_path, monkeypatch):
    """Each has threads and sockets. Ranks that part may meet again, in new groups."""
    monkeypatch.chdir(tmp_path)
    done = torchrun(tmp_path, AGAIN)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = re.findall(r"groups: (\d)", done.stdout)
    of_one, of_both = counts[:2]
    assert of_one < of_both
    assert counts == [of_one, of_both, of_both, of_both, of_one, of_both]
