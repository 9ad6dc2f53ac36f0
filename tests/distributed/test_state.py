"""accelerate's global states in two processes: under torchrun as transformers leaves them, and without a launcher."""

import pickle
from pathlib import Path

import pytest

from tests.support.launching import TORCHRUN, Runs, python

SCRIPT = Path(__file__).with_name("state_sets.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Runs(SCRIPT, tmp_path_factory.mktemp("state"))


def without_its_own(state):
    """All but what accelerate alone touches."""
    return {name: value for name, value in state.items() if name not in ("environment", "threads")}


def of_transformers(found, rank):
    state = without_its_own(found[f"transformers-{rank}"])
    for part in (state["partial"], state["whole"]):
        assert part["device"] == "cpu:0"  # ours is the device of the arguments, which has no number
        part["device"] = "cpu"
    return state


@pytest.mark.parametrize("rank", [0, 1])
def test_as_transformers_leaves_them(found, rank):
    ours = found[f"hftrainer-{rank}"]
    assert without_its_own(ours) == of_transformers(found, rank)
    assert all(ours["agree"]) and ours["connected"] and ours["in turn"] and ours["same"]
    assert ours["partial"]["distributed_type"] == "DistributedType.MULTI_CPU"


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_else_is_touched(found, rank):
    """accelerate would write the launcher's variables, and choose a number of threads."""
    assert found[f"hftrainer-{rank}"]["environment"] == {}
    assert found[f"hftrainer-{rank}"]["threads"] == 3


def test_processes_that_the_script_starts(tmp_path):
    """Before the Trainer starts the second, nobody waits for it; from then on all is as with a launcher."""
    run = python(str(SCRIPT), "hftrainer", str(tmp_path), "devices")
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr.count("said by the main process") == 1
    for rank in (0, 1):
        found = pickle.loads((tmp_path / f"hftrainer-{rank}.pkl").read_bytes())
        assert found["partial"]["distributed_type"] == "DistributedType.NO" and not found["connected"]
        assert found["main"] == [rank == 0, rank == 0, rank == 1] and found["same"]
        assert all(found["agree"])
        assert found["whole"]["distributed_type"] == "DistributedType.MULTI_CPU"
        assert found["gather"] == [0, 1] and found["objects"] == ["of 0", "of 1"]
        assert found["broadcast"] == ["of 0"] and found["threads"] == 3


def test_the_main_process_speaks(tmp_path):
    run = python(*TORCHRUN, str(SCRIPT), "hftrainer", str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr.count("said by the main process") == 1
