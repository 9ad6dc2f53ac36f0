"""What happens to machines in the middle of a run: kills, signals, stops, full and read-only disks, damaged files."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from tests.support.checkpoints import flip


class FailsOnce:
    """Takes the place of a function, and raises an error in one of its calls, of those with a file's `name` if given.

    `thread` is the one that has got the error; `failed` is set when it is raised.
    """

    def __init__(self, monkeypatch, module, function, error, name=None, call=1):
        self.original, self.name, self.error, self.left = getattr(module, function), name, error, call
        self.thread, self.failed = None, threading.Event()
        monkeypatch.setattr(module, function, self)

    def __call__(self, *arguments):
        if self.name is None or self.name in map(os.path.basename, map(str, arguments)):
            self.left -= 1
            if self.left == 0:
                self.thread = threading.current_thread()
                self.failed.set()
                raise self.error
        return self.original(*arguments)


class Disk:
    """A small file system in memory, which can be full or read-only, for one run; its size is as `mount` takes it."""

    def __init__(self, folder, size):
        self.folder, self.filler = folder, folder / "filler"
        folder.mkdir(parents=True)
        self.mounted = self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def _mount(self, *words):
        return subprocess.run(["mount", *words, str(self.folder)], capture_output=True).returncode == 0

    def fill(self):
        with open(self.filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"0" * 65536):
                pass

    def forbid(self):
        """Read-only as soon as no file is open for writing."""
        for _ in range(2000):
            if self._mount("-o", "remount,ro"):
                return
            time.sleep(0.001)

    def mend(self):
        if self.mounted:
            self._mount("-o", "remount,rw")
            self.filler.unlink(missing_ok=True)

    def used(self):
        """MB in the files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) / 2**20

    def remove(self):
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def _victim(group, moments):
    """One of the processes, somewhere in its run: also before its first step."""
    job = moments.choice(group.jobs)
    with contextlib.suppress(AssertionError):  # it has ended by itself
        job.wait_for("resuming")
    time.sleep(moments.choice([0.0, moments.uniform(0.0, 0.8)]))
    return job.process.pid


#: What machines do to a process: signals, each with the least and the most seconds before the next.
SIGNALS = {
    "kill": [(signal.SIGKILL, 0.0, 0.0)],
    "terminate": [(signal.SIGTERM, 0.0, 0.0)],
    # impatient: it kills what does not end at once
    "terminate twice": [(signal.SIGTERM, 0.0, 0.05), (signal.SIGKILL, 0.0, 0.0)],
    # asleep for a while, and lost a moment after it has woken up
    "stop": [(signal.SIGSTOP, 0.1, 0.6), (signal.SIGCONT, 0.0, 0.3), (signal.SIGKILL, 0.0, 0.0)],
}
#: Faults of a mounted `Disk`.
DISK_FAULTS = {"fill disk": Disk.fill, "forbid writing": Disk.forbid}


def disturb(name, group, disk, moments):
    pid = _victim(group, moments)
    if name in DISK_FAULTS:
        DISK_FAULTS[name](disk)
    for number, least, most in SIGNALS.get(name, ()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(moments.uniform(least, most))


def damage_a_file(folder, moments):
    path = moments.choice(sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size))
    place = moments.randrange(path.stat().st_size)
    if moments.random() < 0.5:
        os.truncate(path, place)
    else:
        flip(path, place, 1 << moments.randrange(8))
    return f"{path.parent.name}/{path.name}"
