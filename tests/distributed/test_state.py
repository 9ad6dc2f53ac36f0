"""accelerate's global states in two processes: under a launcher as transformers leaves them, and without one."""

import pickle

import pytest

from tests.distributed.cases_state import find_all
from tests.support.parity import LIBRARIES


@pytest.fixture(scope="module")
def found(processes, tmp_path_factory):
    return {name: processes.run_ranks(find_all, 2, name, tmp_path_factory.mktemp("state")) for name in LIBRARIES}


@pytest.mark.parametrize("rank", [0, 1])
def test_states_are_those_of_transformers(found, rank):
    (ours, *_), (theirs, *_) = (found[name][rank] for name in ("hftrainer", "transformers"))
    for part in ("partial", "whole"):
        assert theirs[part]["device"] == "cpu:0"  # ours is the device of the arguments, which has no number
        theirs[part]["device"] = "cpu"
    assert ours == theirs
    assert ours["agree"] and ours["connected"] and ours["in turn"] and ours["same"]
    assert ours["partial"]["distributed_type"] == "DistributedType.MULTI_CPU"


@pytest.mark.parametrize("rank", [0, 1])
def test_environment_and_thread_count_are_kept(found, rank):
    """accelerate would write the launcher's variables, and choose a number of threads."""
    _, environment, threads = found["hftrainer"][rank]
    assert environment == {}
    assert threads == 3


def test_accelerate_logger_writes_in_the_main_process_only(found):
    assert [of_rank["said"].count("said by the main process") for of_rank, *_ in found["hftrainer"]] == [1, 0]


#: With two `devices`, Lightning runs the script again in a second process.
SCRIPT = """
import os, pickle, sys
from pathlib import Path
from tests.distributed.cases_state import find_all

folder = Path(sys.argv[1])
found = find_all("hftrainer", folder, lightning_config={"devices": 2})
(folder / os.environ.get("LOCAL_RANK", "0")).write_bytes(pickle.dumps(found))
"""


def test_states_in_processes_started_by_the_script(processes, tmp_path):
    """Until the Trainer starts the second process there is one; then all is as with a launcher."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = processes.run(tmp_path / "script.py", tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        found, _, threads = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert found["partial"]["distributed_type"] == "DistributedType.NO" and not found["connected"]
        assert found["main"] == [rank == 0, rank == 0, rank == 1] and found["same"]
        assert found["agree"]
        assert found["whole"]["distributed_type"] == "DistributedType.MULTI_CPU"
        assert found["gather"] == [0, 1] and found["objects"] == ["of 0", "of 1"]
        assert found["broadcast"] == ["of 0"] and threads == 3
        assert found["said"].count("said by the main process") == (rank == 0)
