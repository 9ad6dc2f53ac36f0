"""A process that fails, is killed or is signalled ends the others that were launched with it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.launchers import DEVICES, LAUNCHERS, start


@pytest.mark.parametrize("rank", [0, 1])
def test_failing_process_ends_all(rank, tmp_path):
    process = start(tmp_path, [], DEVICES, MISBEHAVE=f"fail {rank}")
    printed = process.communicate()[0]  # both hold the pipe
    assert process.returncode != 0
    assert "as asked" in printed


def test_failure_after_rank_0_has_finished_is_reported(tmp_path):
    """Rank 0 waits for rank 1. Lightning, which looks every five seconds, may kill rank 0 first."""
    process = start(tmp_path, [], DEVICES, MISBEHAVE="fail late")
    printed = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL or (
        process.returncode == 1 and "Rank 0 has finished, but rank 1 exited with status 3" in printed
    )


def is_running(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [([], DEVICES, signal.SIGKILL), ([], DEVICES, signal.SIGINT), (LAUNCHERS["hftrainer"](), (), signal.SIGTERM)],
    ids=["killed", "Ctrl-C", "SIGTERM to hftrainer run"],
)
def test_signal_to_the_first_process_ends_all(before, after, number, tmp_path):
    process = start(tmp_path, before, after, MISBEHAVE="wait")
    printed, pids = "", []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, f"ended before it waited: {printed}"
        printed += line
        pids = [int(pid) for pid in re.findall(r"waiting (\d+)", printed)]
    os.kill(process.pid, number)
    process.communicate()
    assert process.returncode != 0
    while any(is_running(pid) for pid in pids):  # for as long as pytest-timeout allows
        time.sleep(0.1)


def test_run_command_exits_with_the_status_of_the_failed_process(tmp_path, processes):
    path = tmp_path / "script.py"
    path.write_text("import os, signal, sys\nif os.environ['RANK'] == '1':\n    sys.exit(7)\nsignal.pause()\n")
    done = processes.run("-m", "hftrainer", "run", "--nproc", "2", path, cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stderr) == (7, "[hftrainer] Rank 1 ended first, with status 7.\n")


def test_run_command_prints_an_error_before_training_once(tmp_path, processes):
    path = tmp_path / "script.py"
    path.write_text("from transformers import TrainingArguments\nTrainingArguments(learning_rat=1)\n")
    done = processes.run("-m", "hftrainer", "run", "--nproc", "2", path, cwd=tmp_path, fresh=True)
    assert done.stderr.count("]: Traceback") == 1 and done.stderr.count("(The traceback is the same as that") == 1
    assert done.stderr.count("learning_rat=1") == 1 and "torch/" not in done.stderr
