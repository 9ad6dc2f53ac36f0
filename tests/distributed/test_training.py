"""Two processes on gloo train as those of transformers do, and agree on what they do next."""

from pathlib import Path

import pytest
import torch

from hftrainer.data.sharding import EvenBatchSampler, ShardSpec
from tests.distributed.train_sets import CASES, FLAGS, RESUMED
from tests.support.jobs import assert_same
from tests.support.launching import FAILS_IN_ONE, of_both_libraries, torchrun

RANKS = ("0", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `train_sets.py` wrote, by library and rank."""
    return of_both_libraries(Path(__file__).with_name("train_sets.py"), tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", [*CASES, *dict.fromkeys(f"{name}, resumed" for name, _ in RESUMED)])
def test_same_as_transformers(found, case, rank):
    """Log lines, events, files, weights, and the random numbers drawn."""
    ours, theirs = dict(found[f"hftrainer-{rank}"][case]), dict(found[f"transformers-{rank}"][case])
    assert torch.equal(ours.pop("random"), theirs.pop("random"))
    assert_same(ours.pop("weights"), theirs.pop("weights"))
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_same_in_both_processes(found, case):
    first, second = (found[f"hftrainer-{rank}"][case] for rank in RANKS)
    assert first["logs"][:-1] == second["logs"][:-1]  # the last has the mean loss, which is each one's own
    if case != "batch norm":  # whose statistics are each one's own until the next step
        assert_same(first["weights"], second["weights"])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", [name for name, _ in RESUMED])
@pytest.mark.parametrize("written", ["resumed", "resumed from theirs"])
def test_resumed_run_ends_the_same(found, name, written, rank):
    undisturbed, resumed = found[f"hftrainer-{rank}"][name], found[f"hftrainer-{rank}"][f"{name}, {written}"]
    assert_same(resumed["weights"], undisturbed["weights"])
    assert resumed["logs"][:-1] == undisturbed["logs"][:-1]
    assert torch.equal(resumed["random"], undisturbed["random"])


def test_dropout_draws_the_same_in_both(found):
    """As in transformers: all processes are seeded alike."""
    for library in ("transformers", "hftrainer"):
        assert torch.equal(*(found[f"{library}-{rank}"]["plain"]["random"] for rank in RANKS))


def test_early_stopping_stops(found):
    assert found["hftrainer-0"]["early stopping"]["extra"]["global_step"] < 45


AGREED = {
    "stops": (3, []),
    "stops in the middle of an epoch": (2, []),  # a step later: the other process had no reason to wait
    "stops within a step": (2, []),
    "stops when it has logged": (4, []),
    "ends the epoch": (5, []),
    "saves": (6, ["checkpoint-6"]),  # a step later
    "saves when it has logged": (6, ["checkpoint-2"]),
    "evaluates": (6, []),
}


@pytest.mark.parametrize("case", FLAGS)
def test_what_one_is_asked_to_do_all_do(found, case):
    first, second = (found[f"hftrainer-{rank}"]["agreed"][case] for rank in RANKS)
    assert (first["step"], first["folders"]) == AGREED[case]
    assert (second["step"], second["folders"]) == AGREED[case]
    assert [sorted(line) for line in first["logs"]] == [sorted(line) for line in second["logs"]]
    assert any("eval_loss" in line for line in first["logs"]) == (case == "evaluates")


@pytest.mark.parametrize("rank", RANKS)
def test_a_full_disk_is_agreed_on(found, rank):
    agreed = found[f"hftrainer-{rank}"]["agreed"]
    assert agreed["full"] == {"best": None, "folders": []}
    assert "has no whole checkpoint-xxx folder" in agreed["nothing to resume from"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_batches_of_any_size(rank):
    from accelerate.data_loader import BatchSamplerShard

    for count in range(9):
        sizes = [[index] * (index % 3 + 1) for index in range(count)]
        assert list(EvenBatchSampler(sizes, ShardSpec(rank, 3))) == list(BatchSamplerShard(sizes, 3, rank))


REFUSED = (
    """
import os, sys, torch
from lightning.pytorch.callbacks import LearningRateFinder
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import Plain, make_plain, plain_data

def attempt(data, resume=None, callbacks=None, **settings):
    args = TrainingArguments("out", use_cpu=True, disable_tqdm=True, max_steps=2, save_strategy="no", **settings)
    try:
        Trainer(make_plain(), args, train_dataset=data, callbacks=callbacks).train(resume)
    except ValueError as error:
        if args.process_index == 0:
            print(error)

attempt(plain_data(), resume="some.ckpt")
attempt(plain_data(), auto_find_batch_size=True)
attempt(plain_data(), callbacks=[LearningRateFinder()])
sys.stdout.flush()

"""
    + FAILS_IN_ONE
    + """
Trainer(Fails(), args, train_dataset=plain_data()).train()
"""
)


def test_refusals_and_a_failing_process(tmp_path):
    run = torchrun(tmp_path, REFUSED)
    assert run.returncode != 0
    assert "only here" in run.stderr
    assert not list(tmp_path.glob("**/checkpoint-*"))
    for sentence in (
        "resume_from_checkpoint='some.ckpt' holds the random states of one process",
        "auto_find_batch_size=True would start again",
        "LearningRateFinder is not supported yet in several processes",
    ):
        assert run.stdout.count(sentence) == 1
