"""Folders of uploads to come, one for each Trainer of each process; those of killed processes are removed.

Apart from the rest, without the client, for runs that upload nothing remove them too.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from hftrainer.parallel.process_identity import is_gone, this_process

#: In the output folder; the underscore keeps it out of the repository.
_FOLDER = "_hub_uploads"
_count = itertools.count()


def new_folder(output_dir: str) -> Path:
    """A folder, not yet made, that no other Trainer and no other process has."""
    return Path(output_dir) / _FOLDER / "-".join([*this_process().split(" "), str(next(_count))])


def clear(output_dir: str) -> None:
    """Remove the folders of processes that have ended."""
    outer = Path(output_dir) / _FOLDER
    if not outer.is_dir():
        return
    for folder in outer.iterdir():
        host, *process = folder.name.rsplit("-", 3)
        if len(process) == 3 and is_gone(" ".join([host, *process[:2]])):
            shutil.rmtree(folder, ignore_errors=True)
    remove_if_empty(outer)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder unless there is something in it, or it is not there."""
    try:
        folder.rmdir()
    except OSError:
        return
