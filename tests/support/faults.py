"""What happens to machines in the middle of a run: kills, signals, stops, full and read-only disks, damaged files."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


class Disk:
    """A small file system in memory, which can be full or read-only, for one run.

    Args:
        folder: where it is mounted.
        size: as `mount` takes it.
    """

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


def _send(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill(group, disk, moments):
    _send(_victim(group, moments), signal.SIGKILL)


def terminate(group, disk, moments):
    _send(_victim(group, moments), signal.SIGTERM)


def terminate_twice(group, disk, moments):
    """An impatient machine: it kills what does not end at once."""
    pid = _victim(group, moments)
    _send(pid, signal.SIGTERM)
    time.sleep(moments.uniform(0.0, 0.05))
    _send(pid, signal.SIGKILL)


def stop(group, disk, moments):
    """A machine that sleeps for a while, and is lost a moment after it has woken up."""
    pid = _victim(group, moments)
    _send(pid, signal.SIGSTOP)
    time.sleep(moments.uniform(0.1, 0.6))
    _send(pid, signal.SIGCONT)
    time.sleep(moments.uniform(0.0, 0.3))
    _send(pid, signal.SIGKILL)


def fill_disk(group, disk, moments):
    _victim(group, moments)
    disk.fill()


def forbid_writing(group, disk, moments):
    _victim(group, moments)
    disk.forbid()


#: Faults that need nothing.
ANYWHERE = (kill, terminate, terminate_twice, stop)
#: And a `Disk` that is mounted.
OF_DISKS = (fill_disk, forbid_writing)


def damage(folder, moments):
    """Cut off a file's end, or flip a bit of it; what was done."""
    path = moments.choice(sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(path.read_bytes())
    place = moments.randrange(len(data))
    if moments.random() < 0.5:
        del data[place:]
    else:
        data[place] ^= 1 << moments.randrange(8)
    path.write_bytes(data)
    return f"{path.parent.name}/{path.name}"
