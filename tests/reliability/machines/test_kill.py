"""`kill -9` at random moments: whatever it hits, the next start goes on from a whole checkpoint to the same end."""

import random
import time
from collections import Counter

import pytest

from hftrainer.checkpointing.manifest import why_unusable
from tests.support.checkpoints import BACKGROUND
from tests.support.jobs import Forked, assert_same, weights

WIDTH = 10_000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    Forked(folder, width=WIDTH).finish()
    return weights(folder)


def kill_somewhere(folder, moments, settings):
    """Start a job and kill it, by the clock or at some touch of its files; where that was."""
    by_clock = moments.random() < 0.4
    if by_clock:
        job = Forked(folder, width=WIDTH, pause=0.004, **settings)
        job.wait_for(moments.choice(["resuming", "step"]))
        time.sleep(moments.choice([0.0, moments.uniform(0.0, 0.6)]))  # at once too: where the others hit, speed decides
        job.kill()
    else:
        job = Forked(folder, width=WIDTH, kill_at=moments.randrange(1, 250), **settings)
        job.process.join()
    printed = job.output.read_text()
    assert "Error" not in printed, printed
    if "done" in printed:
        return "finished"
    if list(folder.glob("_tmp_*_removed_*")):
        return "rotating"
    if list(folder.glob("_tmp_*")):
        return "saving"
    return "training" if "step" in printed else "resuming"


#: How the jobs save → settings, and how many kills.
JOBS = {
    "at-once": ({}, 50),
    "in-background": (BACKGROUND, 20),
    "files of the script": ({"adds": True}, 20),
    "files of the script, in-background": ({"adds": True, **BACKGROUND}, 10),
}


@pytest.mark.parametrize(("settings", "kills"), JOBS.values(), ids=JOBS)
def test_killed_at_random(tmp_path, undisturbed, settings, kills):
    """Runs of 72 steps that save every 7; each is killed a few times, then finishes.

    Each checkpoint that can be resumed from has the files that the script adds, whole.
    """
    moments, where, runs = random.Random(7), Counter(), 0
    while where.total() - where["finished"] < kills:
        folder, runs = tmp_path / f"run-{runs}", runs + 1
        for _ in range(6):
            place = kill_somewhere(folder, moments, settings)
            where[place] += 1
            check_added(folder, settings)
            if place == "finished":
                break
        printed = Forked(folder, width=WIDTH, **settings).finish()
        assert printed[-1] == "done 72"
        assert_same(weights(folder), undisturbed)
        assert not list(folder.glob("_tmp_*"))
        assert len(list(folder.glob("checkpoint-*"))) == 2
        check_added(folder, settings)
    print(dict(where))
    assert kills < 20 or all(where[place] for place in ("training", "saving", "resuming"))
    assert where["rotating"] or kills < 50


def check_added(folder, settings):
    for checkpoint in folder.glob("checkpoint-*") if "adds" in settings else ():
        if why_unusable(checkpoint) is None:
            text = (checkpoint / "before.txt").read_text()
            assert text == f"{checkpoint.name}/before.txt " * 1000
