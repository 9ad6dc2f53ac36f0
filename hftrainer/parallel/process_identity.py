"""Identifies the process that made a file, and whether it still runs: this finds what killed processes left behind."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

#: Seconds without a write after which what a process of another machine writes counts as left behind.
_LONG = 24 * 3600


def this_process() -> str:
    """An identifier of this process, with which other processes can find out whether it still runs."""
    return f"{socket.gethostname()} {os.getpid()} {_began(os.getpid())}"


def _began(process: int) -> str:
    """Start time of a process, in ticks since boot, since process ids are reused; empty if it is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_gone(owner: str) -> bool:
    """Whether a process of this machine has ended; False for processes of other machines."""
    host, process, began = f"{owner} ".split(" ")[:3]
    if host != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs as another user
        return False
    return _began(int(process)) != began


def is_left_behind(folder: Path, owner: str) -> bool:
    """Whether the process that writes into `folder` has ended.

    Nobody knows that of a process of another machine, which may have been a container on this one: its folder is left
    behind when nothing was written there for a day.
    """
    if owner.split(" ")[0] == socket.gethostname():
        return is_gone(owner)
    return time.time() - max(path.stat().st_mtime for path in [folder, *folder.rglob("*")]) > _LONG
