"""Processes that a search with `n_jobs` has started: they run the script again, up to that search."""

from __future__ import annotations

import os

from hftrainer.errors import UnsupportedArgument

#: Environment variable that tells a worker what to take part in, as JSON: see `Jobs`.
WORKER = "HFTRAINER_SEARCH_WORKER"


def refuse_in_worker() -> None:
    """Refuse to train in a worker but in a search with `n_jobs`: it would write over what the script has trained.

    Raises:
        UnsupportedArgument: in a worker.
    """
    if WORKER in os.environ:
        raise UnsupportedArgument(
            "n_jobs starts the script again for each job, and it trains before this search, or searches without "
            "n_jobs: put the search with n_jobs first, or into a script of its own."
        )
