"""A rank that is signalled or killed: all end, say why, and the next start ends with the undisturbed weights."""

import json
import os
import re
import signal

import pytest

from tests.support.checkpoints import BACKGROUND
from tests.support.jobs import JOB, JobGroup, assert_same, final_weights, let_go
from tests.support.launchers import TORCHRUN, run_python


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    pair = JobGroup(folder)
    assert pair.end() == [0, 0], pair.printed()
    return final_weights(folder)


def finish(folder, **settings):
    pair = JobGroup(folder, **settings)
    assert pair.end() == [0, 0], pair.printed()
    assert pair.printed()[0].splitlines()[-1] == "done 36"
    assert not list(folder.glob("_tmp_*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=repr)
def test_signal_to_one_rank_saves_and_ends_both_at_one_step(tmp_path, undisturbed, number):
    """Also if a launcher sends a second signal."""
    pair = JobGroup(tmp_path / "out", waits_at=10, copies_within=1e9)
    pair.wait_for("waiting")
    os.kill(pair.jobs[1].process.pid, number)
    os.kill(pair.jobs[1].process.pid, signal.SIGTERM)
    with let_go(tmp_path / "out"):
        assert pair.end() == [128 + number] * 2, pair.printed()
    last = [[line for line in printed.splitlines() if line.startswith("step")][-1] for printed in pair.printed()]
    assert last[0] == last[1]
    assert (tmp_path / "out" / f"checkpoint-{last[0].split()[1]}" / "progress_1.pt").is_file()
    finish(tmp_path / "out")
    assert_same(final_weights(tmp_path / "out"), undisturbed)


def test_rank_that_waits_for_a_killed_one_ends_and_says_why(tmp_path, undisturbed):
    """`test_hangs.py` has those that wait for a hung one."""
    pair = JobGroup(tmp_path / "out", waits_at=16)
    pair.wait_for("waiting")
    pair.jobs[1].kill()
    with let_go(tmp_path / "out"):
        pair.jobs[0].process.join()
    assert pair.jobs[0].process.exitcode not in (None, 0)
    assert "Rank 0 has lost rank 1 while it waited for " in pair.printed()[0]
    finish(tmp_path / "out")
    assert_same(final_weights(tmp_path / "out"), undisturbed)


@pytest.mark.parametrize("settings", [{}, {"fsdp": True}], ids=["replicas", "sharded"])
def test_run_killed_while_it_saves_in_the_background_resumes_exactly(tmp_path, settings):
    finish(tmp_path / "plain", **settings)
    pair = JobGroup(tmp_path / "out", waits_at=14, **settings, **BACKGROUND)  # step 14 has begun to save
    pair.wait_for("waiting")
    pair.jobs[1].kill()
    with let_go(tmp_path / "out"):
        pair.end()
    finish(tmp_path / "out", **settings, **BACKGROUND)
    assert_same(final_weights(tmp_path / "out"), final_weights(tmp_path / "plain"))


def test_killed_run_resumes_under_torchrun(tmp_path, undisturbed):
    pair = JobGroup(tmp_path / "out", waits_at=16)
    pair.wait_for("waiting")
    pair.jobs[0].kill()
    with let_go(tmp_path / "out"):
        pair.end()
    run = run_python(*TORCHRUN, str(JOB), str(tmp_path / "out"), json.dumps({}))
    assert run.returncode == 0, run.stderr[-2000:]
    assert "checkpoint-14" in run.stdout
    assert_same(final_weights(tmp_path / "out"), undisturbed)


ENDS_BUSY = """
import torch
from torch import distributed
from hftrainer import Trainer, TrainingArguments
from tests.support.small_models import make_plain, plain_data

args = TrainingArguments("out", max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none")
trainer = Trainer(make_plain(), args, train_dataset=plain_data())
trainer.train()
defaults = distributed.nn.functional.all_reduce.__defaults__
print("held by torch" if any(isinstance(each, distributed.ProcessGroup) for each in defaults) else "free")
del trainer  # whose wrapped model holds the group
for _ in range(200):
    distributed.all_reduce(torch.ones(10**5), async_op=True)
"""


def test_script_may_end_while_collectives_are_running(tmp_path, monkeypatch):
    """A thread of gloo that frees a tensor when Python is gone aborts the process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(ENDS_BUSY)
    run = run_python(*TORCHRUN, "script.py")  # torch's functions are imported after the Trainer
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.findall("held by torch|free", run.stdout) == ["free", "free"]
