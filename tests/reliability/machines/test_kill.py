"""`kill -9` at random moments: whatever it hits, the next start goes on from a whole checkpoint to the same end."""

import random
import time
from collections import Counter

import pytest

from hftrainer.checkpointing.manifest import why_unusable
from tests.support.jobs import Forked, assert_same, weights

ASYNC = {"lightning_config": {"async_checkpoint": True}}
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


@pytest.mark.parametrize(("settings", "kills"), [({}, 50), (ASYNC, 20)], ids=["at-once", "in-background"])
def test_killed_at_random(tmp_path, undisturbed, settings, kills):
    """Runs of 72 steps that save every 7; each is killed a few times, then finishes."""
    moments, where, runs = random.Random(7), Counter(), 0
    while where.total() - where["finished"] < kills:
        folder, runs = tmp_path / f"run-{runs}", runs + 1
        for _ in range(6):
            place = kill_somewhere(folder, moments, settings)
            where[place] += 1
            if place == "finished":
                break
        printed = Forked(folder, width=WIDTH, **settings).finish()
        assert printed[-1] == "done 72"
        assert_same(weights(folder), undisturbed)
        assert not list(folder.glob("_tmp_*"))
        assert len(list(folder.glob("checkpoint-*"))) == 2
    print(dict(where))
    assert all(where[place] for place in ("training", "saving", "resuming"))
    assert where["rotating"] or kills < 50


@pytest.mark.parametrize(("settings", "kills"), [({}, 20), (ASYNC, 10)], ids=["at-once", "in-background"])
def test_files_that_the_script_adds(tmp_path, settings, kills):
    """Whatever `kill -9` hits: each checkpoint that can be resumed from has the script's files, whole."""
    Forked(tmp_path / "undisturbed", adds=True, **settings).finish()
    moments, killed, begun = random.Random(5), 0, 0
    while killed < kills:
        folder, begun = tmp_path / f"run-{begun}", begun + 1
        for _ in range(4):
            job = Forked(folder, adds=True, kill_at=moments.randrange(1, 250), **settings)
            job.process.join()
            if "done" in job.output.read_text():
                break
            killed += 1
            check_added(folder)
        printed = Forked(folder, adds=True, **settings).finish()
        assert printed[-1] == "done 72"
        assert_same(weights(folder), weights(tmp_path / "undisturbed"))
        assert not list(folder.glob("_tmp_*"))
        check_added(folder)


def check_added(folder):
    for checkpoint in folder.glob("checkpoint-*"):
        if why_unusable(checkpoint) is None:
            text = (checkpoint / "before.txt").read_text()
            assert text == f"{checkpoint.name}/before.txt " * 1000
