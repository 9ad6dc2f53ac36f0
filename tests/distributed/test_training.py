"""Two processes on gloo train as those of transformers do, agree on what they do next, and survive being ended."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hftrainer.data.sharding import EvenBatchSampler, ShardSpec
from tests import warm
from tests.distributed.test_evaluation import FAILS_IN_ONE, TORCHRUN, of_both_libraries, python, torchrun
from tests.distributed.train_sets import CASES, FLAGS, RESUMED
from tests.reliability.support import JOB, SHARDED, Group, assert_same, weights

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
from tests.tiny import Plain, make_plain, plain_data

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


ENDS_BUSY = """
import torch
from torch import distributed
from hftrainer import Trainer, TrainingArguments
from tests.tiny import make_plain, plain_data

args = TrainingArguments("out", max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none")
trainer = Trainer(make_plain(), args, train_dataset=plain_data())
trainer.train()
defaults = distributed.nn.functional.all_reduce.__defaults__
print("held by torch" if any(isinstance(each, distributed.ProcessGroup) for each in defaults) else "free")
del trainer  # whose wrapped model holds the group
for _ in range(200):
    distributed.all_reduce(torch.ones(10**5), async_op=True)
"""


def test_a_script_that_ends_while_the_group_is_busy(tmp_path, monkeypatch):
    """A thread of gloo that frees a tensor when Python is gone aborts the process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(ENDS_BUSY)
    run = python(*TORCHRUN, "script.py", **warm.COLD)  # torch's functions are imported after the Trainer
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.findall("held by torch|free", run.stdout) == ["free", "free"]


# ---- Ended from outside ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    pair = Group(folder)
    assert pair.end() == [0, 0], pair.printed()
    return weights(folder)


def finish(folder, **settings):
    pair = Group(folder, **settings)
    assert pair.end() == [0, 0], pair.printed()
    assert pair.printed()[0].splitlines()[-1] == "done 36"
    assert not list(folder.glob("tmp-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_one_process(tmp_path, undisturbed, number):
    """Both save after the same step and leave as the signal says, though a launcher sends another after it."""
    pair = Group(tmp_path / "out", pause=0.02)
    pair.jobs[1].wait_for("step 10")
    os.kill(pair.jobs[1].process.pid, number)
    time.sleep(0.005)
    os.kill(pair.jobs[1].process.pid, signal.SIGTERM)
    assert pair.end() == [128 + number] * 2, pair.printed()
    last = [[line for line in printed.splitlines() if line.startswith("step")][-1] for printed in pair.printed()]
    assert last[0] == last[1]
    assert (tmp_path / "out" / f"checkpoint-{last[0].split()[1]}" / "progress_1.pt").is_file()
    finish(tmp_path / "out")
    assert_same(weights(tmp_path / "out"), undisturbed)


def kill_somewhere(folder, moments, **settings):
    """Start the pair and kill one of them, by the clock or at some touch of its files; what it was at."""
    rank = moments.randrange(2)
    if moments.random() < 0.5:
        pair = Group(folder, pause=0.01, **settings)
        pair.jobs[rank].wait_for("resuming")
        time.sleep(moments.uniform(0.0, 0.8))
        pair.jobs[rank].kill()
    else:
        pair = Group(folder, kill_at=(moments.randrange(1, 120), 0), **settings)
    statuses = pair.end()
    if statuses == [0, 0]:
        return "finished"
    assert -signal.SIGKILL in statuses, pair.printed()
    if 0 in statuses:  # it came when both had done their work, or at the other's own end
        assert "\ndone 36\n" in pair.printed()[statuses.index(0)]
        return "finished"
    if list(folder.glob("tmp-*")):
        return "saving"
    return "training" if "step" in pair.printed()[0] else "starting"


def test_one_process_killed_at_random(tmp_path, undisturbed):
    """Runs of 36 steps that save every 7, each killed a few times; the last end is torchrun's."""
    moments, where, runs = random.Random(5), Counter(), 0
    while where.total() - where["finished"] < 10:
        folder, runs = tmp_path / f"run-{runs}", runs + 1
        for _ in range(4):
            place = kill_somewhere(folder, moments)
            where[place] += 1
            if place == "finished":
                break
        finish(folder)
        assert_same(weights(folder), undisturbed)
    print(dict(where))
    assert where["training"]
    assert where["saving"]


def test_one_process_of_a_sharded_run_killed_at_random(tmp_path):
    """Both write each checkpoint: it is whole or absent all the same."""
    finish(tmp_path / "undisturbed", **SHARDED)
    moments = random.Random(7)
    for number in range(2):
        folder = tmp_path / f"run-{number}"
        for _ in range(3):
            kill_somewhere(folder, moments, **SHARDED)
        finish(folder, **SHARDED)
        assert_same(weights(folder), weights(tmp_path / "undisturbed"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_ends_within_the_timeout_and_says_why(tmp_path, undisturbed, number):
    """One that is killed, and one that hangs."""
    pair = Group(tmp_path / "out", pause=0.02, ddp_timeout=5)
    pair.jobs[1].wait_for("step 16")
    began = time.monotonic()
    os.kill(pair.jobs[1].process.pid, number)
    pair.jobs[0].process.join(timeout=30)
    took = time.monotonic() - began
    pair.jobs[1].kill()
    assert pair.jobs[0].process.exitcode not in (None, 0)
    assert took < 15
    assert "Rank 0 has lost rank 1 while it waited for " in pair.printed()[0]
    finish(tmp_path / "out")
    assert_same(weights(tmp_path / "out"), undisturbed)


@pytest.mark.parametrize("settings", [{}, {"fsdp": True}], ids=["replicas", "sharded"])
def test_saved_in_the_background(tmp_path, settings):
    config = {"lightning_config": {"async_checkpoint": True}}
    finish(tmp_path / "plain", **settings)
    pair = Group(tmp_path / "out", **settings, **config)
    pair.jobs[0].wait_for("step 16")
    pair.jobs[1].kill()
    pair.end()
    finish(tmp_path / "out", **settings, **config)
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "plain"))


def test_a_killed_run_goes_on_under_torchrun(tmp_path, undisturbed):
    pair = Group(tmp_path / "out", pause=0.02)
    pair.jobs[0].wait_for("step 16")
    pair.jobs[0].kill()
    pair.end()
    run = python(*TORCHRUN, str(JOB), str(tmp_path / "out"), json.dumps({}))
    assert run.returncode == 0, run.stderr[-2000:]
    assert "checkpoint-14" in run.stdout
    assert_same(weights(tmp_path / "out"), undisturbed)
