"""Starts the other processes of a run, and gives Lightning the ranks."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from hftrainer.parallel.environment import PARENT_PID_VARIABLE, RankInfo
from hftrainer.parallel.process_group import disconnect_at_exit
from hftrainer_lightning.private_api.trainer import start_script_again

logger = logging.getLogger(__name__)

#: Seconds for the other processes to report their errors, when this process has failed.
_GRACE_AFTER_FAILURE = 3.0
_SECONDS_BETWEEN_LOOKS = 0.5


class LaunchedEnvironment(ClusterEnvironment):
    """Gives Lightning this process's ranks, for any launcher, without reading or writing `os.environ`.

    Lightning guesses which of its own environments applies, and some clear the launcher's variables when a run ends.

    Args:
        rank_info: the ranks of this process.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    def creates_processes_externally(self) -> bool:
        """True: the processes are running when Lightning begins."""
        return True

    @property
    def main_address(self) -> str:
        """Hostname of rank 0."""
        return self._rank_info.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port of rank 0."""
        return self._rank_info.port

    @staticmethod
    def detect() -> bool:
        """False: this environment is only passed explicitly."""
        return False

    def world_size(self) -> int:
        """Number of processes."""
        return self._rank_info.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has set it."""

    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self._rank_info.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has set it."""

    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self._rank_info.local_rank

    def node_rank(self) -> int:
        """Rank of this node; all nodes have the same number of processes."""
        return self._rank_info.rank // self._rank_info.local_world_size


def start_other_processes(rank_info: RankInfo, timeout: float) -> None:
    """Start the script once for each further device, if there is no launcher.

    All processes end together: the others exit with this one, and this one exits with a nonzero status when another
    fails, even after its own script has finished. Afterwards the environment variables hold the ranks of this process,
    as in the others.

    Args:
        rank_info: the ranks of this process.
        timeout: seconds that the others may take to end when this process has ended without an error.
    """
    if rank_info.started:
        starter = int(os.environ.get(PARENT_PID_VARIABLE, os.getpid()))
        if starter != os.getpid():
            _exit_with_parent(starter)
        return
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    launcher = start_script_again(LightningEnvironment(), rank_info.world_size)
    disconnect_at_exit()  # runs after the others have ended, since this process hosts the store that connects them
    atexit.register(_wait_for_others, launcher.procs, timeout)


def _wait_for_others(others: list[subprocess.Popen[Any]], timeout: float) -> None:
    """Wait until the other ranks exit, only briefly after an exception in this process.

    Lightning kills this process when another fails, but checks only every few seconds.
    """
    has_failed = hasattr(sys, "last_value")
    deadline = time.monotonic() + (_GRACE_AFTER_FAILURE if has_failed else timeout)
    endings = []
    for rank, process in enumerate(others, 1):
        try:
            status = process.wait(max(deadline - time.monotonic(), 0))
            if status:
                endings.append(f"rank {rank} exited with status {status}")
        except subprocess.TimeoutExpired:
            process.kill()
            endings.append(f"rank {rank} was still running after ddp_timeout={timeout:g} seconds, and was killed")
    if endings and not has_failed:
        logger.error("Rank 0 has finished, but %s.", ", ".join(endings))
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # An exception in an `atexit` handler would leave the exit status at 0.
        os._exit(1)


def _exit_with_parent(starter: int) -> None:
    """Exit when the process that started this one has ended. Starts at most one thread."""
    if any(thread.name == _exit_with_parent.__name__ for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name=_exit_with_parent.__name__, daemon=True).start()
