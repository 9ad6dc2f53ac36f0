"""Starts the other processes of a run, and passes the ranks to Lightning."""

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
from hftrainer_lightning.private_api.strategies import start_script_again

logger = logging.getLogger(__name__)

#: Seconds for the other processes to report their errors, after this process has failed.
_GRACE_AFTER_FAILURE = 3.0


class LaunchedEnvironment(ClusterEnvironment):
    """Passes this process's ranks to Lightning, without reading or writing `os.environ`.

    Lightning guesses which of its own environments applies, and some clear the launcher's variables when a run ends.

    Args:
        rank_info: the ranks of this process.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    def creates_processes_externally(self) -> bool:
        """True: the processes are running before Lightning starts."""
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
        """Do nothing: the launcher has set the world size."""

    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self._rank_info.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set the rank."""

    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self._rank_info.local_rank

    def node_rank(self) -> int:
        """Rank of this node. All nodes have the same number of processes."""
        return self._rank_info.rank // self._rank_info.local_world_size


def start_other_processes(rank_info: RankInfo, timeout: float) -> None:
    """Start the script once for each further device, if there is no launcher.

    All processes end together: the others exit with this one, and this one exits with a nonzero status when another
    fails, even after its own script has finished. The environment variables then hold the ranks of this process, as in
    the others.

    Args:
        rank_info: the ranks of this process.
        timeout: seconds for the others to exit after this process has ended without an error.
    """
    if rank_info.started:
        parent_pid = int(os.environ.get(PARENT_PID_VARIABLE, os.getpid()))
        if parent_pid != os.getpid():
            _exit_with_parent(parent_pid)
        return
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    launcher = start_script_again(LightningEnvironment(), rank_info.world_size)
    # Registered first, so it runs after the others have ended: this process hosts the store that connects them.
    disconnect_at_exit()
    atexit.register(_wait_for_other_ranks, launcher.procs, timeout)


def _wait_for_other_ranks(processes: list[subprocess.Popen[Any]], timeout: float) -> None:
    """Wait until the other ranks exit, only briefly after an exception in this process.

    Lightning kills this process when another fails, but checks only every few seconds.
    """
    has_failed = hasattr(sys, "last_value")
    deadline = time.monotonic() + (_GRACE_AFTER_FAILURE if has_failed else timeout)
    failures = []
    for rank, process in enumerate(processes, 1):
        try:
            status = process.wait(max(deadline - time.monotonic(), 0))
            if status:
                failures.append(f"rank {rank} exited with status {status}")
        except subprocess.TimeoutExpired:
            process.kill()
            failures.append(f"rank {rank} was still running after ddp_timeout={timeout:g} seconds, and was killed")
    if failures and not has_failed:
        logger.error("Rank 0 has finished, but %s.", ", ".join(failures))
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # An exception in an `atexit` handler would leave the exit status at 0.
        os._exit(1)


def _exit_with_parent(parent_pid: int) -> None:
    """Exit when the process that started this one has ended. Starts at most one thread."""
    if any(thread.name == _exit_with_parent.__name__ for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name=_exit_with_parent.__name__, daemon=True).start()
