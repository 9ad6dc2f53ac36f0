"""The folders of upload snapshots in an output folder, one for each Trainer of each process, and deleting stale ones.

A folder is stale when its process has ended without deleting it. `hub/snapshots.py` fills these folders; the cleanup is
here, without the Hub client, because a run without uploads deletes stale folders too.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from hftrainer.parallel.process_identity import is_gone, this_process

#: Inside the output folder. The leading underscore keeps it out of the repository.
_FOLDER = "_hub_uploads"
_count = itertools.count()


def new_folder(output_dir: str) -> Path:
    """A path that no other Trainer and no other process uses. The folder is not created."""
    return Path(output_dir) / _FOLDER / "-".join([*this_process().split(" "), str(next(_count))])


def remove_stale(output_dir: str) -> None:
    """Delete the folders of processes that have ended."""
    outer = Path(output_dir) / _FOLDER
    if not outer.is_dir():
        return
    for folder in outer.iterdir():
        hostname, *process = folder.name.rsplit("-", 3)
        if len(process) == 3 and is_gone(" ".join([hostname, *process[:2]])):
            shutil.rmtree(folder, ignore_errors=True)
    remove_if_empty(outer)


def remove_if_empty(folder: Path) -> None:
    """Delete a folder if it exists and is empty."""
    try:
        folder.rmdir()
    except OSError:
        return
