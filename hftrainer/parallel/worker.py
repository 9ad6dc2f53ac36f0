"""Processes that a search with `n_jobs` started: they run the script again, up to that search."""

from __future__ import annotations

import os

from hftrainer.errors import UnsupportedArgument

#: Environment variable that makes a process a worker. It holds the worker's assignment as JSON, see `Jobs._start`.
WORKER = "HFTRAINER_SEARCH_WORKER"


def refuse_in_worker() -> None:
    """Refuse to train in a worker outside its search, since that would overwrite the script's output.

    Raises:
        UnsupportedArgument: in a worker.
    """
    if WORKER in os.environ:
        raise UnsupportedArgument(
            "n_jobs runs the script again in each worker, and the script trains, or searches without n_jobs, before "
            "this search. Put the search with n_jobs first, or into a separate script."
        )
