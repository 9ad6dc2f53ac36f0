"""Which process has made something, and whether it is still there: what killed ones have left can be told by that."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """Name this process, so that others can find out whether it is still there."""
    return f"{socket.gethostname()} {os.getpid()} {_began(os.getpid())}"


def _began(process: int) -> str:
    """When a process began, in ticks since the machine started; ids are used again. Empty where nobody tells."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_gone(owner: str) -> bool:
    """Whether a process of this machine has ended; of those on others nothing is known."""
    host, process, began = f"{owner} ".split(" ")[:3]
    if host != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs, as another user
        return False
    return _began(int(process)) != began
