"""Checkpoint folders as wholes: finding, staging, ordering and deleting them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_STAGING = "tmp-"


def _step_of(folder: Path) -> int | None:
    match = _CHECKPOINT.match(folder.name)
    return int(match.group(1)) if match and folder.is_dir() else None


def get_last_checkpoint(folder: str) -> str | None:
    """The `checkpoint-xxx` folder of the most optimizer steps in `folder`, or None."""
    steps = {step: path for path in Path(folder).iterdir() if (step := _step_of(path)) is not None}
    return os.path.join(folder, steps[max(steps)].name) if steps else None


@contextlib.contextmanager
def staged(folder: str) -> Iterator[str]:
    """A folder to write into that becomes `folder` when everything is in it, so that `folder` is whole or absent.

    On an exception the half-written folder is removed and `folder` stays as it was.
    """
    final = Path(folder)
    outer = final.with_name(_STAGING + final.name)
    staging = outer / final.name  # the same name, since overrides of `_save` read the step from it
    shutil.rmtree(outer, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield str(staging)
        if final.exists():  # an earlier run in the same output folder wrote the same step
            final.rename(outer / "replaced")
        staging.rename(final)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def sort_checkpoints(output_dir: str) -> list[str]:
    """The checkpoint folders, oldest first.

    By modification time, so that a fresh run in a used folder does not take an old run's higher step for newer; by
    step where all times lie within a second, as on file systems that do not keep them.
    """
    folders = [
        (path.stat().st_mtime, step, str(path))
        for path in Path(output_dir).iterdir()
        if (step := _step_of(path)) is not None
    ]
    times = [time for time, _, _ in folders]
    if times and max(times) - min(times) < 1.0:
        folders.sort(key=lambda entry: entry[1])
    else:
        folders.sort()
    return [path for _, _, path in folders]


def rotate_checkpoints(output_dir: str, save_total_limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best always stay."""
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(output_dir)
    kept = {checkpoints[-1]} if checkpoints else set()
    if best is not None:
        kept.add(str(Path(best)))
    surplus = len(checkpoints) - max(save_total_limit, len(kept))
    for checkpoint in [path for path in checkpoints if path not in kept][: max(surplus, 0)]:
        shutil.rmtree(checkpoint)


def keep_only(best: str, output_dir: str) -> None:
    """Delete every checkpoint but `best`: what `save_total_limit=1` leaves when a run ends."""
    for checkpoint in sort_checkpoints(output_dir):
        if not os.path.samefile(checkpoint, best):
            shutil.rmtree(checkpoint)
