"""Runs a document's block in a shell as it stands, with `python` and the launchers of this environment."""

import json
import os
import shlex
import subprocess
import sys

from hftrainer import TrainingArguments
from tests.docs.documents import program
from tests.support import processes
from tests.support.launchers import free_port
from tests.support.parity import comparable

#: Command → its module.
COMMANDS = {
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "accelerate": "-m tests.docs.documents.accelerate_here",
    "deepspeed": "-m deepspeed.launcher.runner",
}
#: What is added to each command line: small, quiet, and on the CPU.
TINY = "--use_cpu True --max_steps 2 --logging_steps 1 --save_strategy no --report_to none --disable_tqdm True"
#: Arguments of a script of which the block says nothing.
NORMAL = "--output_dir out --learning_rate 0.01"


def make_args(folder, kind=TrainingArguments, **settings):
    defaults = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return kind(str(folder), **{**defaults, "max_steps": 2, **settings})


def losses(logs):
    return [line["loss"] for line in logs if "loss" in line]


def join_runs(*lines):
    return " + ".join(f"{line} {TINY}" for line in lines)


def run(folder, block, *programs, **environment):
    """What each process found, by rank, in an empty folder that has scripts at the paths `programs` of the block."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name, module in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (commands / name).chmod(0o755)
    for name in programs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(program.__file__)
    given = {"FOUND": str(folder), "PATH": f"{commands}:{os.environ['PATH']}", **environment}
    given |= dict.fromkeys(("PET_MASTER_PORT", "DLTS_MASTER_PORT"), free_port())
    env = {**processes.environment(), **given}
    done = subprocess.run(["bash", "-ec", block], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return found_in(folder)


def run_python(folder, words, fresh=False, **environment):
    env = {**processes.environment(), "FOUND": str(folder), **environment}
    done = processes.run(program.__file__, *shlex.split(words), cwd=folder, env=env, fresh=fresh)
    assert done.returncode == 0, done.stderr
    return found_in(folder)[0]


def found_in(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def assert_as_release(found):
    """The last run of each process is by transformers, with the arguments of the run before; both log the same."""
    for *_, ours, theirs in found:
        assert comparable(ours["logs"]) == comparable(theirs)
    assert found[0][-2]["weights"] == found[-1][-2]["weights"]
    assert [ranks[-2]["place"] for ranks in found] == [[rank, rank, len(found)] for rank in range(len(found))]
