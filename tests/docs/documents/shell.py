"""Runs a document's block in a shell as it stands, with `python` and the launchers of this environment."""

import functools
import json
import os
import shlex
import subprocess

from tests.docs.documents import program
from tests.support import warm
from tests.support.launching import port
from tests.support.parity import comparable

#: Command → its module, for a Python that has its imports done.
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


def several(*lines):
    """The words for runs one after the other in the same processes."""
    return " + ".join(f"{line} {TINY}" for line in lines)


def run(folder, block, *programs, **environment):
    """What each process found, by rank.

    Args:
        folder: an empty folder, in which the block runs.
        block: the lines.
        programs: the paths in the block at which the document has a script.
        environment: further variables.
    """
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name, module in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(warm.PYTHON)} {module} "$@"\n')
        (commands / name).chmod(0o755)
    for name in programs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(program.__file__)
    free = port()
    given = {
        "FOUND": str(folder),
        "PET_MASTER_PORT": free,
        "DLTS_MASTER_PORT": free,
        "WARM_PYTHON": os.environ["WARM_PYTHON"],
    }
    done = subprocess.run(
        ["bash", "-ec", block],
        cwd=folder,
        env={**warm.environment(), **warm.AGAIN, **given, "PATH": f"{commands}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def assert_as_release(found):
    """The last run of each process is the release's own, with the arguments of the run before: the same log lines."""
    for *_, ours, theirs in found:
        assert comparable(ours["logs"]) == comparable(theirs)
    assert found[0][-2]["weights"] == found[-1][-2]["weights"]
    assert [ranks[-2]["place"] for ranks in found] == [[rank, rank, len(found)] for rank in range(len(found))]


@functools.cache
def release_alone():
    """What the release logs in one process, with the normal arguments."""
    return comparable(program.logs_of_release(several(NORMAL).split()))


def assert_as_release_alone(run):
    """A run of one process with the normal arguments has the log lines of the release, on the CPU."""
    assert comparable(run["logs"]) == release_alone()
    assert (run["place"], run["device"]) == ([0, 0, 1], "cpu")
