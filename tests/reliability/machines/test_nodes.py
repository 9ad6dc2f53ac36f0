"""Two nodes on this machine, at two addresses: torchrun, nodes with disks of their own, and SLURM's requeueing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support import processes
from tests.support.jobs import JOB, JobGroup, assert_same, final_weights, let_go
from tests.support.launchers import SCRIPT, free_port, read

#: Nodes wait a second for more of them, and miss one after 25: on a busy machine, one that is there may be silent long.
QUICKLY = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=25"
#: Otherwise a torchrun that took part in an earlier round would expect a shared store that a new one does not know.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Node:
    """A torchrun with one worker.

    Args:
        number: of the node, from 1; the first keeps the rendezvous, at `endpoint`.
        endpoint: port of the rendezvous.
        words: the script and its arguments.
        nodes: as `--nnodes` takes them.
        output: file for what it prints.
    """

    def __init__(self, number, endpoint, words, nodes, output):
        self.output = output
        launcher = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{endpoint}", "--rdzv-id=job"]
        launcher += [f"--rdzv-conf={QUICKLY},is_host={int(number == 1)}", f"--local-addr=127.0.0.{number}"]
        launcher += ["--monitor-interval=0.1", *words]
        with open(output, "a") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher],
                env={**processes.environment(), **REJOIN, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lose(self):
        for pid in descendants(self.process.pid):  # workers are in sessions of their own
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def end(self):
        assert self.process.wait(timeout=300) == 0, self.output.read_text()[-3000:]


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]


def wait_for(path, pattern):
    while not re.search(pattern, path.read_text() if path.exists() else "", re.MULTILINE | re.DOTALL):
        time.sleep(0.02)


def assert_close(found, expected):
    """Equal up to the order in which ranks and micro-batches are added, in float64."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def job(folder, **settings):
    return [str(JOB), str(folder), json.dumps(settings)]


def test_two_nodes_train_the_weights_of_one_node(tmp_path):
    settings = ["--max_steps=3", "--learning_rate=0.1", "--use_cpu=True", "--save_strategy=no", "--report_to=none"]
    folders = {"2": tmp_path / "two nodes", "1": tmp_path / "one node"}
    for folder in folders.values():
        folder.mkdir()
    words, endpoint = [SCRIPT, "--output_dir", str(folders["2"]), *settings], free_port()
    nodes = [Node(number, endpoint, words, "2", tmp_path / f"node-{number}") for number in (1, 2)]
    for node in nodes:
        node.end()
    one = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT]
    subprocess.run([*one, "--output_dir", str(folders["1"]), *settings], env=processes.environment(), check=True)
    found, expected = (read(folders[count]) for count in "21")
    assert [process["place"] for process in found] == [[2, 0, 0], [2, 1, 0]]
    assert [process["weights"] for process in found] == [process["weights"] for process in expected]


def test_nodes_with_separate_disks_resume_from_their_own_checkpoints(tmp_path):
    JobGroup(tmp_path / "undisturbed", max_steps=20).end()
    settings = {"save_on_each_node": True, "max_steps": 20}

    def run(**options):
        endpoint = free_port()
        jobs = {number: job(tmp_path / f"disk-{number}", **settings, **options) for number in (1, 2)}
        return [Node(number, endpoint, words, "2", tmp_path / f"node-{number}") for number, words in jobs.items()]

    for number in (1, 2):
        os.mkfifo(tmp_path / f"disk-{number}.go")
    nodes = run(waits_at=9)
    for node in nodes:
        wait_for(node.output, "^waiting$")
    for node in nodes:
        node.lose()
    assert all((tmp_path / f"disk-{number}" / "checkpoint-7" / "model.safetensors").is_file() for number in (1, 2))
    for node in run():
        node.end()
    assert_same(final_weights(tmp_path / "disk-1"), final_weights(tmp_path / "undisturbed"))
    for number in (1, 2):
        assert f"disk-{number}/checkpoint-7" in (tmp_path / f"node-{number}").read_text()
        assert (tmp_path / f"disk-{number}" / "checkpoint-20" / "model.safetensors").is_file()


def lose_and_return(tmp_path, settings):
    """Two nodes become one and two again; returns the output folder, and the steps at which they did."""
    folder, endpoint = tmp_path / "out", free_port()
    os.mkfifo(f"{folder}.go")
    words = job(folder, waits_at=9, alone_until=20, **settings)
    first, second = (Node(number, endpoint, words, "1:2", tmp_path / f"node-{number}") for number in (1, 2))
    for node in (first, second):
        wait_for(node.output, "processes 2.*^waiting$")
    second.lose()
    with let_go(folder):
        wait_for(first.output, "processes 1.*^step 20$")
        second = Node(2, endpoint, words, "1:2", second.output)
        for node in (first, second):
            node.end()
    begun = re.findall(r"^resuming from (.*)\nprocesses (\d)$", first.output.read_text(), re.MULTILINE)
    assert [count for _, count in begun] == ["2", "1", "2"], begun
    assert begun[0][0] == "None"
    lost, back = (int(path.rpartition("-")[2]) for path, _ in begun[1:])
    assert lost >= 7
    assert back == 21  # torchrun asks the one to end: it saves first
    return folder, lost, back


def test_training_continues_when_a_node_is_lost_and_returns(tmp_path):
    """One node continues alone from the last checkpoint; both continue from where it was."""
    settings = {"max_steps": 60, "save_total_limit": None}
    folder, lost, back = lose_and_return(tmp_path, settings)
    expected = tmp_path / "expected"
    for count, kept in ((2, lost), (1, back), (2, 60)):  # the same, each change between two runs
        assert not any(JobGroup(expected, count, save_steps=1, **settings).end())
        for path in expected.glob("checkpoint-*"):
            if int(path.name.rpartition("-")[2]) > kept:
                shutil.rmtree(path)
    assert_same(final_weights(folder), final_weights(expected))


def test_elastic_run_ends_the_same_when_a_node_is_lost_and_returns(tmp_path):
    settings = {"max_steps": 60, "elastic": True, "exact": True, "gradient_accumulation_steps": 2}
    folder, *_ = lose_and_return(tmp_path, settings)
    JobGroup(tmp_path / "undisturbed", 2, **settings).end()
    assert_close(final_weights(folder), final_weights(tmp_path / "undisturbed"))


SLURM_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "slurm.md"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The path with a `srun`, a `scontrol` that notes what it is called with, and python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = Path(__file__).with_name("fake_srun.py").read_text()
    (folder / "srun").write_text(f"#!{sys.executable}\n{fake}")  # other interpreters may come first in its path
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/requeued\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in ("srun", "scontrol", "python"):
        (folder / path).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return tmp_path


ELASTIC = {"elastic": True, "exact": True}


@pytest.mark.parametrize(("tasks", "more"), [((2, 2), {}), ((2, 1), ELASTIC)], ids=["the same", "fewer tasks"])
def test_requeued_slurm_job_ends_as_the_undisturbed_run(slurm, tasks, more):
    """Runs the batch script of the guide."""
    script = re.search(r"```text\n(#!/bin/bash.*?)```", SLURM_GUIDE.read_text(), re.DOTALL)[1]
    call = re.search(r"python train\.py .*", script)[0]
    settings = json.dumps({"max_steps": 40, "waits_at": 10, **more})
    (slurm / "job.sh").write_text(script.replace(call, f"python {JOB} {slurm}/out '{settings}'"))
    os.mkfifo(slurm / "out.go")
    for restart, count in enumerate(tasks):
        output = slurm / f"slurm-{restart}"
        variables = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restart), "SLURM_NTASKS": str(count)}
        with open(output, "w") as file:
            batch = subprocess.Popen(
                ["bash", str(slurm / "job.sh")],
                env={**processes.environment(), **variables, "PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if restart == 0:
            wait_for(output, "(^waiting$.*){2}")
            os.kill(int((slurm / "bin" / "srun.pid").read_text()), signal.SIGUSR1)  # as SLURM does, to each task
            wait_for(output, "SIGUSR1: saving after this step")
            with let_go(slurm / "out"):
                batch.wait(timeout=300)
        batch.wait(timeout=300)
        assert (batch.returncode == 0) == (restart == 1), output.read_text()
    assert (slurm / "requeued").read_text() == "requeue 4711\n"
    assert re.search("^resuming from .*/checkpoint-1[0-9]$", output.read_text(), re.MULTILINE)
    JobGroup(slurm / "undisturbed", max_steps=40, **more).end()
    same = assert_close if more else assert_same
    same(final_weights(slurm / "out"), final_weights(slurm / "undisturbed"))
