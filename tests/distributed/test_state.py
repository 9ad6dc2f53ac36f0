"""accelerate's global states in two processes: under a launcher as transformers leaves them, and without one."""

import pickle

import pytest

from tests.distributed.cases_state import find_all
from tests.support.parity import LIBRARIES


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    return {name: processes.run_ranks(find_all, 2, name, tmp_path_factory.mktemp("state")) for name in LIBRARIES}


@pytest.mark.parametrize("rank", [0, 1])
def test_states_are_those_of_transformers(results, rank):
    (ours, *_), (theirs, *_) = (results[name][rank] for name in ("hftrainer", "transformers"))
    for part in ("partial", "whole"):
        assert theirs[part]["device"] == "cpu:0"  # ours is the device of the arguments, which has no number
        theirs[part]["device"] = "cpu"
    assert ours == theirs
    assert ours["agree"] and ours["connected"] and ours["in turn"] and ours["same"]
    assert ours["partial"]["distributed_type"] == "DistributedType.MULTI_CPU"


@pytest.mark.parametrize("rank", [0, 1])
def test_environment_and_thread_count_are_kept(results, rank):
    """accelerate would write the launcher's variables, and choose a number of threads."""
    _, environment, threads = results["hftrainer"][rank]
    assert environment == {}
    assert threads == 3


def test_accelerate_logger_writes_in_the_main_process_only(results):
    assert [of_rank["said"].count("said by the main process") for of_rank, *_ in results["hftrainer"]] == [1, 0]


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
        results, _, threads = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert results["partial"]["distributed_type"] == "DistributedType.NO" and not results["connected"]
        assert results["main"] == [rank == 0, rank == 0, rank == 1] and results["same"]
        assert results["agree"]
        assert results["whole"]["distributed_type"] == "DistributedType.MULTI_CPU"
        assert results["gather"] == [0, 1] and results["objects"] == ["of 0", "of 1"]
        assert results["broadcast"] == ["of 0"] and threads == 3
        assert results["said"].count("said by the main process") == (rank == 0)
