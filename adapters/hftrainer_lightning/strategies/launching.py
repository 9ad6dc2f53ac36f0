"""Starting the other processes of a run, and what Lightning is told about those that there are."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from hftrainer.parallel.environment import STARTED_BY, RankInfo
from hftrainer_lightning import private_api

#: Seconds in which the others may say what is wrong with them, when this process has failed.
_LAST_WORDS = 3.0
_SECONDS_BETWEEN_LOOKS = 0.5


class Launched(ClusterEnvironment):
    """Tells Lightning where this process stands; whoever started it, nothing is read or written in `os.environ`.

    Lightning's own environments are found by guessing, and some clear variables of the launcher when a run ends.

    Args:
        rank_info: where this process stands.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    def creates_processes_externally(self) -> bool:
        """The processes are there when Lightning begins."""
        return True

    @property
    def main_address(self) -> str:
        """Host of the first process."""
        return self._rank_info.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port of the first process."""
        return self._rank_info.port

    @staticmethod
    def detect() -> bool:
        """Never by itself."""
        return False

    def world_size(self) -> int:
        """Processes in all."""
        return self._rank_info.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has decided."""

    def global_rank(self) -> int:
        """Number of this process among all."""
        return self._rank_info.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided."""

    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self._rank_info.local_rank

    def node_rank(self) -> int:
        """Number of this node, where all have as many processes."""
        return self._rank_info.rank // self._rank_info.local_world_size


def start_others(rank_info: RankInfo, timeout: float) -> None:
    """In a script that uses several devices without a launcher, start it again for each further one.

    Nothing is left running: the others end with this process, and this process with the first of them that fails.
    Afterwards the environment says where this process stands, as it does in the others.

    Args:
        rank_info: where this process stands.
        timeout: seconds that the others may take to end when this process has ended well.
    """
    if rank_info.started:
        starter = int(os.environ.get(STARTED_BY, os.getpid()))
        if starter != os.getpid():
            _follow(starter)
        return
    os.environ[STARTED_BY] = str(os.getpid())
    launcher = private_api.start_script_again(LightningEnvironment(), rank_info.world_size)
    atexit.register(_wait_for, launcher.procs, timeout)


def _wait_for(others: list[subprocess.Popen[Any]], timeout: float) -> None:
    """Wait for the others to end; not for long when this process ends by an exception."""
    deadline = time.monotonic() + (_LAST_WORDS if hasattr(sys, "last_value") else timeout)
    for process in others:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()


def _follow(starter: int) -> None:
    """End with the process that has started this one, however that ends: once for each process."""
    if any(thread.name == _follow.__name__ for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name=_follow.__name__, daemon=True).start()
